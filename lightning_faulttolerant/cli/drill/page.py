"""The page of a drill: its verdict, the curves and batches of its runs, the strikes, and the difference."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from lightning_faulttolerant.cli import html, plot
from lightning_faulttolerant.cli.drill.result import (
    DIFFERS,
    EXACT,
    NOT_RESUMED,
    DrillResult,
    Point,
    RunOfDrill,
    Strike,
    equal_before,
)
from lightning_faulttolerant.cli.html import Child, Markup, document, pairs, stats, table, tag
from lightning_faulttolerant.cli.plot import Area, Readout, Scale, count_scale, spread, value_scale
from lightning_faulttolerant.cli.text import count_text, duration_text, moment_text, plural, value_text

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
    height = lanes_top + (round(len(lanes) * _pitch(lanes)) if lanes else 0)
    drawn = plot.chart(
        _name(result, num_batches),
        plot.grid(area) if has_losses else None,
        _difference_line(result, scale, height),
        _lanes(lanes, scale, lanes_top),
        plot.stretched(area.top + area.height, _loss_curves(result, area)) if has_losses else None,
        [_strike_mark(strike, scale, height) for strike in result.strikes],
        plot.axis(scale, y=height, unit="batches"),
        height=height,
        scale=scale,
        readouts=_readouts(result, area) if has_losses else (),
    )
    caption = _caption(max(runs, key=lambda run: len(run.curve)), is_log=area.y.is_log)
    return html.figure(drawn, legend=_legend(result, has_losses=has_losses), caption=caption)


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


def _loss_curves(result: DrillResult, area: Area) -> list[Markup]:
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
    return html.legend(*entries)


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


_NUM_VALUES = 12


def page(result: DrillResult) -> str:
    """Return the page of a drill, a single file that makes no requests.

    Args:
        result: The result of the drill.
    """
    return document(
        f"Drill: {result.verdict.word}",
        _head(result),
        _difference(result),
        _cause(result),
        _last_words(result),
        _curves(result),
        _strikes(result),
        _compared(result),
        _surroundings(result),
        _foot(result),
    )


def _head(result: DrillResult) -> Markup:
    verdict = result.verdict
    class_ = {EXACT: "is-exact", DIFFERS: "is-differs", NOT_RESUMED: "is-differs"}.get(verdict.word)
    return tag(
        "header",
        tag("p", "Drill of ", tag("b", _script(result.command)), ", ", moment_text(result.began), class_="over"),
        tag("h1", _capitalized(verdict.word)),
        tag("p", verdict.text, class_="lead"),
        _list(verdict.notes),
        _stats(result),
        class_=class_,
    )


def _script(command: tuple[str, ...]) -> str:
    """Return the name of the Python file in a command, or the name of the command itself."""
    return next((Path(word).name for word in command if word.endswith(".py")), Path(command[0]).name)


def _stats(result: DrillResult) -> Markup:
    run = result.interrupted or result.uninterrupted
    num_twice = sum(strike.num_twice for strike in result.strikes)
    entries = [("strikes", f"{len(result.strikes)} of {result.num_wanted}")]
    if run is not None:
        entries.append(("training batches", count_text(len(run.curve))))
    if run is not None and run.num_evaluated:
        entries.append(("evaluation batches", count_text(run.num_evaluated)))
    if result.interrupted is not None:
        entries.append(("done twice", count_text(num_twice)))
        entries.append(("processes", count_text(result.interrupted.num_processes)))
    return stats(*entries, ("for the whole drill", duration_text(result.seconds)))


def _difference(result: DrillResult) -> Child:
    difference = result.verdict.difference
    if difference is None:
        return None
    other = "interrupted" if result.interrupted is not None else "the same once more"
    shown = difference.values[:_NUM_VALUES]
    rows = (
        (
            tag("span", value.name, class_="name"),
            tag("span", value.expected, class_="mono", data_name="uninterrupted"),
            tag("span", value.found, class_="mono found", data_name=other),
        )
        for value in shown
    )
    heads = (tag("span", text, class_="head") for text in ("", "uninterrupted", other))
    left_out = len(difference.values) - len(shown)
    process = f", in process {difference.process + 1} of the interrupted run" if result.interrupted is not None else ""
    rank = f", on rank {difference.rank}" if difference.rank else ""
    return tag(
        "section",
        tag("h2", "The first difference"),
        tag("p", f"{_capitalized(difference.place)}{rank}{process}. {equal_before(difference, result.strikes)}"),
        tag("div", heads, rows, class_="values"),
        tag("p", f"and {plural(left_out, 'value')} more", class_="soft") if left_out > 0 else None,
        tag("p", "Equal in it: ", ", ".join(difference.equal), ".", class_="soft") if difference.equal else None,
    )


def _cause(result: DrillResult) -> Child:
    cause = result.verdict.cause
    if cause is None:
        return None
    return tag(
        "section",
        tag("h2", "Likely cause: ", cause.part),
        tag("p", cause.text),
        [tag("h3", "What to do"), _list(cause.advice)] if cause.advice else None,
    )


def _last_words(result: DrillResult) -> Child:
    if not result.last_words:
        return None
    text = "\n".join(result.last_words)
    return tag("section", tag("h2", "The end of its output"), tag("code", text, class_="command"))


def _curves(result: DrillResult) -> Child:
    drawn = picture(result)
    return None if drawn is None else tag("section", tag("h2", "Both runs, batch by batch"), drawn)


def _strikes(result: DrillResult) -> Child:
    if not result.strikes:
        return None
    header = ("strike", "hit", "batches done", "continued from", "done twice", "process ran", "to the next batch")
    rows = [_strike_row(strike) for strike in result.strikes]
    right = ("batches done", "done twice", "process ran", "to the next batch")
    return tag("section", tag("h2", "Strikes"), table(header, rows, right=right, nouns="strikes"))


def _strike_row(strike: Strike) -> list[Child]:
    hook = f" ({strike.hook})" if strike.hook else ""
    wait = "never" if strike.seconds_to_first_batch is None else duration_text(strike.seconds_to_first_batch)
    return [
        f"{strike.number}. {strike.kind}{hook}",
        strike.place,
        count_text(strike.at),
        strike.resumed_text,
        count_text(strike.num_twice),
        duration_text(strike.seconds_in_process),
        wait,
    ]


def _compared(result: DrillResult) -> Child:
    runs = [run for run in (result.uninterrupted, result.repeated, result.interrupted) if run is not None]
    if not runs:
        return None
    header = ("run", "batches", "evaluation batches", "validations", "times logged", "autosaves", "processes", "took")
    return tag(
        "section",
        tag("h2", "What was compared" if _is_compared(result) else "What ran"),
        table(header, [_run_row(run) for run in runs], right=header[1:], nouns="runs"),
    )


def _is_compared(result: DrillResult) -> bool:
    has_other = result.interrupted is not None or result.repeated is not None
    return has_other and result.verdict.word != NOT_RESUMED


def _run_row(run: RunOfDrill) -> list[Child]:
    return [
        run.name if run.is_complete else f"{run.name}, did not finish",
        count_text(len(run.curve)),
        count_text(run.num_evaluated),
        count_text(run.num_validations),
        count_text(run.num_logs),
        count_text(run.num_autosaves),
        count_text(run.num_processes),
        duration_text(run.seconds),
    ]


def _surroundings(result: DrillResult) -> Markup:
    run = result.uninterrupted
    return tag(
        "section",
        tag("h2", "Command and surroundings"),
        tag("code", shlex.join(result.command), class_="command"),
        pairs(
            ("kind of strikes", result.kind),
            ("seed of their moments", str(result.seed)),
            ("ranks", None if run is None else count_text(run.num_ranks)),
            *((name, text) for name, text in result.versions.items()),
            ("ledgers and output", tag("code", result.directory) if result.directory else None),
        ),
    )


def _foot(result: DrillResult) -> Child:
    if not _is_compared(result):
        return None
    text = (
        "Compared bit for bit: the samples and the contents of each batch, the states of the generators, losses and "
        "learning rates, what steps and ends of evaluations returned, the results of validation runs, logged values, "
        "the final weights and optimizers."
    )
    return tag("footer", tag("p", text))


def _list(texts: tuple[str, ...]) -> Child:
    return tag("ul", (tag("li", text) for text in texts)) if texts else None


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
