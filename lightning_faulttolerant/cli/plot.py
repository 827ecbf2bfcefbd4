"""Charts as inline SVG with letters and lines of constant size at any width of the page.

Horizontal positions are percentages of the chart's width. The height is fixed, in pixels. SVG can't take percentages
for curves, so curves are in a separate, stretched picture, whose lines are not stretched.

Scales map values to places between 0 and 1, with ticks where a reader expects them. Long series are thinned without a
visible change: the extremes are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from lightning_faulttolerant.cli.html import Child, Markup, tag
from lightning_faulttolerant.cli.text import DAY, HOUR, MINUTE, duration_text, short_text

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


def value_scale(values: Iterable[float]) -> Scale:
    """Return the scale of measured values. It is logarithmic if they are positive and span more than a factor of 40.

    Args:
        values: Any values; those that are not finite don't count.
    """
    finite = [min(max(value, -_LARGEST), _LARGEST) for value in values if math.isfinite(value)]
    low, high = min(finite, default=0.0), max(finite, default=1.0)
    if low > 0 and high > _LOG_FROM_RATIO * max(low, _SMALLEST):
        return _log_scale(max(low, _SMALLEST), high, num_ticks=5)
    if low > 0 and low < 0.4 * high:
        low = 0.0  # a curve is easier to judge with its zero in view
    return _linear_scale(low, high, num_ticks=5)


def count_scale(low: int, high: int) -> Scale:
    """Return the scale of a count. It ends where the count ends, and has no ticks between integers.

    Args:
        low: The first count.
        high: The last count.
    """
    high = max(high, low + 1)
    step = max(1.0, _nice_step((high - low) / 6))
    return Scale(low=low, high=high, ticks=_ticks_between(low, high, step, lambda value: short_text(value, step=step)))


def size_scale(high: float, *, text: Callable[[float], str] | None = None) -> Scale:
    """Return the scale of a quantity that begins at 0.

    Args:
        high: The greatest value.
        text: Function that formats a tick; few digits by default.
    """
    scale = _linear_scale(0.0, high if math.isfinite(high) and high > 0 else 1.0, num_ticks=3)
    if text is None:
        return scale
    return Scale(
        low=scale.low,
        high=scale.high,
        ticks=tuple(Tick(place=tick.place, text=text(tick.place * scale.high)) for tick in scale.ticks),
    )


def elapsed_scale(seconds: float) -> Scale:
    """Return the scale of the time since the beginning, with ticks at whole units.

    Args:
        seconds: Duration of the scale.
    """
    high = seconds if math.isfinite(seconds) and seconds > 0 else 1.0
    step = _nice_seconds(high / 7)
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


def _linear_scale(low: float, high: float, *, num_ticks: int) -> Scale:
    if not high - low > 1e-9 * max(abs(low), abs(high)):
        room = abs(low) * 0.1 or 1.0
        low, high = low - room, high + room
    step = _nice_step((high - low) / num_ticks)
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


WIDTH = 1000
"""Width of a stretched picture in units."""

_NUM_COLUMNS = 500
_NUM_READOUTS = 320
_UNIT_FROM, _UNIT_FROM_NARROW = 0.88, 0.72  # where the unit's label begins, and where it may begin on a phone
_MARK = "M0 0L-4.5 -8H4.5Z"


@dataclass(frozen=True, kw_only=True, slots=True)
class Area:
    """The area of a curve: its scales and its part of the chart's height.

    Args:
        x: Horizontal scale, from left to right.
        y: Vertical scale, from bottom to top.
        top: Upper edge, in pixels from the top of the chart.
        height: Height in pixels.
    """

    x: Scale
    y: Scale
    height: int
    top: int = 0

    def down(self, value: float) -> float:
        """Return the position of a value, in pixels from the top of the chart.

        Args:
            value: A value on the scale `y`.
        """
        return round(self.top + self.height * (1 - self.y.place(value)), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Readout:
    """The text that is shown while a pointer is over a place of a chart.

    Args:
        x: The place, on the scale of the chart.
        text: The text.
        ys: Heights of dots, in pixels from the top; nan for none.
    """

    x: float
    text: str
    ys: tuple[float, ...] = ()


def percent(share: float) -> str:
    """Return a share in the form that SVG expects.

    Args:
        share: Share from 0 to 1.
    """
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def grid(area: Area) -> Markup:
    """Return a line across the chart for each tick of the scale `y`, with its label on the left.

    Args:
        area: The area of the chart.
    """
    return tag(
        "g",
        (
            (
                tag("line", x1="0", x2="100%", y1=y, y2=y),
                tag("text", tick.text, x="-10", y=y, dy=".35em"),
            )
            for tick in area.y.ticks
            for y in (round(area.top + area.height * (1 - tick.place), 1),)
        ),
        class_="grid",
    )


def axis(scale: Scale, *, y: float, unit: str = "") -> Markup:
    """Return the labels of the ticks below a chart. A narrow page leaves out every second one.

    Args:
        scale: Horizontal scale, from left to right.
        y: Position in pixels from the top of the chart.
        unit: The unit, written at the right end.
    """
    texts = []
    for index, tick in enumerate(scale.ticks):
        is_minor = index % 2 == 1 or (unit and tick.place > _UNIT_FROM_NARROW)
        if not unit or tick.place < _UNIT_FROM:
            class_ = "minor" if is_minor else None
            texts.append(tag("text", tick.text, x=percent(tick.place), y=y, dy="1.5em", class_=class_))
    last = tag("text", unit, x="100%", y=y, dy="1.5em", class_="end") if unit else None
    return tag("g", texts, last, class_="axis")


def curve(area: Area, points: Sequence[Point], *, class_: str) -> Markup:
    """Return a line through points, thinned to what is visible. Values that are not finite leave a gap.

    Args:
        area: The area of the curve.
        points: Points from left to right.
        class_: Style class.
    """
    lines = (_line(area, thinned(piece, num_columns=_columns(area.x, piece))) for piece in pieces(points))
    return tag("path", d="".join(lines), class_=f"curve {class_}")


def stretched(height: int, *children: Child) -> Markup:
    """Return a picture of curves that is as wide as the chart.

    Args:
        height: Height of the chart in pixels.
        children: Curves.
    """
    return tag(
        "svg",
        *children,
        viewBox=f"0 0 {WIDTH} {height}",
        preserveAspectRatio="none",
        width="100%",
        height=height,
        class_="stretched",
    )


def bar(start: float, end: float, *, y: float, height: float, class_: str, title: str) -> Markup:
    """Return a bar between two places.

    Args:
        start: Share of the chart's width at the bar's beginning.
        end: Share of the chart's width at its end.
        y: Upper edge in pixels.
        height: Height in pixels.
        class_: Style class.
        title: Text that is shown while a pointer rests on the bar.
    """
    width = max(end - start, 0.0004)
    return tag("rect", tag("title", title), x=percent(start), width=percent(width), y=y, height=height, class_=class_)


def mark(place: float, *, y: float, foot: float, class_: str, title: str) -> Markup:
    """Return a small triangle that points down at a place, and a thin line from it to its foot.

    Args:
        place: Share of the chart's width.
        y: Position of the tip in pixels.
        foot: Lower end of the line in pixels.
        class_: Style class.
        title: Text that is shown while a pointer rests on the mark.
    """
    line = tag("line", y1=y, y2=foot)
    tip = tag("svg", tag("path", d=_MARK), y=y)
    return tag("svg", tag("title", title), line, tip, x=percent(place), class_=f"mark {class_}")


def ticks(places: Sequence[float], *, y: float, height: float, class_: str) -> Markup:
    """Return short vertical lines. There may be many: lines at the same place are drawn once.

    Args:
        places: Shares of the chart's width.
        y: Upper ends in pixels.
        height: Height in pixels.
        class_: Style class.
    """
    units = sorted({round(WIDTH * place) for place in places})
    line = "".join(f"M{unit} {y:g}v{height:g}" for unit in units)
    return stretched(round(y + height), tag("path", d=line, class_=f"curve {class_}"))


def chart(
    name: str, *children: Child, height: int, scale: Scale | None = None, readouts: Sequence[Readout] = ()
) -> Markup:
    """Return a chart with the data for its script's readouts.

    Args:
        name: Description of the chart for screen readers.
        children: Content of the chart.
        height: Height in pixels, without the labels below the chart.
        scale: Horizontal scale, from left to right; needed for `readouts`.
        readouts: Readouts from left to right; they are thinned.
    """
    data = None
    cursor: Child = None
    if scale is not None and readouts:
        kept = spread(readouts, number=_NUM_READOUTS)
        rows = [[round(WIDTH * scale.place(each.x), 1), each.text, *_finite(each.ys)] for each in kept]
        data = json.dumps(rows, separators=(",", ":"), ensure_ascii=False)
        dots = (tag("circle", r=4, class_="dot") for _ in range(max(len(each.ys) for each in kept)))
        cursor = tag("g", tag("line", y1="0", y2=height), dots, class_="cursor", visibility="hidden")
    return tag("svg", *children, cursor, role="img", aria_label=name, height=height, class_="plot", data_readouts=data)


def _finite(values: Sequence[float]) -> list[float | None]:
    return [round(value, 1) if value == value else None for value in values]


def _line(area: Area, points: Sequence[Point]) -> str:
    if len(points) == 1:
        points = [points[0], points[0]]  # a dot, drawn by the round cap of its line
    places = (f"{_short(WIDTH * area.x.place(x))} {_short(area.down(y))}" for x, y in points)
    return "M" + "L".join(places)


def _columns(scale: Scale, piece: Sequence[Point]) -> int:
    return max(1, round(_NUM_COLUMNS * (scale.place(piece[-1][0]) - scale.place(piece[0][0]))))


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


Point: TypeAlias = tuple[float, float]

_Item = TypeVar("_Item")


def pieces(points: Sequence[Point]) -> list[list[Point]]:
    """Return the stretches of a series between values that are not finite.

    Args:
        points: Points in the order in which a line joins them.
    """
    found: list[list[Point]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            found[-1].append((x, y))
        elif found[-1]:
            found.append([])
    return [piece for piece in found if piece]


def thinned(points: Sequence[Point], *, num_columns: int) -> list[Point]:
    """Return the first, lowest, highest and last point of each column. The thinned curve looks the same.

    Args:
        points: Points from left to right.
        num_columns: Assumed number of columns of the picture.
    """
    if len(points) <= 4 * num_columns:
        return list(points)
    left, width = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    columns: dict[int, list[Point]] = {}
    for point in points:
        columns.setdefault(min(int((point[0] - left) / width * num_columns), num_columns - 1), []).append(point)
    kept: list[Point] = []
    for column in columns.values():
        least = min(range(len(column)), key=lambda index: column[index][1])
        greatest = max(range(len(column)), key=lambda index: column[index][1])
        kept.extend(column[index] for index in sorted({0, least, greatest, len(column) - 1}))
    return kept


def highest(points: Sequence[Point], *, num_columns: int) -> list[Point]:
    """Return the highest point of each column of a series, for bars that would cover each other.

    Args:
        points: Points from left to right.
        num_columns: Assumed number of columns of the picture.
    """
    if len(points) <= num_columns:
        return list(points)
    left, width = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    columns: dict[int, Point] = {}
    for point in points:
        column = min(int((point[0] - left) / width * num_columns), num_columns - 1)
        columns[column] = max(columns.get(column, point), point, key=lambda each: each[1])
    return list(columns.values())


def spread(items: Sequence[_Item], *, number: int) -> list[_Item]:
    """Return some of the items, evenly spread, including the first and the last.

    Args:
        items: Any items.
        number: Maximum number of items, from 2.
    """
    if len(items) <= number:
        return list(items)
    return [items[round(index * (len(items) - 1) / (number - 1))] for index in range(number)]
