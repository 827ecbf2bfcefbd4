"""The guard of a supervised run: it ends the training processes if their supervisor is killed.

``python -m lightning_faulttolerant.supervision.guard DIRECTORY`` reads process ids, one a line. If its input ends
without the line ``end``, the supervisor is gone: nobody would start the run again, or end it. Its processes are killed,
so that the same command can continue the run at once.

Like the watcher, it is our own process next to the processes of a run, in its own session: what ends the run does not
end it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from typing import IO, final

from lightning_faulttolerant.processes import (
    in_sessions,
    is_running,
    parents_and_states,
    send_signal,
    started_at,
    with_children,
)
from lightning_faulttolerant.supervision.heartbeats import read_heartbeats


def start_companion(module: str, *arguments: str, standard_input: int | None = None) -> int:
    """Start ``python -m MODULE ARGUMENTS``; return its process id.

    Args:
        module: The module.
        arguments: Its arguments.
        standard_input: A descriptor for its standard input. It reads nothing by default.

    Raises:
        OSError: If it can't be started.
        NotImplementedError: If this system can't start a process in a new session.
    """
    # Without the settings of the run: the companion is not one.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    words = [sys.executable, "-m", module, *arguments]
    source = (
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
        if standard_input is None
        else (os.POSIX_SPAWN_DUP2, standard_input, 0)
    )
    return os.posix_spawn(sys.executable, words, variables, file_actions=[source], setsid=True)


_END = "end"
_KILLED_WITHIN_SECONDS = 10.0


@final
class Guard:
    """The supervisor's side of the guard, from `watch` to `close`.

    Args:
        directory: The directory of the heartbeats.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.fspath(directory)
        self._pipe: IO[str] | None = None
        self.process_id = 0
        """The process id of the guard; 0 without one."""

    def watch(self, process_ids: Iterable[int]) -> None:
        """Let the guard watch over processes, and no longer over those before them. A failure is no reason to stop."""
        line = " ".join(map(str, process_ids)) + "\n"
        with contextlib.suppress(OSError, NotImplementedError):
            self._write(line)

    def close(self) -> None:
        """Let it end, and leave the processes alone. May be called twice."""
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.write(f"{_END}\n")
            with contextlib.suppress(OSError):
                pipe.close()

    def _write(self, line: str) -> None:
        if self._pipe is not None:
            try:
                self._pipe.write(line)
                return
            except BrokenPipeError:  # somebody has killed it
                self.close()
        read, write = os.pipe()
        try:
            self.process_id = start_companion(__name__, self._directory, standard_input=read)
            self._pipe = open(write, "w", buffering=1, encoding="ascii")  # noqa: SIM115 - closed in `close`
        finally:
            os.close(read)
            if self._pipe is None:
                os.close(write)
        self._pipe.write(line)


def guard(lines: Iterable[str], directory: str) -> None:
    """Read process ids until the supervisor ends. If it does not say that it ends, kill its processes.

    Args:
        lines: What it writes.
        directory: The directory of the heartbeats.
    """
    guarded: dict[int, int] = {}
    for line in lines:
        if line.strip() == _END:
            return
        guarded = {process_id: started_at(process_id) for process_id in map(int, line.split())}
    _kill_all(guarded, directory)
    shutil.rmtree(directory, ignore_errors=True)


def _kill_all(guarded: Mapping[int, int], directory: str) -> None:
    """Kill processes, those that have a heartbeat, all their descendants, and what is left in their sessions."""
    deadline = time.monotonic() + _KILLED_WITHIN_SECONDS
    while time.monotonic() < deadline:
        heads = {beat.process_id: beat.started for beat in read_heartbeats(directory)} | dict(guarded)
        running = {one for one, started in heads.items() if is_running(one, started)}
        family = with_children(running, parents_and_states()[0]) | in_sessions(guarded.keys())
        if not family:
            return
        for process_id in family - {os.getpid()}:
            send_signal(process_id, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    guard(sys.stdin, sys.argv[1])
