"""Numbers as text, the same in Python and in a browser."""

SECONDS = [[1, "s"], [0.001, "ms"], [0.000001, "µs"]]
BYTES = [[1000000000000, "TB"], [1000000000, "GB"], [1000000, "MB"], [1000, "kB"], [1, "B"]]
COUNTS = [[1000000000000, "T"], [1000000000, "B"], [1000000, "M"], [1000, "k"], [1, ""]]
MINUS = "\u2212"


def fixed(value: float, places: int) -> str:
    """A number with so many decimals, as code reads it.

    Example:
        >>> fixed(2.345, 2), fixed(-0.04, 1), fixed(1234.5, 0)
        ('2.35', '0.0', '1235')
    """
    scale = 1
    for _ in range(places):
        scale = scale * 10
    scaled = int(abs(value) * scale + 0.5)
    sign = "-" if value < 0 and scaled > 0 else ""
    if places == 0:
        return sign + str(scaled)
    rest = str(scaled % scale)
    while len(rest) < places:
        rest = "0" + rest
    return sign + str(scaled // scale) + "." + rest


def three_digits(value: float) -> str:
    """A number with three digits, or with all digits of its whole part.

    Example:
        >>> three_digits(1.2345), three_digits(12.345), three_digits(1234.5)
        ('1.23', '12.3', '1235')
    """
    size = abs(value)
    if size >= 100:
        return fixed(value, 0)
    return fixed(value, 1) if size >= 10 else fixed(value, 2)


def amount(value: float, units: list) -> str:
    """A number in the largest unit not above it, after rounding to three digits; whole without a unit.

    Example:
        >>> amount(0.0123, SECONDS), amount(8e10, BYTES), amount(0, BYTES), amount(999.6e6, BYTES), amount(2, COUNTS)
        ('12.3 ms', '80.0 GB', '0', '1.00 GB', '2')
    """
    if value < 0:
        return MINUS + amount(0 - value, units)
    if value == 0:
        return "0"
    for unit in units:
        if value >= 0.9995 * unit[0]:
            return three_digits(value / unit[0]) + " " + unit[1] if unit[1] != "" else fixed(value, 0)
    last = units[len(units) - 1]
    return three_digits(value / last[0]) + " " + last[1] if last[1] != "" else fixed(value, 0)


def percent(share: float) -> str:
    """A share in percent.

    Example:
        >>> percent(0.0123), percent(2.5), percent(-0.015), percent(-0.0001)
        ('1.2 %', '250 %', '−1.5 %', '0.0 %')
    """
    size = fixed(100 * abs(share), 1 if abs(share) < 0.9995 else 0)
    return (MINUS if share < 0 and size != "0.0" else "") + size + " %"


def place(value: float) -> str:
    """A coordinate in a figure, in tenths of a pixel."""
    return fixed(value, 1)


def log2_of(value: float) -> float:
    """The logarithm to base 2 to 20 binary places, by arithmetic that is the same in both languages.

    Example:
        >>> log2_of(8), round(log2_of(10), 4)
        (3.0, 3.3219)
    """
    result = 0.0
    while value >= 2:
        value = value / 2
        result = result + 1
    while value < 1:
        value = value * 2
        result = result - 1
    part = 0.5
    for _ in range(20):
        value = value * value
        if value >= 2:
            value = value / 2
            result = result + part
        part = part / 2
    return result
