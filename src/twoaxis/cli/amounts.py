"""Bytes, counts, seconds and changes as the tables of a plan print them."""


def bytes_text(value: float) -> str:
    """Bytes in the largest unit that they reach.

    Example:
        >>> bytes_text(8192)
        '8.19 kB'
    """
    from twoaxis.planner.page.written import BYTES, amount

    return amount(value, BYTES)


def count_text(value: float) -> str:
    """A count: whole below 1000, else in the largest unit that it reaches.

    Example:
        >>> count_text(30), count_text(67_112_960)
        ('30', '67.1 M')
    """
    from twoaxis.planner.page.written import COUNTS, amount

    return f"{value:.0f}" if abs(value) < 1000 else amount(value, COUNTS)


def seconds_text(value: float) -> str:
    """Seconds in the largest unit that they reach.

    Example:
        >>> seconds_text(0.0123)
        '12.3 ms'
    """
    from twoaxis.planner.page.written import SECONDS, amount

    return amount(value, SECONDS)


def change_text(ratio: float) -> str:
    """What something adds to the control, as a signed percentage.

    Example:
        >>> change_text(0.0123)
        '+1.2 %'
    """
    from twoaxis.planner.quantities import change_text as text

    return text(ratio)
