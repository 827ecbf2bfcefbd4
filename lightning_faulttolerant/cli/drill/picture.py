"""The picture of a drill: the loss of both runs over each other, and below it the batches that each process did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from lightning_faulttolerant.cli.drill.result import DrillResult, Point, RunOfDrill, Strike
from lightning_faulttolerant.cli.page import plot
from lightning_faulttolerant.cli.page.html import Child, Markup, tag
from lightning_faulttolerant.cli.page.numbers import plural, value_text
from lightning_faulttolerant.cli.page.plot import Area, Readout, spread
from lightning_faulttolerant.cli.page.scales import Scale, count_scale, value_scale

_HEAD = 26  # room for the strikes above the curves
_CURVES = 260
_GAP = 34
_LANES = 150
_LARGEST_LANE = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchStretch:
    """The batches that one process of the interrupted run did.

    Args:
        process: Its number, from 0.
        begin: Batches done before its first one.
        counts_until: The batches up to here count in the end; the others were done again.
        end: Batches done when the process was struck, or at the end of the run.
    """

    process: int
    begin: int
    counts_until: int
    end: int


def stretches(strikes: Sequence[Strike], done_by: Sequence[int]) -> list[BatchStretch]:
    """Return the batches of each process, from where it continued to where it was struck.

    Args:
        strikes: Of the drill, in order.
        done_by: For each batch of the run, the number of the process whose result counts. Processes that ended before
            they trained anything new are numbered, but have no strike.
    """
    begins = [0, *(strike.resumed_at for strike in strikes)]
    ends = [*(strike.at for strike in strikes), len(done_by)]
    lowest = list(accumulate(reversed(begins), min))[::-1]  # how far back later processes went
    made: list[BatchStretch] = []
    for index, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        counts_until = max(begin, min([end, *lowest[index + 1 : index + 2]]))
        following = made[-1].process + 1 if made else 0
        process = done_by[begin] if begin < min(counts_until, len(done_by)) else following
        made.append(BatchStretch(process=process, begin=begin, end=max(end, begin), counts_until=counts_until))
    return made


def picture(result: DrillResult) -> Markup | None:
    """Return the picture, or None if no run trained.

    Args:
        result: The result of the drill.
    """
    runs = [run for run in (result.uninterrupted, result.repeated, result.interrupted) if run is not None and run.curve]
    if not runs:
        return None
    num_batches = max(len(run.curve) for run in runs)
    scale = count_scale(0, num_batches)
    losses = [point.loss for run in runs for point in run.curve if point.loss is not None]
    interrupted = result.interrupted if result.strikes else None
    lanes = stretches(result.strikes, [point.process for point in interrupted.curve]) if interrupted is not None else []
    has_losses = any(math.isfinite(loss) for loss in losses)
    area = Area(x=scale, y=value_scale(losses), top=_HEAD, height=_CURVES if has_losses else 0)
    lanes_top = _HEAD + area.height + (_GAP if lanes and has_losses else 0)
    height = lanes_top + (_lane_height(lanes) if lanes else 0)
    drawn = plot.chart(
        _name(result, num_batches),
        plot.grid(area) if has_losses else None,
        _difference_line(result, scale, height),
        _lanes(lanes, scale, lanes_top),
        plot.stretched(area.top + area.height, _curves(result, area)) if has_losses else None,
        [_strike_mark(strike, scale, height) for strike in result.strikes],
        plot.axis(scale, y=height, unit="batches"),
        height=height,
        scale=scale,
        readouts=_readouts(result, area) if has_losses else (),
    )
    caption = _caption(max(runs, key=lambda run: len(run.curve)), is_log=area.y.is_log)
    return plot.figure(drawn, legend=_legend(result, has_losses=has_losses), caption=caption)


def _caption(run: RunOfDrill, *, is_log: bool) -> str:
    losses = [point.loss for point in run.curve if point.loss is not None]
    if not losses:
        return "the steps gave no losses"
    num_not_finite = sum(not math.isfinite(loss) for loss in losses)
    gap = f"; not finite, and not drawn, at {plural(num_not_finite, 'batch')}" if num_not_finite else ""
    return f"{'loss, logarithmic' if is_log and num_not_finite < len(losses) else 'loss'}{gap}"


def _name(result: DrillResult, num_batches: int) -> str:
    struck = plural(len(result.strikes), "strike")
    return f"Loss of both runs over {plural(num_batches, 'batch')}, with {struck}"


def _lane_height(lanes: Sequence[BatchStretch]) -> int:
    return round(len(lanes) * _pitch(lanes))


def _pitch(lanes: Sequence[BatchStretch]) -> float:
    return min(_LARGEST_LANE, _LANES / len(lanes))


def _lanes(lanes: Sequence[BatchStretch], scale: Scale, top: int) -> Child:
    if not lanes:
        return None
    pitch = _pitch(lanes)
    indices = range(len(lanes))
    named = set(spread(indices, number=max(2, min(len(lanes), int(len(lanes) * pitch / _LARGEST_LANE)))))
    heading = tag("text", "process", x="-10", y=round(top + pitch / 2 - 13, 1), dy=".35em")
    drawn = (_lane(lanes[index], scale, top + index * pitch, pitch, is_named=index in named) for index in indices)
    return tag("g", heading, drawn, class_="lane")


def _lane(lane: BatchStretch, scale: Scale, y: float, pitch: float, *, is_named: bool) -> Child:
    height = round(min(pitch * 0.6, 8.0), 2)
    y = round(y + (pitch - height) / 2, 2)
    begin, counts_until, end = (scale.place(value) for value in (lane.begin, lane.counts_until, lane.end))
    number = lane.process + 1
    name = tag("text", str(number), x="-10", y=round(y + height / 2, 2), dy=".35em") if is_named else None
    done = f"process {number}: batches {lane.begin:,} to {lane.counts_until:,} count"
    again = f"process {number}: {plural(lane.end - lane.counts_until, 'batch')} done again by another"
    return [
        name,
        plot.bar(begin, counts_until, y=y, height=height, class_="good", title=done) if counts_until > begin else None,
        plot.bar(counts_until, end, y=y, height=height, class_="again", title=again) if end > counts_until else None,
    ]


def _strike_mark(strike: Strike, scale: Scale, height: int) -> Markup:
    title = f"strike {strike.number}: {strike.kind} in {strike.place}"
    return plot.mark(scale.place(strike.at), y=_HEAD - 10, foot=height, class_="fault", title=title)


def _difference_line(result: DrillResult, scale: Scale, height: int) -> Child:
    difference = result.verdict.difference
    if difference is None:
        return None
    place = scale.place(difference.number)
    anchor = "end" if place > 0.5 else "start"
    x = plot.percent(place)
    return tag(
        "g",
        tag("line", x1=x, x2=x, y1=0, y2=height),
        tag("text", "first difference", x=x, y=0, dy="-.5em", text_anchor=anchor),
        class_="differs",
    )


def _curves(result: DrillResult, area: Area) -> list[Markup]:
    drawn = ((result.uninterrupted, "wide pale"), (result.repeated, "dashed quiet"), (result.interrupted, "fine ink"))
    return [plot.curve(area, _points(run), class_=class_) for run, class_ in drawn if run is not None]


def _points(run: RunOfDrill) -> list[tuple[float, float]]:
    return [(point.number + 0.5, math.nan if point.loss is None else point.loss) for point in run.curve]


def _legend(result: DrillResult, *, has_losses: bool) -> Markup:
    entries = []
    if has_losses:
        drawn = (
            (result.uninterrupted, "wide pale", "uninterrupted"),
            (result.repeated, "line quiet", "once more"),
            (result.interrupted, "line ink", "interrupted"),
        )
        entries += [(class_, name) for run, class_, name in drawn if run is not None]
    if result.strikes:
        entries.append(("tip fault", "strike"))
        if result.interrupted is not None:
            entries += [("good", "what each process did"), ("again", "done again by the next")]
    return plot.legend(*entries)


def _readouts(result: DrillResult, area: Area) -> list[Readout]:
    first = result.uninterrupted or result.interrupted
    second = result.interrupted if first is result.uninterrupted else None
    others = {point.number: point for point in second.curve} if second is not None else {}
    kept = spread(first.curve, number=400) if first is not None else []
    return [_readout(point, others.get(point.number), area) for point in kept]


def _readout(point: Point, other: Point | None, area: Area) -> Readout:
    losses = [each.loss for each in (point, other) if each is not None and each.loss is not None]
    texts = list(dict.fromkeys(value_text(loss) for loss in losses))
    process = f"   process {other.process + 1}" if other is not None else ""
    text = f"epoch {point.epoch}, batch {point.batch}   loss {' / '.join(texts) or '-'}{process}"
    ys = tuple(area.down(loss) if math.isfinite(loss) else math.nan for loss in losses)
    return Readout(x=point.number + 0.5, text=text, ys=ys)
