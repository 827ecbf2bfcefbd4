"""The guard of a supervised run: it ends the training processes if their supervisor is killed.

``python -m lightning_faulttolerant.supervision.guard DIRECTORY SUPERVISOR`` waits until its parent is no longer the
supervisor: nobody would start the run again, or end it. Its processes are killed, so that the same command can continue
the run at once. The guard is there before the first of them. It finds them by their environment, so that it knows each
one from its first moment, and by their heartbeats.

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
from typing import final

from lightning_faulttolerant.processes import (
    in_sessions,
    is_running,
    parents_and_states,
    send_signal,
    with_children,
    with_variable,
)
from lightning_faulttolerant.supervision.heartbeats import DIRECTORY_VARIABLE, read_heartbeats


def start_companion(module: str, *arguments: str) -> int:
    """Start ``python -m MODULE ARGUMENTS``, which reads nothing; return its process id.

    Raises:
        OSError: If it can't be started.
        NotImplementedError: If this system can't start a process in a new session.
    """
    # Without the settings of the run: the companion is not one.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PL_")}
    words = [sys.executable, "-m", module, *arguments]
    nothing = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    return os.posix_spawn(sys.executable, words, variables, file_actions=[nothing], setsid=True)


_LOOK_EVERY_SECONDS = 0.1
_KILLED_WITHIN_SECONDS = 10.0
_QUIET_SECONDS = 2.0
"""A process that is being started when its supervisor is killed is found only once it has its environment."""
_LIVES_SECONDS = 1.0
"""A guard that ends sooner is not started again: the next one would end, too."""
_UNGUARDED = "Without it, they continue if this process is killed."


@final
class Guard:
    """The supervisor's side of the guard, from `__init__` to `close`.

    Args:
        directory: The directory of the heartbeats. It need not exist yet.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = os.fspath(directory)
        self.process_id = 0
        """The process id of the guard; 0 without one."""
        self._began = 0.0
        self._news = self._start()

    def look(self) -> str:
        """Return what has happened to the guard since the last look, in words. Replace one that has ended."""
        news, self._news = self._news, ""
        if self.process_id and (ended := self._how_it_ended()):
            self.process_id = 0
            is_useless = time.monotonic() - self._began < _LIVES_SECONDS
            news = f"{ended} {_UNGUARDED}" if is_useless else f"{ended} Another one is started. {self._start()}"
        return news.strip()

    def close(self) -> None:
        """End it, and leave the processes alone. May be called twice."""
        if self.process_id and not self._how_it_ended():
            os.kill(self.process_id, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.process_id, 0)
        self.process_id = 0

    def _start(self) -> str:
        self._began = time.monotonic()
        try:
            self.process_id = start_companion(__name__, self._directory, str(os.getpid()))
        except (OSError, NotImplementedError) as error:
            return f"The guard of the training processes can't be started: {error!r}. {_UNGUARDED}"
        return ""

    def _how_it_ended(self) -> str:
        try:
            done, status = os.waitpid(self.process_id, os.WNOHANG)
            how = f"exit code {os.waitstatus_to_exitcode(status)}" if done else ""
        except ChildProcessError:  # this process was started with SIGCHLD ignored
            how = "" if is_running(self.process_id) else "unknown exit code"
        return f"The guard of the training processes, process {self.process_id}, has ended ({how})." if how else ""


def guard(directory: str, supervisor: int) -> None:
    """Wait until the parent of this process is no longer the supervisor. Then kill what it has started.

    Args:
        directory: The directory of the heartbeats.
        supervisor: The supervisor's process id.
    """
    while os.getppid() == supervisor:
        time.sleep(_LOOK_EVERY_SECONDS)
    kill_all(directory)
    shutil.rmtree(directory, ignore_errors=True)


def kill_all(directory: str) -> None:
    """Kill the processes of a run, all their descendants, and what is left in their sessions.

    Args:
        directory: The directory of the heartbeats.
    """
    heads: set[int] = set()
    begin = last = time.monotonic()
    while time.monotonic() < min(last + _QUIET_SECONDS, begin + _KILLED_WITHIN_SECONDS):
        beats = (beat for beat in read_heartbeats(directory) if is_running(beat.process_id, beat.started))
        running = {beat.process_id for beat in beats} | with_variable(DIRECTORY_VARIABLE, directory)
        heads |= running
        family = with_children(running, parents_and_states()[0]) | in_sessions(heads)
        for process_id in family - {os.getpid()}:
            last = time.monotonic()
            send_signal(process_id, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    guard(sys.argv[1], int(sys.argv[2]))
