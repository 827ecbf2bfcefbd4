"""Numbers and durations in readable form: few digits, a unit, and never rounded to look better than they are."""

from __future__ import annotations

import math

MINUTE, HOUR, DAY = 60, 3600, 86400

_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def count_text(number: int) -> str:
    """Return a count with thousands separators.

    Args:
        number: Any integer.

    Example:
        >>> count_text(1234567)
        '1,234,567'
    """
    return f"{number:,}"


def plural(number: int, noun: str, nouns: str | None = None) -> str:
    """Return a number with its noun.

    Args:
        number: Any integer.
        noun: The noun for one thing.
        nouns: The noun for other counts. By default, an s is appended, or es after endings like "batch" and "process".

    Example:
        >>> plural(1, "strike"), plural(1200, "batch"), plural(2, "child", "children")
        ('1 strike', '1,200 batches', '2 children')
    """
    ending = "es" if noun.endswith(("ch", "s")) else "s"
    return f"{number:,} {noun if number == 1 else nouns or noun + ending}"


def duration_text(seconds: float) -> str:
    """Return a duration in its two largest units.

    Args:
        seconds: Any duration; "?" if it is not finite.

    Example:
        >>> duration_text(0.0042), duration_text(4.21), duration_text(192), duration_text(7500), duration_text(9e5)
        ('4.2 ms', '4.2 s', '3 min 12 s', '2 h 5 min', '10 d 10 h')
    """
    if not math.isfinite(seconds):
        return "?"
    if seconds < 0:
        return f"-{duration_text(-seconds)}"
    if seconds == 0:
        return "0 s"
    if seconds < 0.9995:
        return f"{seconds * 1000:.2g} ms" if seconds < 0.0995 else f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, names in ((DAY, HOUR, ("d", "h")), (HOUR, MINUTE, ("h", "min")), (MINUTE, 1, ("min", "s"))):
        if whole >= large:
            first, second = divmod(round(whole / small), large // small)
            return f"{first:,} {names[0]} {second} {names[1]}" if second else f"{first:,} {names[0]}"
    return f"{whole} s"


def share_text(share: float) -> str:
    """Return a share in percent. A share below 1 is never shown as 100 %, and one above 0 is never shown as 0 %.

    Args:
        share: From 0 to 1; "?" if it is not finite.

    Example:
        >>> share_text(0.9423), share_text(0.99999), share_text(1), share_text(0.00001), share_text(0)
        ('94.2 %', '99.9 %', '100 %', '< 0.1 %', '0 %')
    """
    if not math.isfinite(share):
        return "?"
    if share in (0, 1):
        return f"{share:.0%}".replace("%", " %")
    if 0 < share < 0.001:
        return "< 0.1 %"
    percent = 100 * share
    return f"{min(percent, 99.9) if share < 1 else percent:.1f} %"


def value_text(value: float, *, digits: int = 5) -> str:
    """Return a measured value.

    Args:
        value: Any float.
        digits: Number of significant digits.

    Example:
        >>> value_text(0.123456789), value_text(float("nan")), value_text(1234567.0)
        ('0.12346', 'nan', '1.2346e+06')
    """
    return f"{value:.{digits}g}"


def short_text(value: float, *, step: float) -> str:
    """Return the label of a tick, with enough digits to distinguish it from the next tick.

    Args:
        value: A multiple of `step`.
        step: The distance to the next tick.

    Example:
        >>> short_text(0.25, step=0.05), short_text(15000, step=5000), short_text(4e6, step=2e6)
        ('0.25', '15,000', '4 M')
    """
    if value == 0:
        return "0"
    size = max(abs(value), step)
    if size < 1e-3 or size >= 1e15:
        digits = max(0, math.floor(math.log10(abs(value))) - _exponent(step)) if step else 0
        return f"{value:.{min(digits, 6)}e}"
    for factor, unit in _LARGE:
        if size >= max(factor, 1e5) and step >= factor / 100:
            return f"{value / factor:.{max(0, -_exponent(step / factor))}f} {unit}"
    return f"{value:,.{max(0, -_exponent(step))}f}"


def _exponent(step: float) -> int:
    """Return the decimal place of the last digit of a step, such as 0.25 (-2), 0.5 (-1) or 20 (1)."""
    place = math.floor(math.log10(step) + 1e-9)
    leading = step / 10.0**place
    return place if abs(leading - round(leading)) < 1e-6 else place - 1
