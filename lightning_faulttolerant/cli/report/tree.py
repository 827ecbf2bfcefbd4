"""The branches of a run, as a tree: its ancestors, and all that began from them, with what each has changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from lightning_faulttolerant.records.history import RunHistory
from lightning_faulttolerant.records.runs import Parent


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
