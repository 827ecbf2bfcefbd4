"""Supervises the processes of a run on this machine: collects what they tell, and decides when a start has failed."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import final

from lightning_faulttolerant.cli.supervise.policy import EndedStart, RestartPolicy
from lightning_faulttolerant.cli.text import safe
from lightning_faulttolerant.processes import parents_and_states, with_children
from lightning_faulttolerant.supervision.failures import read_failures
from lightning_faulttolerant.supervision.guard import Guard
from lightning_faulttolerant.supervision.hang_report import hang_report, write_hang_report
from lightning_faulttolerant.supervision.left_processes import end_left
from lightning_faulttolerant.supervision.marks import OUTSIDE, PREFIX, Saved, read_marks, shared_memory
from lightning_faulttolerant.supervision.watcher import HangWatcher


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
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=shared_memory()))
        """Where the processes leave marks and failures: in memory, if the system has a directory there."""
        self._watcher = HangWatcher(self.directory, look_every_seconds=look_every_seconds)
        self.exit_codes: tuple[int | None, ...] = ()
        """How the processes have ended that torch has shut down."""
        self._guard = Guard(self.directory)
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
        for path in self.directory.iterdir():
            path.unlink(missing_ok=True)
        self._hang = ""
        self._num_starts += 1

    def note_started(self, process_ids: Iterable[int]) -> None:
        """Note the processes of this start, and guard them: they end if this process is killed."""
        self._process_ids = tuple(process_ids)
        self._guard.watch(self._process_ids)

    def is_cut(self) -> bool:
        """Return whether a process of this start has ended in the middle of a fit or an evaluation.

        Code that ends a process by ``os._exit(0)`` looks like a success.
        """
        ended = (marks for marks in read_marks(self.directory) if marks.process_id in self._process_ids)
        return any(marks.section != OUTSIDE for marks in ended)

    def look(self) -> None:
        """Look whether a process hangs. If so, kill all, and report it: its directory may be what hangs."""
        hang = self._watcher.look()
        if hang is None or self._hang:  # those that are killed may still be there
            return
        report = hang_report(hang, self.directory)
        if not hang.is_only_reported:
            self._hang = hang.text
            kill({marks.process_id for marks, _ in hang.ranks})
        say(f"start {self._num_starts}: {hang.text}. See {write_hang_report(report, hang.directory)}.")

    def after_failure(self, exit_codes: Iterable[int]) -> None:
        """Wait until the next start is due.

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
        time.sleep(verdict.wait_seconds)

    def _ended(self, exit_codes: tuple[int, ...]) -> EndedStart:
        failures = read_failures(self.directory)
        return EndedStart(
            exit_codes=exit_codes, failure=failures[0] if failures else None, hang=self._hang, saved=self._saved()
        )

    def _saved(self) -> Saved | None:
        """Return the place of the newest autosave that the processes of this start have told of."""
        saved = [marks.saved for marks in read_marks(self.directory) if marks.saved is not None]
        return max(saved, default=None)


def kill(process_ids: set[int]) -> None:
    """Kill processes and all their descendants."""
    parents, states = parents_and_states()
    for process_id in with_children(process_ids, parents):
        if states.get(process_id, "R") not in "ZX":
            with contextlib.suppress(OSError):
                os.kill(process_id, signal.SIGKILL)


def say(text: str) -> None:
    """Print a message of the supervisor."""
    print(f"lightning-faulttolerant run: {safe(text)}", file=sys.stderr, flush=True)
