"""Formats numbers for readers, with sign, unit, and few digits.

Amounts with units use the code that the planner's page runs in a browser, so that both agree.
"""

from collections.abc import Callable

from twoaxis.planner.formulas import written
from twoaxis.planner.formulas.written import BYTES, COUNTS, MINUS, SECONDS, amount

percent = written.percent
"""Formats a share in percent, whole from 100 % on."""

TIMES = "\u00d7"
"""The multiplication sign."""

MISSING = "\u2014"
"""Mark of a missing value."""

_LARGE = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count(value: float) -> str:
    """Formats a count with three digits and a unit prefix.

    Example:
        >>> count(2_359_296), count(950)
        ('2.36 M', '950')
    """
    for size, prefix in _LARGE:
        if value >= 0.9995 * size:
            scaled = value / size
            return f"{scaled:.{max(0, 2 - (scaled >= 9.995) - (scaled >= 99.95))}f} {prefix}"
    return f"{value:.0f}"


def loss(value: float) -> str:
    """Formats a loss in nats per token.

    Example:
        >>> loss(4.56789)
        '4.5679'
    """
    return f"{value:.4f}"


def signed(value: float) -> str:
    """Formats a difference of losses with its sign.

    Example:
        >>> signed(-0.0312), signed(0.5), signed(-0.00001)
        ('−0.0312', '+0.5000', '0.0000')
    """
    text = f"{abs(value):.4f}"
    return text if float(text) == 0 else f"{MINUS if value < 0 else '+'}{text}"


def interval(low: float, high: float) -> str:
    """Formats an interval of differences.

    Example:
        >>> interval(-0.05, 0.01)
        '−0.0500 to +0.0100'
    """
    return f"{signed(low)} to {signed(high)}"


def ratio(value: float) -> str:
    """Formats a ratio to the control.

    Example:
        >>> ratio(0.8765)
        '0.88×'
    """
    return f"{value:.2f}{TIMES}"


def probability(value: float) -> str:
    """Formats a p value or a power.

    Example:
        >>> probability(0.0004), probability(0.25), probability(0.99996)
        ('below 0.001', '0.250', 'above 0.999')
    """
    if value < 0.001:
        return "below 0.001"
    return "above 0.999" if 0.999 < value < 1 else f"{value:.3f}"


def percentage(value: float) -> str:
    """Formats a fraction in percent.

    Example:
        >>> percentage(0.98765), percentage(1)
        ('98.8 %', '100.0 %')
    """
    return f"{100 * value:.1f} %"


def memory(n_bytes: float) -> str:
    """Formats bytes in MiB or GiB.

    Example:
        >>> memory(512 * 2**20), memory(3 * 2**30)
        ('512 MiB', '3.00 GiB')
    """
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 1023.5 * 2**20 else f"{n_bytes / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    """Formats a duration in seconds, minutes or hours.

    Example:
        >>> duration(0.01234), duration(26.4), duration(754), duration(9000)
        ('0.0123 s', '26.4 s', '12.6 min', '2.50 h')
    """
    if seconds >= 5400:
        return f"{seconds / 3600:.2f} h"
    if seconds >= 299.95:
        return f"{seconds / 60:.1f} min"
    return f"{seconds:.1f} s" if seconds >= 9.995 else f"{seconds:.3g} s"


def replicates(n: int) -> str:
    """Formats a number of replicates.

    Example:
        >>> replicates(1), replicates(12)
        ('1 replicate', '12 replicates')
    """
    return f"{n} replicate" + ("" if n == 1 else "s")


def bytes_text(value: float) -> str:
    """Formats bytes in the largest decimal unit not above them.

    Example:
        >>> bytes_text(8192)
        '8.19 kB'
    """
    return amount(value, BYTES)


def count_text(value: float) -> str:
    """Formats a count: whole below 1000, else in thousands, millions, billions or trillions.

    Example:
        >>> count_text(30), count_text(67_112_960)
        ('30', '67.1 M')
    """
    return amount(value, COUNTS)


def short_count(value: float) -> str:
    """Formats a count for a sentence, without trailing zeros.

    Example:
        >>> short_count(1_000_000), short_count(1_250_000), short_count(30)
        ('1 M', '1.25 M', '30')
    """
    number, _, unit = count_text(value).partition(" ")
    return f"{number.rstrip('0').rstrip('.')} {unit}" if "." in number else " ".join(filter(None, (number, unit)))


def seconds_text(value: float) -> str:
    """Formats seconds in the largest of s, ms and µs not above them.

    Example:
        >>> seconds_text(0.0123)
        '12.3 ms'
    """
    return amount(value, SECONDS)


def change(ratio: float) -> str:
    """Formats a relative change as a signed percentage.

    Example:
        >>> change(0.0123), change(-0.5), change(-0.00001), change(12.5)
        ('+1.2 %', '−50.0 %', '+0.0 %', '+1,250.0 %')
    """
    return f"{round(100 * ratio, 1) + 0.0:+,.1f} %".replace("-", MINUS)


def significant(value: float) -> str:
    """Formats a number with three significant digits, or whole from 1000 on.

    Example:
        >>> significant(0.012345), significant(1e-7), significant(12345.6)
        ('0.0123', '1e-07', '12,346')
    """
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def decimal(value: float) -> str:
    """Formats a measured number with four decimals, or whole from 1000 on.

    Example:
        >>> decimal(4.56789), decimal(12345.6)
        ('4.5679', '12,346')
    """
    return f"{value:,.4f}" if abs(value) < 1000 else f"{value:,.0f}"


def plain(value: object, fraction: Callable[[float], str] = significant) -> str:
    """Formats a value of any type: integers with separators, floats by `fraction`, text unchanged.

    Example:
        >>> plain(12345), plain(0.012345), plain("none"), plain(True)
        ('12,345', '0.0123', 'none', 'yes')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return fraction(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
