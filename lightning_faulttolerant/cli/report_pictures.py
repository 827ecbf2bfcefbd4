"""The pictures of a run: its use of time, its progress over the wall time, its autosaves, and the tree of its branches.

The tree is text: the ancestors of a run, and all that began from them, with what each has changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import final

from lightning_faulttolerant.cli import html, plot
from lightning_faulttolerant.cli.html import Child, Markup, tag
from lightning_faulttolerant.cli.plot import (
    Area,
    Point,
    Readout,
    Scale,
    count_scale,
    elapsed_scale,
    highest,
    size_scale,
    tick_duration,
)
from lightning_faulttolerant.cli.text import count_text, duration_text, plural, share_text
from lightning_faulttolerant.records import goodput
from lightning_faulttolerant.records.accounting import marks
from lightning_faulttolerant.records.history import Autosave, FitHistory, RunHistory
from lightning_faulttolerant.records.runs import Parent

KIND_NAMES = {
    goodput.TRAINING: "training that counted",
    goodput.EVALUATION: "evaluation that counted",
    goodput.DATA: "waiting for data",
    goodput.SAVING: "waiting for autosaves",
    goodput.OUTSIDE: "rest of the script",
    goodput.STARTING: "start of the first process",
    goodput.RESTORING: "restoring",
    goodput.REDONE: "work that was done again",
    goodput.HUNG: "hung",
    goodput.DOWN: "no process",
    goodput.RESTARTING: "starts of later processes",
}

_KINDS = {
    goodput.TRAINING: "good",
    goodput.EVALUATION: "evaluation",
    goodput.REDONE: "again",
    goodput.DATA: "data",
    goodput.SAVING: "saving",
    goodput.RESTORING: "restoring",
    goodput.RESTARTING: "restarting",
    goodput.STARTING: "starting",
    goodput.OUTSIDE: "outside",
    goodput.HUNG: "hung",
    goodput.DOWN: "idle",
}
"""The style class of each kind, in the order in which the kinds are shown."""

_HEAD = 16  # room for the faults above the curve
_CURVE = 230
_RIBBON_TOP = _HEAD + _CURVE + 20
_RIBBON = 22
_SAVES = 7
_BARS = 90
_NUM_SEGMENTS = 300  # with more segments, each column shows the shares of the kinds
_NUM_SLICES = 250
_NUM_MARKS = 60
_NARROW = 0.003  # share of the total time; shorter autosaves appear only below the ribbon
_NUM_COLUMNS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Leg:
    """The steps of one fit in one process, counted over the whole run, over the time since the run began.

    Args:
        process: Number of the process, from 1.
        counted: Points that count in the end.
        again: Points after those: a later process did these steps again.
        is_new: Whether no earlier process had begun this fit.
    """

    process: int
    counted: tuple[Point, ...]
    again: tuple[Point, ...]
    is_new: bool


def account_bar(account: goodput.Account) -> Markup:
    """Return a bar of the total time, split by kind, with a legend for its colors.

    Args:
        account: Seconds of each kind.
    """
    total = account.total or 1.0
    kinds = [(kind, getattr(account, kind)) for kind in _KINDS if getattr(account, kind) > 0]
    bars, at = [], 0.0
    for kind, seconds in kinds:
        title = f"{KIND_NAMES[kind]}: {duration_text(seconds)}, {share_text(seconds / total)}"
        bars.append(plot.bar(at / total, (at + seconds) / total, y=0, height=28, class_=_KINDS[kind], title=title))
        at += seconds
    name = "Where the time went: " + ", ".join(
        f"{KIND_NAMES[kind]} {share_text(value / total)}" for kind, value in kinds
    )
    drawn = tag("svg", bars, role="img", aria_label=name, height=28, class_="plot flush account")
    return tag(
        "figure", drawn, tag("ul", (_account_entry(kind, value, total) for kind, value in kinds), class_="account")
    )


def _account_entry(kind: str, seconds: float, total: float) -> Markup:
    return tag(
        "li",
        tag("i", class_=f"key {_KINDS[kind]}"),
        KIND_NAMES[kind],
        tag("b", duration_text(seconds)),
        tag("span", share_text(seconds / total)),
    )


def progress(chapter: goodput.ChapterReport) -> Markup:
    """Return the steps of a run over the wall time, above a ribbon with the activity of each process.

    Args:
        chapter: Report of the chapter.
    """
    scale = elapsed_scale(chapter.ended - chapter.began)
    found = legs(chapter)
    steps = [y for leg in found for _, y in (*leg.counted, *leg.again)]
    has_steps = any(steps)
    up = _CURVE if has_steps else -12
    area = Area(x=scale, y=count_scale(0, round(max(steps, default=1))), top=_HEAD, height=_CURVE)
    ribbon = _RIBBON_TOP - _CURVE + up
    height = ribbon + _RIBBON + _SAVES
    drawn = plot.chart(
        _name(chapter),
        plot.grid(area) if has_steps else None,
        _faults(chapter, scale, ribbon),
        plot.stretched(_HEAD + _CURVE, _curves(found, area)) if has_steps else None,
        tag("g", _ribbon(chapter, scale, ribbon)),
        _autosave_ticks(chapter, scale, ribbon + _RIBBON + 3),
        plot.axis(scale, y=height),
        height=height,
        scale=scale,
        readouts=_readouts(found, area) if has_steps else (),
    )
    return html.figure(drawn, legend=_legend(chapter, found))


def legs(chapter: goodput.ChapterReport) -> list[Leg]:
    """Return the progress of the steps in each process.

    Args:
        chapter: Report of the chapter.
    """
    before = _steps_before(chapter)
    cuts = _cuts(chapter.segments)
    seen: set[int] = set()
    made = []
    for index, process in enumerate(chapter.chapter.processes):
        for fit in process.fits:
            if fit.is_evaluation or not fit.has_trained:
                continue  # it makes no steps
            points = _points(fit, began=chapter.began, before=before[fit.number])
            if not points:
                continue
            cut = cuts.get((index, fit.number), math.inf) - chapter.began
            counted, again = _split(points, cut)
            made.append(Leg(process=index + 1, counted=counted, again=again, is_new=fit.number not in seen))
            seen.add(fit.number)
    return made


def _steps_before(chapter: goodput.ChapterReport) -> dict[int, int]:
    """Return the number of steps before each fit of the script: each fit begins to count at 0."""
    most: dict[int, int] = {}
    for fit in chapter.chapter.fits:
        if fit.is_evaluation:
            continue
        steps = fit.last_place.global_step if fit.last_place is not None else 0
        most[fit.number] = max(most.get(fit.number, 0), steps)
    before, total = {}, 0
    for number in sorted(most):
        before[number] = total
        total += most[number]
    return before


def _cuts(segments: Iterable[goodput.Segment]) -> dict[tuple[int, int | None], float]:
    """Return the time from which the training of each fit was done again."""
    found: dict[tuple[int, int | None], float] = {}
    for segment in segments:
        if segment.kind == goodput.REDONE:
            key = (segment.process, segment.fit)
            found[key] = min(found.get(key, math.inf), segment.began)
    return found


def _points(fit: FitHistory, *, began: float, before: int) -> list[Point]:
    known = [(time, place) for time, place in marks(fit) if time <= fit.last_seen]
    if fit.last_place is not None and fit.started is not None:
        known.append((fit.last_seen, fit.last_place))
    known.sort(key=lambda each: each[0])
    return [(time - began, float(before + place.global_step)) for time, place in known]


def _split(points: list[Point], cut: float) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Return the points before and after a time. Both parts include the point at that time."""
    index = next((number for number, (x, _) in enumerate(points) if x > cut), None)
    if index is None:
        return tuple(points), ()
    if index == 0:
        return (), tuple(points)
    (left, low), (right, high) = points[index - 1], points[index]
    middle = (cut, low + (high - low) * (cut - left) / (right - left))
    return (*points[:index], middle), (middle, *points[index:])


def _curves(found: Sequence[Leg], area: Area) -> list[Markup]:
    falls: list[Point] = []
    for earlier, later in pairwise(found):
        (left, high), (right, low) = (earlier.again or earlier.counted)[-1], (later.counted or later.again)[0]
        falls += [(left, high), (left, low), (right, low), (math.nan, math.nan)]
    good = [point for leg in found for point in (*leg.counted, (math.nan, math.nan))]
    again = [point for leg in found for point in (*leg.again, (math.nan, math.nan))]
    return [
        plot.curve(area, falls, class_="dashed quiet"),
        plot.curve(area, again, class_="firm again"),
        plot.curve(area, good, class_="firm good"),
    ]


def _faults(chapter: goodput.ChapterReport, scale: Scale, foot: float) -> Child:
    ended = [(scale.place(process.last_seen - chapter.began), process) for process in chapter.chapter.processes[:-1]]
    if len(ended) > _NUM_MARKS:
        return plot.ticks([place for place, _ in ended], y=0, height=_HEAD - 6, class_="thin fault")
    return [
        plot.mark(
            place, y=_HEAD - 4, foot=foot, class_="fault", title=f"process {number} ended: {process.reason or 'killed'}"
        )
        for number, (place, process) in enumerate(ended, 1)
    ]


def _ribbon(chapter: goodput.ChapterReport, scale: Scale, top: float) -> Child:
    segments = without_narrow(chapter.segments)
    functions = {fit.number: fit.function if fit.is_evaluation else "validation" for fit in chapter.chapter.fits}
    if len(segments) > _NUM_SEGMENTS:
        return _columns(chapter, top)
    return [
        plot.bar(
            scale.place(segment.began - chapter.began),
            scale.place(segment.ended - chapter.began),
            y=top,
            height=_RIBBON,
            class_=_KINDS[segment.kind],
            title=f"process {segment.process + 1}: {_what(segment, functions)}, {duration_text(segment.seconds)}",
        )
        for segment in segments
    ]


def _what(segment: goodput.Segment, functions: Mapping[int, str]) -> str:
    if segment.kind == goodput.EVALUATION and segment.fit is not None:
        return functions[segment.fit]
    return KIND_NAMES[segment.kind]


def _columns(chapter: goodput.ChapterReport, top: float) -> Markup:
    """Return a ribbon of columns. In a column, each kind is as high as its share of that time."""
    width = plot.WIDTH / _NUM_SLICES
    lines: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for number, slice_ in enumerate(slices(chapter.segments, number=_NUM_SLICES)):
        foot = top + _RIBBON
        for kind in _KINDS:
            height = _RIBBON * slice_.get(kind, 0.0)
            if height > 0:
                lines[kind].append(f"M{number * width:g} {foot:.2f}h{width:g}v{-height:.2f}h{-width:g}z")
                foot -= height
    drawn = (tag("path", d="".join(line), class_=f"area {_KINDS[kind]}") for kind, line in lines.items() if line)
    return plot.stretched(round(top) + _RIBBON, drawn)


def slices(segments: Sequence[goodput.Segment], *, number: int) -> list[dict[str, float]]:
    """Return the share of each kind in time slices of equal length.

    Args:
        segments: Segments in the order of time, without gaps.
        number: Number of slices.
    """
    began = segments[0].began
    width = (segments[-1].ended - began) / number
    made: list[dict[str, float]] = [{} for _ in range(number)]
    for segment in segments:
        first, last = (min(int((time - began) / width), number - 1) for time in (segment.began, segment.ended))
        for index in range(first, last + 1):
            end = segment.ended if index == last else began + (index + 1) * width
            begin = segment.began if index == first else began + index * width
            made[index][segment.kind] = made[index].get(segment.kind, 0.0) + (end - begin) / width
    return made


def without_narrow(segments: Sequence[goodput.Segment]) -> list[goodput.Segment]:
    """Return the segments with each autosave that is too short to be visible merged into its surroundings.

    Args:
        segments: Segments in the order of time, without gaps.
    """
    narrow = _NARROW * (segments[-1].ended - segments[0].began)
    made: list[goodput.Segment] = []
    for segment in segments:
        before = made[-1] if made else None
        is_narrow = segment.kind == goodput.SAVING and segment.seconds < narrow
        continues = before is not None and before.process == segment.process and before.fit == segment.fit
        if before is not None and continues and (is_narrow or before.kind == segment.kind):
            made[-1] = replace(before, ended=segment.ended)
        else:
            made.append(segment)
    return made


def _autosave_ticks(chapter: goodput.ChapterReport, scale: Scale, top: float) -> Markup:
    autosaves = (autosave for fit in chapter.chapter.fits for autosave in fit.autosaves)
    places = [scale.place(autosave.time - chapter.began) for autosave in autosaves]
    return plot.ticks(places, y=top, height=_SAVES - 2, class_="thin saving")


def autosave_bars(chapter: goodput.ChapterReport, autosaves: Sequence[Autosave]) -> Markup:
    """Return bars of the time that training waited for each autosave, over the wall time.

    Args:
        chapter: Report of the chapter.
        autosaves: All autosaves of the chapter, in the order of time.
    """
    scale = elapsed_scale(chapter.ended - chapter.began)
    points = [(autosave.time - chapter.began, autosave.longest) for autosave in autosaves]
    y = size_scale(max(seconds for _, seconds in points), text=tick_duration)
    area = Area(x=scale, y=y, height=_BARS, top=6)
    foot = area.top + area.height
    shown = highest(points, num_columns=_NUM_COLUMNS)
    line = "".join(f"M{plot.WIDTH * scale.place(x):.1f} {foot}V{area.down(seconds)}" for x, seconds in shown)
    drawn = plot.chart(
        f"Seconds of waiting for each of {plural(len(points), 'autosave')}",
        plot.grid(area),
        plot.stretched(foot, tag("path", d=line, class_="curve stem saving")),
        plot.axis(scale, y=foot),
        height=foot,
        scale=scale,
        readouts=[
            Readout(x=x, text=f"{duration_text(seconds)}, after {duration_text(x)}", ys=(area.down(seconds),))
            for x, seconds in shown
        ],
    )
    caption = "the wait for each autosave"
    return html.figure(
        drawn, caption=caption if len(shown) == len(points) else f"{caption}; of many at once, the longest"
    )


def _legend(chapter: goodput.ChapterReport, found: Sequence[Leg]) -> Markup:
    entries = []
    if any(y for leg in found for _, y in leg.counted):
        entries.append(("line good", "steps that count"))
    if any(leg.again for leg in found):
        entries.append(("line again", "done again"))
    if chapter.account.evaluation:
        entries.append(("evaluation", "evaluation"))
    num_ended = len(chapter.chapter.processes) - 1
    if num_ended:
        entries.append(("tip fault" if num_ended <= _NUM_MARKS else "stem fault", "a process ended"))
    if any(fit.autosaves for fit in chapter.chapter.fits):
        entries.append(("stem saving", "autosave"))
    return html.legend(*entries)


def _readouts(found: Sequence[Leg], area: Area) -> list[Readout]:
    points = [(leg.process, x, y) for leg in found for x, y in (*leg.counted, *leg.again[1:])]
    return [
        Readout(
            x=x,
            text=f"after {duration_text(x)}   process {process}   step {count_text(round(y))}",
            ys=(area.down(y),),
        )
        for process, x, y in sorted(points, key=lambda each: each[1])
    ]


def _name(chapter: goodput.ChapterReport) -> str:
    processes = plural(len(chapter.chapter.processes), "process")
    return f"Optimizer steps over {duration_text(chapter.ended - chapter.began)} in {processes}"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRun:
    """A run of a tree.

    Args:
        run_id: Its id.
        parent: What it begins from, if it is a branch.
        reason: Why it ended last, in words; empty if nothing is known of it.
    """

    run_id: str
    parent: Parent | None = None
    reason: str = ""


def parent_of(history: RunHistory) -> Parent | None:
    """Return what the last chapter of a run began from, if it is a branch.

    Args:
        history: The history of the run.
    """
    parents = [fit.parent for fit in history.chapters[-1].fits if fit.parent is not None]
    return parents[-1] if parents else None


def tree_lines(run_id: str, runs: Mapping[str, FamilyRun]) -> Iterator[str]:
    """Yield the tree that a run belongs to; nothing if it has neither a parent nor a branch.

    Args:
        run_id: The run that is reported.
        runs: All known runs, by id.
    """
    root, seen = run_id, {run_id}
    while (run := runs.get(root)) is not None and run.parent is not None and run.parent.run_id not in seen:
        root = run.parent.run_id
        seen.add(root)
    branches: dict[str, list[FamilyRun]] = {}
    for run in runs.values():
        if run.parent is not None:
            branches.setdefault(run.parent.run_id, []).append(run)
    if root == run_id and run_id not in branches:
        return
    yield "Branches"
    known = runs.get(root, FamilyRun(run_id=root))
    yield from _lines(known, branches, shown=run_id, above="  ", first="  ", seen={root})


def _lines(
    run: FamilyRun, branches: Mapping[str, Sequence[FamilyRun]], *, shown: str, above: str, first: str, seen: set[str]
) -> Iterator[str]:
    here = " (this run)" if run.run_id == shown else ""
    reason = f", {run.reason}" if run.reason else ", no history of it is there"
    begins = "" if run.parent is None else f", from {run.parent.place}"
    yield f"{first}{run.run_id}{here}{begins}{reason}"
    for line in () if run.parent is None else run.parent.changed:
        yield f"{above}    changed: {line}"
    below = sorted(
        (one for one in branches.get(run.run_id, ()) if one.run_id not in seen),
        key=lambda one: (_place(one), one.run_id),
    )
    for number, one in enumerate(below, start=1):
        seen.add(one.run_id)
        is_last = number == len(below)
        corner, line = ("`-- ", "    ") if is_last else ("|-- ", "|   ")
        yield from _lines(one, branches, shown=shown, above=f"{above}{line}", first=f"{above}{corner}", seen=seen)


def _place(run: FamilyRun) -> tuple[int, int]:
    return (0, 0) if run.parent is None else (run.parent.epoch, run.parent.batch)
