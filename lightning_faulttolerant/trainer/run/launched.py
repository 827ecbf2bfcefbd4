"""Fits that Lightning runs in separate processes, which it creates for each fit (``ddp_spawn``, ``ddp_fork``).

The script's process created the callback and only waits for them. It alone knows how many fits there were and whether
the script has ended well. Its children report to it in a file that only these processes know.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_faulttolerant.checkpoint.process_end import call_at_end


@dataclass(slots=True)
class Script:
    """The process that created a callback. The object travels to the processes that Lightning creates.

    Args:
        process_id: The ID of that process.
        token: A unique text in the name of its file.
        held: The directories of the runs that it holds itself, with the numbers of the fits that it has begun.
        num_callbacks: The number of callbacks that were created.
    """

    process_id: int
    token: str
    held: dict[str, list[int]] = field(default_factory=dict)
    num_callbacks: int = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether it is not this process."""
        return self.process_id != os.getpid()

    def count_callback(self) -> int:
        """Count a callback that is created, and return its number, from 1."""
        self.num_callbacks += 1
        return self.num_callbacks

    def begun(self, directory: str) -> list[int]:
        """Return the numbers of the fits of a run that were begun, in this process and in those that it created."""
        return sorted({*self.held.get(directory, ()), *self._of_run(directory)["begun"]})

    def num_begun(self) -> int:
        """Return how many fits of all runs were begun, in this process and in those that it created."""
        return sum(len(self.begun(directory)) for directory in {*self.held, *self.directories()})

    def num_open(self, directory: str) -> int:
        """Return how many fits of a run have begun in other processes and not finished."""
        num_open: int = self._of_run(directory)["open"]
        return num_open

    def begin_fit(self, directory: str, number: int) -> None:
        """Note, in another process, that a fit begins."""
        self._note(directory, begun=[number], more_open=1)

    def end_fit(self, directory: str) -> None:
        """Note, in another process, that a fit finished."""
        self._note(directory, begun=[], more_open=-1)

    def directories(self) -> list[str]:
        """Return the runs that had fits in other processes."""
        return list(self._read().get("runs", {}))

    def tell_report(self, number: int, report: dict[str, Any] | None) -> None:
        """Note, in another process, what the fit of the callback with this number resumed from."""
        content = self._read()
        self._write({**content, "reports": {**content.get("reports", {}), str(number): report}})

    def report(self, number: int) -> dict[str, Any] | None:
        """Return the report that was last noted for that callback."""
        found: dict[str, Any] | None = self._read().get("reports", {}).get(str(number))
        return found

    def forget(self) -> None:
        """Remove the file."""
        if os.path.exists(self._path):
            os.unlink(self._path)

    @property
    def _path(self) -> str:
        return os.path.join(tempfile.gettempdir(), f"lightning_faulttolerant-{self.token}.json")

    def _of_run(self, directory: str) -> dict[str, Any]:
        found: dict[str, Any] = self._read().get("runs", {}).get(directory, {"begun": [], "open": 0})
        return found

    def _note(self, directory: str, *, begun: list[int], more_open: int) -> None:
        content, run = self._read(), self._of_run(directory)
        noted = {"begun": [*run["begun"], *begun], "open": run["open"] + more_open}
        self._write({**content, "runs": {**content.get("runs", {}), directory: noted}})

    def _read(self) -> dict[str, Any]:
        try:
            with open(self._path, encoding="utf-8") as file:
                content: dict[str, object] = json.load(file)
        except FileNotFoundError:
            return {}
        return content

    def _write(self, content: dict[str, object]) -> None:
        # A kill at any moment must leave a file that can be read. No other process writes at the same time: the script
        # waits for its children.
        temporary = f"{self._path}.{os.getpid()}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, self._path)


_scripts: list[Script] = []


def this_script(at_end: Callable[[Script], None]) -> Script:
    """Return this process.

    Args:
        at_end: Called when the process ends, if Lightning has created processes for it.
    """
    if not _scripts or _scripts[-1].is_elsewhere:
        script = Script(os.getpid(), uuid.uuid4().hex)
        _scripts[:] = [script]
        call_at_end(lambda: _end(script, at_end), is_remote=True)  # it may be remote, and that becomes known too late
    return _scripts[-1]


def _end(script: Script, at_end: Callable[[Script], None]) -> None:
    if script.is_elsewhere or not script.directories():
        return
    try:
        at_end(script)
    finally:
        script.forget()
