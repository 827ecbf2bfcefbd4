"""A command with everything that it starts: launchers, ranks, loader workers, even if they left its process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from lightning_faulttolerant.processes import parents_and_states, with_children
from lightning_faulttolerant.records.ledger import DRILL_VARIABLE

_PROCESSES = Path("/proc")


@final
class ProcessTree:
    """One start of a command, as the leader of its own session: a Ctrl-C at the drill does not reach it.

    Args:
        command: Words of the command.
        environment: The complete environment.
        token: A unique text that is put into the environment.
        output: A file for everything that the command prints.
    """

    def __init__(self, command: Sequence[str], *, environment: Mapping[str, str], token: str, output: Path) -> None:
        self._command = list(command)
        self._environment = {**environment, DRILL_VARIABLE: token}
        self._token = token
        self._output = output
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the command. If the start is interrupted, the command may be running; `close` ends it then too.

        Raises:
            OSError: If it can't be started.
        """
        with self._output.open("ab") as file:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """The exit code of the started process: negative for a signal, None before the start and while it is alive."""
        return None if self._process is None else self._process.poll()

    def terminate(self) -> None:
        """Ask the started process to end, as a scheduler does. A launcher passes the signal on."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill all processes together, like a machine that goes away: no process sees another one die."""
        stopped: set[int] = set()
        while True:  # a stopped process starts no others
            found = self._alive() - stopped
            if not found:
                break
            for process_id in found:
                _send(process_id, signal.SIGSTOP)
            stopped |= found
        for process_id in stopped:
            _send(process_id, signal.SIGKILL)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self, *, patience_seconds: float = 10.0) -> None:
        """Kill the remaining processes, and wait until none is left.

        Args:
            patience_seconds: How long to wait for processes that are being killed.
        """
        deadline = time.monotonic() + patience_seconds
        self.kill()
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_seconds)
        while self._alive() and time.monotonic() < deadline:
            self.kill()
            time.sleep(0.01)

    def _alive(self) -> set[int]:
        """Return the ids of all processes that belong to the command and are not zombies."""
        started = {self._process.pid} if self._process is not None and self.exit_code is None else set()
        if not _PROCESSES.is_dir():
            return _by_ps(started)
        parents, states = parents_and_states()
        own = {process_id for process_id in parents if _has_token(process_id, self._token)} | started
        return {process_id for process_id in with_children(own, parents) if states.get(process_id, "Z") not in "ZX"}


def _has_token(process_id: int, token: str) -> bool:
    try:
        variables = (_PROCESSES / str(process_id) / "environ").read_bytes()
    except OSError:  # gone, or owned by another user
        return False
    return f"{DRILL_VARIABLE}={token}".encode() in variables.split(b"\0")


def _by_ps(process_ids: set[int]) -> set[int]:
    """Return processes and their descendants on systems without ``/proc``."""
    told = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    pairs = (line.split() for line in told.splitlines())
    return with_children(process_ids, {int(child): int(parent) for child, parent in pairs})


def _send(process_id: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process_id, signum)
