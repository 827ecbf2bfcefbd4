"""The report of a hang: what each rank was doing, which one keeps the others waiting, and the stacks of all."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from functools import partial

from lightning_faulttolerant.errors import FaultToleranceError
from lightning_faulttolerant.processes import parents_and_states, with_children
from lightning_faulttolerant.storage.store import open_writer
from lightning_faulttolerant.supervision.marks import ProcessMarks
from lightning_faulttolerant.supervision.slow_storage import STORAGE_ANSWERS_WITHIN_SECONDS, done_within
from lightning_faulttolerant.supervision.stacks import stacks_of, stacks_path, waits_for_others
from lightning_faulttolerant.supervision.watcher import Hang

_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a device", "T": "stopped", "t": "traced", "Z": "ended"}


def write_hang_report(text: str, directory: str) -> str:
    """Write a report next to the autosaves, or else for temporary files; return its path.

    Args:
        text: The report.
        directory: The directory of the run, or its URL; empty if it is not known. It may be what hangs.
    """
    name = f"hang-{time.strftime('%Y%m%d-%H%M%S')}-{os.uname().nodename}.txt"
    for folder in filter(None, (directory, tempfile.gettempdir())):
        path = f"{folder.rstrip('/')}/{name}"
        written: list[str] = []
        if done_within(STORAGE_ANSWERS_WITHIN_SECONDS, partial(_write, path, text, written)) and written:
            return path
    return ""


def _write(path: str, text: str, written: list[str]) -> None:
    with contextlib.suppress(OSError, FaultToleranceError):
        with open_writer(path) as file:
            file.write(text.encode())
        written.append(path)


def hang_report(hang: Hang, directory: str | os.PathLike[str]) -> str:
    """Return the report, with the stacks of all processes that can still write them."""
    parents, states = parents_and_states()
    stacks: dict[int, str] = {}
    workers: list[str] = []
    no_workers = {os.getpid(), *(marks.process_id for marks, _ in hang.ranks)}  # a watcher may be a child, too
    for marks, _ in hang.ranks:
        path = stacks_path(directory, marks.process_id)
        stacks[marks.rank] = stacks_of(marks.process_id, path, states.get(marks.process_id, "Z"))
        for process_id in sorted(with_children({marks.process_id}, parents) - no_workers):
            found = stacks_of(process_id, path, states.get(process_id, "Z"))
            workers.append(f"Process {process_id}, started by rank {marks.rank}\n{found}\n")
    rows = [
        f"{marks.rank:>4}  {marks.process_id:>8}  {_STATES.get(states.get(marks.process_id, 'Z'), 'unknown'):<8}"
        f"  {seconds:>6.0f} s  {marks}"
        for marks, seconds in hang.ranks
    ]
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S')}: {hang.text}.",
        "",
        f"RANK   PROCESS  STATE      SAME FOR  SECTION, of {hang.marks.num_ranks} ranks in all",
        *rows,
        "",
        behind(hang, states, stacks),
        "",
        *(f"Rank {rank}\n{text}\n" for rank, text in stacks.items()),
        *workers,
    ]
    return "\n".join(lines)


def behind(hang: Hang, states: dict[int, str], stacks: dict[int, str]) -> str:
    """Return which rank keeps the others waiting, in words."""
    ranks = [marks for marks, _ in hang.ranks]
    stopped = [marks.rank for marks in ranks if states.get(marks.process_id, "Z") in "Tt"]
    if stopped:
        return f"Behind: {_listed(stopped)}, stopped by a signal."
    if len(ranks) == 1:
        return "There is no other rank on this machine."
    first = min(map(_place, ranks))
    late = [marks.rank for marks in ranks if _place(marks) == first]
    if len(late) < len(ranks):
        return f"Behind: {_listed(late)}, at the earliest place."
    absent = [marks.rank for marks in ranks if not waits_for_others(stacks.get(marks.rank, ""))]
    if 0 < len(absent) < len(ranks):
        return f"Behind: {_listed(absent)}. The others wait in a collective."
    return "No rank is behind: all are at the same place."


def _place(marks: ProcessMarks) -> tuple[int, int, int]:
    return marks.epoch, marks.batch, marks.evaluated


def _listed(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
