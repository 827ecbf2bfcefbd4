"""Numbers and durations in readable form: few digits, a unit, and never rounded to look better than they are.

Scales map values to places between 0 and 1, with ticks where a reader expects them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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


_SECONDS = (1, 2, 5, 10, 15, 30)
_LOG_FROM_RATIO = 40.0
_SMALLEST = 1e-305  # smaller numbers lose digits
_LARGEST = 1e300  # differences of larger numbers overflow a float


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """A labeled place on a scale.

    Args:
        place: From 0 to 1.
        text: Label of the tick.
    """

    place: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The mapping from values to places.

    Args:
        low: The value at 0.
        high: The value at 1; greater than `low`.
        ticks: Ticks with labels, from low to high.
        is_log: Whether the scale is logarithmic; `low` is then greater than 0.
    """

    low: float
    high: float
    ticks: tuple[Tick, ...] = ()
    is_log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"A scale goes from a value to a greater one; got {self.low} and {self.high}.")
        if self.is_log and self.low <= 0:
            raise ValueError(f"A logarithmic scale begins above 0; got {self.low}.")

    def place(self, value: float) -> float:
        """Return the place of a value, limited to 0 to 1.

        Args:
            value: Any value except nan.
        """
        value = min(max(value, self.low), self.high)
        if self.is_log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (value - self.low) / (self.high - self.low)


def value_scale(values: Iterable[float], *, num_ticks: int = 5) -> Scale:
    """Return the scale of measured values. It is logarithmic if they are positive and span more than a factor of 40.

    Args:
        values: Any values; those that are not finite don't count.
        num_ticks: Approximate number of ticks.
    """
    finite = [min(max(value, -_LARGEST), _LARGEST) for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if low > 0 and high > _LOG_FROM_RATIO * max(low, _SMALLEST):
        return _log_scale(max(low, _SMALLEST), high, num_ticks=num_ticks)
    if low > 0 and low < 0.4 * high:
        low = 0.0  # a curve is easier to judge with its zero in view
    return _linear_scale(low, high, num_ticks=num_ticks, widen=True)


def count_scale(low: int, high: int, *, num_ticks: int = 6) -> Scale:
    """Return the scale of a count. It ends where the count ends, and has no ticks between integers.

    Args:
        low: The first count.
        high: The last count.
        num_ticks: Approximate number of ticks.
    """
    high = max(high, low + 1)
    step = max(1.0, _nice_step((high - low) / num_ticks))
    return Scale(low=low, high=high, ticks=_ticks_between(low, high, step, lambda value: short_text(value, step=step)))


def size_scale(high: float, *, num_ticks: int = 3, text: Callable[[float], str] | None = None) -> Scale:
    """Return the scale of a quantity that begins at 0.

    Args:
        high: The greatest value.
        num_ticks: Approximate number of ticks.
        text: Function that formats a tick; few digits by default.
    """
    scale = _linear_scale(0.0, high if math.isfinite(high) and high > 0 else 1.0, num_ticks=num_ticks, widen=True)
    if text is None:
        return scale
    return Scale(
        low=scale.low,
        high=scale.high,
        ticks=tuple(Tick(place=tick.place, text=text(tick.place * scale.high)) for tick in scale.ticks),
    )


def elapsed_scale(seconds: float, *, num_ticks: int = 7) -> Scale:
    """Return the scale of the time since the beginning, with ticks at whole units.

    Args:
        seconds: Duration of the scale.
        num_ticks: Approximate maximum number of ticks.
    """
    high = seconds if math.isfinite(seconds) and seconds > 0 else 1.0
    step = _nice_seconds(high / num_ticks)
    return Scale(low=0.0, high=high, ticks=_ticks_between(0.0, high, step, tick_duration))


def tick_duration(seconds: float) -> str:
    """Return a duration as the label of a tick, without unneeded digits.

    Args:
        seconds: Duration, from 0.

    Example:
        >>> tick_duration(6.0), tick_duration(0.25), tick_duration(90)
        ('6 s', '0.25 s', '1 min 30 s')
    """
    return f"{seconds:.10g} s" if 0.01 <= seconds < MINUTE or seconds == 0 else duration_text(seconds)


def _linear_scale(low: float, high: float, *, num_ticks: int, widen: bool) -> Scale:
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    step = _nice_step((high - low) / num_ticks)
    if widen:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    return Scale(low=low, high=high, ticks=_ticks_between(low, high, step, lambda value: short_text(value, step=step)))


def _log_scale(low: float, high: float, *, num_ticks: int) -> Scale:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / num_ticks))
    factors = (1, 3) if last - first <= 3 else (1,)
    values = [factor * 10.0**power for power in range(first, last + 1, every) for factor in factors]
    low, high = low / 1.1, high * 1.1
    ends = Scale(low=low, high=high, is_log=True)
    ticks = tuple(
        Tick(place=ends.place(value), text=short_text(value, step=10.0 ** math.floor(math.log10(value))))
        for value in values
        if low <= value <= high
    )
    return Scale(low=low, high=high, ticks=ticks, is_log=True)


def _ticks_between(low: float, high: float, step: float, text: Callable[[float], str]) -> tuple[Tick, ...]:
    first = math.ceil(low / step - 1e-9)
    number = math.floor((high - first * step) / step + 1e-9) + 1
    return tuple(
        Tick(place=min(max(((first + index) * step - low) / (high - low), 0.0), 1.0), text=text((first + index) * step))
        for index in range(number)
    )


def _nice_step(step: float) -> float:
    """Return 1, 2, 2.5 or 5 times a power of ten, at least `step`."""
    power = 10.0 ** math.floor(math.log10(step))
    return next((nice * power for nice in (1, 2, 2.5, 5) if nice * power >= step * 0.999), 10 * power)


def _nice_seconds(step: float) -> float:
    if step < 1:
        return _nice_step(step)
    steps = [
        *_SECONDS,
        *(MINUTE * each for each in _SECONDS),
        *(HOUR * each for each in (1, 2, 3, 6, 12)),
        *(DAY * each for each in (1, 2, 7)),
    ]
    return next((float(each) for each in steps if each >= step), DAY * _nice_step(step / DAY))
