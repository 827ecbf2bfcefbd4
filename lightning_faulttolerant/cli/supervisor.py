"""Supervises the processes of a run on this machine: collects what they tell, and decides when a start has failed.

After a failed start comes another one after a while, or the end of the run.

A data-loading worker ends when its parent is gone, but not if the parent was killed while it started the worker:
torch's check compares the parent with the one that the worker found first.
"""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final
from uuid import uuid4

from lightning_faulttolerant.cli.text import safe
from lightning_faulttolerant.processes import in_sessions, parents_and_states, send_signal, with_children
from lightning_faulttolerant.records.requests import skips_requested, text_of_skips
from lightning_faulttolerant.supervision.guard import Guard
from lightning_faulttolerant.supervision.heartbeats import (
    OUTSIDE,
    PREFIX,
    Saved,
    TrainingFailure,
    read_failures,
    read_heartbeats,
    shared_memory,
)
from lightning_faulttolerant.supervision.watch import HangWatcher, hang_report, write_hang_report

FINISHED = 0
WRONG_USAGE = 2
SAME_FAILURE = 3
GAVE_UP = 4
STOP_CODES = {
    74: "stopped, but its state could not be saved",
    75: "stopped by its deadline",
    76: "stopped, and its SLURM job is queued again",
    77: "stopped, because it does not repeat exactly what it did before",
    129: "stopped by SIGHUP",
    130: "stopped by SIGINT",
    131: "stopped by SIGQUIT",
    143: "stopped by SIGTERM",
}
"""The exit codes of processes that were asked to stop. The run ends with the same code."""
_FIRST_STOP_CODES = (77, 74, 76, 75)
NUM_SAME = 3
"""How many starts in a row may end by the same exception at the same batch, without a new autosave in between."""
_WAITS_SECONDS = (1.0, 10.0, 60.0, 180.0, 300.0)
"""The waits after the first start without a new autosave, the second, and so on; the last one stays."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedStart:
    """How a start has ended.

    Args:
        exit_codes: The exit codes of the processes that ended by themselves; negative for a signal. 0 stands for
            processes that ended in the middle of a fit or an evaluation.
        failure: The exception that ended it, if a process could tell.
        hang: What hung, if that has ended it.
        saved: The place of the newest autosave that its processes have told of.
    """

    exit_codes: tuple[int, ...]
    failure: TrainingFailure | None = None
    hang: str = ""
    saved: Saved | None = None

    @property
    def text(self) -> str:
        """What has ended it, in words."""
        if self.hang:
            return self.hang
        if self.failure is not None:
            return f"{self.failure.kind}: {self.failure.text}, {self.failure.place} on rank {self.failure.rank}"
        return ", ".join(map(_code_text, sorted(set(self.exit_codes))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What follows.

    Args:
        text: The reason, in words.
        exit_code: The exit code of the run; ``None`` if it is started again.
        wait_seconds: How long to wait before the next start.
    """

    text: str
    exit_code: int | None = None
    wait_seconds: float = 0.0


@final
class RestartPolicy:
    """Decides after each start that has failed.

    Args:
        max_restarts: After how many starts in a row without a new autosave the run is given up.
        command: The command as it was typed, for a line that leaves a batch out.
    """

    def __init__(self, max_restarts: int, *, command: str = "") -> None:
        self._max_restarts = max_restarts
        self._command = command
        self._saved: Saved | None = None
        self._num_without_progress = 0
        self._num_same = 0
        self._last: tuple[object, ...] | None = None

    def judge(self, ended: EndedStart) -> Verdict:
        """Return what follows a start that did not finish."""
        stops = [code for code in ended.exit_codes if code in STOP_CODES]
        if stops and len(stops) == len(ended.exit_codes) and not ended.hang:
            return Verdict(text=f"The run is {STOP_CODES[stops[0]]}.", exit_code=stops[0])
        self._count(ended)
        if ended.failure is not None and self._num_same >= NUM_SAME:
            return Verdict(text=_same_failure(ended.failure, self._command), exit_code=SAME_FAILURE)
        if self._num_without_progress >= self._max_restarts:
            starts = f"{self._num_without_progress} starts in a row" if self._num_without_progress > 1 else "A start"
            text = f"{starts} ended without a new autosave; the last one by {ended.text}. The run is given up."
            return Verdict(text=text, exit_code=GAVE_UP)
        seconds = _WAITS_SECONDS[min(max(self._num_without_progress, 1), len(_WAITS_SECONDS)) - 1]
        return Verdict(text=f"Ended by {ended.text}. The next start is in {seconds:g} s.", wait_seconds=seconds)

    def note_saved(self, saved: Saved | None) -> bool:
        """Note the newest autosave that a start has told of. Return whether it is newer than those before it."""
        has_progress = saved is not None and (self._saved is None or saved > self._saved)
        if has_progress:
            self._saved, self._last, self._num_without_progress = saved, None, 0
        return has_progress

    def _count(self, ended: EndedStart) -> None:
        if not self.note_saved(ended.saved):
            self._num_without_progress += 1
        identity = None if ended.failure is None or ended.hang else ended.failure.identity
        self._num_same = self._num_same + 1 if identity is not None and identity == self._last else 1
        self._last = identity


def stop_code(exit_codes: Iterable[int | None], *, signum: int) -> int:
    """Return the exit code of a run that a signal has stopped: what its processes say of their state comes first.

    Args:
        exit_codes: The exit codes of the processes.
        signum: The number of the signal.
    """
    found = set(exit_codes)
    return next((code for code in _FIRST_STOP_CODES if code in found), 128 + signum)


def _code_text(code: int) -> str:
    if code < 0:
        return f"signal {-code}"
    return f"exit code {code}" if code else "exit code 0 in the middle of a fit or an evaluation"


def _same_failure(failure: TrainingFailure, command: str) -> str:
    samples = f" Its samples are {failure.samples_text}." if failure.samples else ""
    return (
        f"The same exception came {NUM_SAME} starts in a row, {failure.place}, on rank {failure.rank}:"
        f" {failure.kind}: {failure.text}.{samples} The run is not started again: it would fail there again."
        f"{_without_it(failure, command)}"
    )


def _without_it(failure: TrainingFailure, command: str) -> str:
    """Return the line to type to continue without the batch, if it is one of training."""
    if failure.batch is None or failure.evaluated is not None or failure.function != "fit":
        return ""
    skips = text_of_skips({*skips_requested(), (failure.epoch, failure.batch)}).replace(",", " --skip ")
    return f" To continue without this batch, type: {command.replace(' run ', f' run --skip {skips} ', 1)}".rstrip()


_ENDS_WITHIN_SECONDS = 2.0


def end_left(leaders: Iterable[int]) -> None:
    """End what is left in the sessions of processes that have ended: by SIGTERM, and by SIGKILL two seconds later.

    Args:
        leaders: The processes, each the leader of its session.
    """
    sessions = set(leaders)
    left = in_sessions(sessions)
    for process_id in left:
        send_signal(process_id, signal.SIGTERM)
        send_signal(process_id, signal.SIGCONT)  # a stopped process handles its signals when it continues
    deadline = time.monotonic() + _ENDS_WITHIN_SECONDS
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = in_sessions(sessions)
    for process_id in left:
        send_signal(process_id, signal.SIGKILL)


class SupervisionEnded(Exception):  # noqa: N818 - the end of a run need not be an error
    """The run is not started again.

    Args:
        exit_code: The exit code of the command.
        text: The reason, in words.
    """

    def __init__(self, exit_code: int, text: str) -> None:
        super().__init__(text)
        self.exit_code = exit_code


@final
class Supervisor:
    """The supervision of one run on one machine, from `open` to `close`.

    Args:
        policy: Decides what follows a start that has failed.
        look_every_seconds: How often `look` is called.
    """

    def __init__(self, policy: RestartPolicy, *, look_every_seconds: float = 0.0) -> None:
        self._policy = policy
        self._num_starts = 0
        self._hang = ""
        self.directory = shared_memory() / f"{PREFIX}{uuid4().hex}"
        """Where the processes leave heartbeats and failures: in memory, if the system has a directory there."""
        self._guard = Guard(self.directory)  # before there is anything to remove or to end
        self.directory.mkdir(mode=0o700)
        self._watcher = HangWatcher(self.directory, look_every_seconds=look_every_seconds)
        self.exit_codes: tuple[int | None, ...] = ()
        """How the processes have ended that torch has shut down."""
        self._process_ids: tuple[int, ...] = ()

    def close(self) -> None:
        """Write what was learned, and remove the directory."""
        self._guard.close()
        self._watcher.write_learned()
        shutil.rmtree(self.directory, ignore_errors=True)

    def begin_start(self) -> None:
        """Note that the processes of a start begin, and forget what those before them have told.

        A start without a failure before it comes when a machine joins or leaves. It is not counted against the run.
        """
        end_left(self._process_ids)
        self._policy.note_saved(self._saved())
        self.directory.mkdir(mode=0o700, exist_ok=True)  # memory for all users is cleaned by some systems
        for path in self.directory.iterdir():
            path.unlink(missing_ok=True)
        self._hang = ""
        self._num_starts += 1

    def note_started(self, process_ids: Iterable[int]) -> None:
        """Note the processes of this start."""
        self._process_ids = tuple(process_ids)

    def is_cut(self) -> bool:
        """Return whether a process of this start has ended in the middle of a fit or an evaluation.

        Code that ends a process by ``os._exit(0)`` looks like a success.
        """
        ended = (beat for beat in read_heartbeats(self.directory) if beat.process_id in self._process_ids)
        return any(beat.section != OUTSIDE for beat in ended)

    def look(self) -> None:
        """Look whether the guard is there, and whether a process hangs.

        If one hangs, kill all, and report it: its directory may be what hangs.
        """
        if news := self._guard.look():
            say(news)
        hang = self._watcher.look()
        if hang is None or self._hang:  # those that are killed may still be there
            return
        report = hang_report(hang, self.directory)
        if not hang.is_only_reported:
            self._hang = hang.text
            kill({beat.process_id for beat, _ in hang.ranks})
        say(f"start {self._num_starts}: {hang.text}. See {write_hang_report(report, hang.directory)}.")

    def after_failure(self, exit_codes: Iterable[int]) -> float:
        """Return in how many seconds the next start is due.

        Args:
            exit_codes: The exit codes of the processes that have ended.

        Raises:
            SupervisionEnded: If there is none.
        """
        ended = self._ended(tuple(exit_codes))
        verdict = self._policy.judge(ended)
        say(f"start {self._num_starts}: {verdict.text}")
        if verdict.exit_code is not None:
            raise SupervisionEnded(verdict.exit_code, verdict.text)
        return verdict.wait_seconds

    def _ended(self, exit_codes: tuple[int, ...]) -> EndedStart:
        failures = read_failures(self.directory)
        return EndedStart(
            exit_codes=exit_codes, failure=failures[0] if failures else None, hang=self._hang, saved=self._saved()
        )

    def _saved(self) -> Saved | None:
        """Return the place of the newest autosave that the processes of this start have told of."""
        saved = [beat.saved for beat in read_heartbeats(self.directory) if beat.saved is not None]
        return max(saved, default=None)


def kill(process_ids: set[int]) -> None:
    """Kill processes and all their descendants."""
    parents, states = parents_and_states()
    for process_id in with_children(process_ids, parents):
        if states.get(process_id, "R") not in "ZX":
            send_signal(process_id, signal.SIGKILL)


def say(text: str) -> None:
    """Print a message of the supervisor."""
    print(f"lightning-faulttolerant run: {safe(text)}", file=sys.stderr, flush=True)
