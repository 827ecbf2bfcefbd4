"""The watcher of a run that is not started by ``lightning-faulttolerant run``: a process next to it, one per machine.

``python -m lightning_faulttolerant.supervision.watch DIRECTORY`` looks at the marks in that directory until no process
with marks is left, and then removes the directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time

from lightning_faulttolerant.supervision.companion import start_companion
from lightning_faulttolerant.supervision.exit_signal import HANG_EXIT_CODE, end_hung
from lightning_faulttolerant.supervision.hang_report import hang_report, write_hang_report
from lightning_faulttolerant.supervision.watcher import HangWatcher

_LOOK_EVERY_SECONDS = 0.2
_BEGINS_WITHIN_SECONDS = 60.0


_started: list[int] = []


def start_watcher(directory: str) -> None:
    """Start the watcher of a directory."""
    for process_id in list(_started):  # those that have ended
        with contextlib.suppress(ChildProcessError):
            if not os.waitpid(process_id, os.WNOHANG)[0]:
                continue
        _started.remove(process_id)
    _started.append(start_companion(__name__, directory))


def watch(directory: str) -> None:
    """Watch until no process with marks is left."""
    watcher = HangWatcher(directory, look_every_seconds=_LOOK_EVERY_SECONDS)
    began = time.monotonic()
    has_seen = False
    while os.path.isdir(directory):
        hang = watcher.look()
        has_seen |= not watcher.is_empty
        if watcher.is_empty and (has_seen or time.monotonic() - began > _BEGINS_WITHIN_SECONDS):
            break
        if hang is not None:
            report = hang_report(hang, directory)
            if not hang.is_only_reported:
                _say(f"The processes are ended, with exit code {HANG_EXIT_CODE}; the last autosave stays.")
                end_hung(marks.process_id for marks, _ in hang.ranks)
            _say(f"{hang.text}. See {write_hang_report(report, hang.directory)}.")
        time.sleep(_LOOK_EVERY_SECONDS)
    watcher.write_learned()
    shutil.rmtree(directory, ignore_errors=True)


def _say(text: str) -> None:
    os.write(2, f"\nFaultTolerance: {text}\n".encode())


if __name__ == "__main__":
    watch(sys.argv[1])
