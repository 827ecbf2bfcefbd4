"""Shortens a history that has become long; if possible, the rest gives the same account of the time.

First, marks of life that are no longer needed are removed, and older autosaves and validation runs are combined into
sums: the account of a chapter stays the same. If that is not enough, as in a loop of crashes, the oldest processes are
forgotten, and a line at the front says how many.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import Any

from lightning_faulttolerant.records.chapters import place_of, slow_of
from lightning_faulttolerant.records.history import (
    ALIVE,
    AUTOSAVE,
    AUTOSAVES,
    BEGIN,
    SHORTENED,
    START,
    VALIDATION,
    name_of,
    summed_times,
)
from lightning_faulttolerant.records.lines import Line

NUM_KEPT = 200
_MARK_BYTES = 150
_IN_SUM = ("epoch", "batch", "global_step", "seconds", "time")


def text_of(lines: Iterable[Mapping[str, object]]) -> bytes:
    """Return lines as the content of a file.

    Args:
        lines: Objects that JSON can hold.
    """
    return b"".join(json.dumps(line, sort_keys=True).encode() + b"\n" for line in lines)


def shortened(lines: Sequence[Line], *, max_bytes: int, num_kept: int = NUM_KEPT) -> list[Line]:
    """Return lines that say the same in less space.

    Args:
        lines: The lines of a whole file.
        max_bytes: If the result is longer than this, whole processes are removed, except the last one.
        num_kept: How many of the newest autosaves, and of the newest validation runs, are kept unchanged.
    """
    kept = list(_summed(lines, _needed(lines, num_kept)))
    return _forgotten(kept, max_bytes) if len(text_of(kept)) > max_bytes else kept


def _needed(lines: Sequence[Line], num_kept: int) -> set[int]:
    """Return the indices of the marks, autosaves, and validation runs that are kept unchanged."""
    needed: set[int] = set()
    for event in (AUTOSAVE, VALIDATION) if num_kept else ():
        needed.update([index for index, line in enumerate(lines) if line.get("event") == event][-num_kept:])
    waited: int | None = None
    for index, line in enumerate(lines):  # the last line of each fit, and the last that says how long data took
        waited = index if "data" in line else waited
        following = lines[index + 1] if index + 1 < len(lines) else {"event": BEGIN}
        if following.get("event") == BEGIN or following.get("fit") != line.get("fit"):
            needed.update((index,) if waited is None else (index, waited))
            waited = None
    by_name: dict[tuple[object, object], int] = {}
    marks: dict[object, _Marks] = {}
    for index, line in enumerate(lines):
        fit, resumed = line.get("fit"), line.get("resumed")
        if line.get("event") == AUTOSAVE:
            by_name[fit, line.get("name")] = index
        if line.get("event") in (ALIVE, AUTOSAVE):
            marks.setdefault(fit, _Marks()).add(index, line)
        elif line.get("event") == START and isinstance(resumed, dict):
            # An autosave of another chapter does not count, but its mark does: both are kept.
            saved = by_name.get((fit, name_of(str(resumed.get("path")))))
            known = marks[fit].last_before(line) if fit in marks else None
            needed.update(found for found in (saved, known) if found is not None)
    # A fit may have continued inside the validation runs that these autosaves are from.
    inside = {_run_of(lines[index]) for index in needed} - {None}
    runs = (index for index, line in enumerate(lines) if line.get("event") == VALIDATION)
    return needed.union(index for index in runs if (lines[index].get("fit"), lines[index].get("since")) in inside)


def _run_of(line: Line) -> tuple[object, object] | None:
    """Return the fit and the beginning of the validation run that an autosave was taken in, if it was."""
    run = line.get("validation")
    since = run.get("since") if isinstance(run, dict) and line.get("event") in (AUTOSAVE, AUTOSAVES) else None
    return (line.get("fit"), since) if isinstance(since, (int, float)) else None


class _Marks:
    """The times and places of a fit so far, except those that a later one has made useless by going back."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, tuple[int, int, float], int]] = []

    def add(self, index: int, line: Line) -> None:
        place, time = place_of(line), _number(line, "taken") or _number(line, "time")
        if place is None:
            return
        own = place.order
        while self._marks and self._marks[-1][1] >= own and self._marks[-1][0] <= time:
            self._marks.pop()
        self._marks.append((time, own, index))

    def last_before(self, start: Line) -> int | None:
        """Return the mark that tells when the run was at the place where a start continues, if any."""
        place = place_of(start)
        if place is None:
            return None
        own = place.order
        return max((mark for mark in self._marks if mark[1] <= own), key=_time_and_index, default=(0.0, own, None))[2]


def _time_and_index(mark: tuple[float, tuple[int, int, float], int | None]) -> tuple[float, int]:
    return mark[0], mark[2] or 0


def _summed(lines: Sequence[Line], needed: set[int]) -> Iterator[Line]:
    """Yield the lines that are needed, and the sums of adjacent autosaves and validation runs that are not."""
    autosaves: Line | None = None
    validations: Line | None = None
    inside = {_run_of(lines[index]) for index in needed} - {None}
    for index, line in enumerate(lines):
        event = line.get("event")
        if index not in needed and event == ALIVE:
            continue
        if index not in needed and event in (AUTOSAVE, AUTOSAVES):
            run = _run_of(line)
            if autosaves is not None and run != _run_of(autosaves) and not inside.isdisjoint((run, _run_of(autosaves))):
                yield autosaves
                autosaves = None
            autosaves = _sum(autosaves, line)
            continue
        if index not in needed and event == VALIDATION:
            validations = sum_of_validations(validations, line)
            continue
        yield from filter(None, (autosaves, validations))
        autosaves = validations = None
        yield line
    yield from filter(None, (autosaves, validations))


def _sum(one: Line | None, other: Line) -> Line:
    if other.get("event") == AUTOSAVE:
        longest = {name: other[name] for name in _IN_SUM if name in other}
        other = {
            "event": AUTOSAVES,
            "fit": other.get("fit"),
            "time": other.get("time"),
            "since": _began(other),
            "number": 1,
            "seconds": _number(other, "seconds"),
            "bytes": _number(other, "bytes"),
            "longest": longest,
            **({"data": other["data"]} if "data" in other else {}),
            **({"slow": other["slow"]} if "slow" in other else {}),
            **({"validation": other["validation"]} if _run_of(other) is not None else {}),
        }
    if one is None:
        return other
    sums = {name: _number(one, name) + _number(other, name) for name in ("number", "seconds", "bytes")}
    candidates = [line["longest"] for line in (one, other) if isinstance(line.get("longest"), dict)]
    longest = max(candidates, key=lambda line: _number(line, "seconds"), default={})
    slow = [each for line in (one, other) for each in slow_of(line.get("slow"))]
    if slow:
        other = {**other, "slow": [asdict(each) for each in summed_times(slow)]}
    return {**other, **sums, "since": one.get("since"), "longest": longest}


def _began(autosave: Line) -> object:
    """Return when training began to wait for an autosave. A capture may have been taken long before."""
    taken = autosave.get("taken", autosave.get("time"))
    if autosave.get("behind") is True or not isinstance(taken, (int, float)):
        return taken
    return _number(autosave, "time") - _number(autosave, "seconds")


def sum_of_validations(one: Mapping[str, object] | None, other: Mapping[str, object]) -> Line:
    """Return one line for two about validation runs, of the same fit.

    Args:
        one: The earlier line, if there is one.
        other: The later one.
    """
    if one is None:
        return dict(other)
    sums = {name: _number(one, name) + _number(other, name) for name in ("number", "seconds", "num_batches")}
    return {**other, **sums, "since": one.get("since"), "first": one.get("first")}


def _number(line: Mapping[str, object], name: str) -> Any:
    found = line.get(name)
    return found if isinstance(found, (int, float)) else 0


def _forgotten(lines: list[Line], max_bytes: int) -> list[Line]:
    """Remove the oldest processes so that half of the space is free again; the last process always stays."""
    starts = _starts(lines)
    if len(starts) < 2:
        return lines
    ends = list(accumulate((len(text_of([line])) for line in lines), initial=0))
    fits = (
        number for number in range(1, len(starts)) if ends[-1] - ends[starts[number]] <= max_bytes / 2 - _MARK_BYTES
    )
    number = next(fits, len(starts) - 1)
    gone, left = lines[: starts[number]], lines[starts[number] :]
    earlier = [line for line in gone if line.get("event") == SHORTENED]
    since = earlier[0].get("since") if earlier else gone[0].get("time")
    num_gone = number + sum(_number(line, "number") for line in earlier)
    return [{"event": SHORTENED, "number": num_gone, "since": since, "time": gone[-1].get("time")}, *left]


def _starts(lines: Sequence[Line]) -> list[int]:
    """Return the indices of the lines where processes begin."""
    begins = [index for index, line in enumerate(lines) if line.get("event") == BEGIN]
    tokens = [lines[index].get("process") for index in begins]
    return [index for index, token, before in zip(begins, tokens, [object(), *tokens], strict=False) if token != before]
