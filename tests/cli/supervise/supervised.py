"""Starts the script of these tests, alone or in a supervised run, as real processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import python

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("training.py")
RUN = ("-m", "lightning_faulttolerant", "run")


@dataclass(frozen=True)
class Trial:
    """How a command has ended.

    Args:
        exit_code: Its exit code.
        output: What it and its processes have printed.
        directory: The directory of the script.
    """

    exit_code: int
    output: str
    directory: Path

    def told(self, name: str) -> list[Any]:
        """Return what the script has written down."""
        return lines_of(self.directory / f"{name}.jsonl")

    @property
    def num_starts(self) -> int:
        """How many processes have trained."""
        return len({process_id for process_id, _ in self.told("steps")})


def lines_of(path: Path) -> list[Any]:
    """Return the values in a file, one a line."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class RunningTrial:
    """A command that runs.

    Args:
        directory: The directory of the script.
        words: The arguments of Python.
        environment: More variables.
        output: The name of a file for its output.
    """

    def __init__(
        self, directory: Path, words: tuple[str, ...], environment: dict[str, str], output: str = "output"
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._output = directory / f"{output}.txt"
        self._mark = directory / f"{output}.mark"
        # What an outer run has set must not reach the script.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "SLURM_"))}
        variables = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        command = python.Command(words=[sys.executable, *words], directory=str(directory), environment=variables)
        self.process = python.Popen(command, output=self._output, mark=self._mark)

    def steps(self) -> list[Any]:
        """Return the steps so far."""
        return lines_of(self._directory / "steps.jsonl")

    def wait(self, timeout_seconds: float = 100) -> Trial:
        """Wait until it ends; it must end by itself, and leave no process.

        Raises:
            TimeoutError: If it does not end. It is killed, with all its processes.
        """
        try:
            code = self.process.wait(timeout_seconds)
            left = [described(process_id) for process_id in self._left()]
        except subprocess.TimeoutExpired:
            raise TimeoutError(self._output.read_text()) from None
        finally:
            self.kill()
        assert not left, f"These processes are left: {left}\n{self._output.read_text()}"
        return Trial(code, self._output.read_text(), self._directory)

    def kill(self) -> None:
        """Kill what is left of it."""
        for process_id in python.marked(self._mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)

    def _left(self) -> list[int]:
        """Return the processes that are left some seconds after the end."""
        deadline = time.monotonic() + 8
        while (left := python.marked(self._mark)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left


def described(process_id: int) -> str:
    """Return what is known of a process. One that is forked from this one has its words."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{process_id}/cmdline").read_bytes().split(b"\0")
        status = Path(f"/proc/{process_id}/status").read_text()
        kept = re.findall(r"^(?:State|PPid|Threads|SigCgt|SigPnd|ShdPnd):.*", status, re.MULTILINE)
        return f"{process_id} {b' '.join(words[:6])!r} {kept}"
    return f"{process_id}, which has ended since"


def begin(
    directory: Path,
    *words: str,
    options: tuple[str, ...] | None = (),
    flags: str = "",
    output: str = "output",
    **environment: str,
) -> RunningTrial:
    """Start the script.

    Args:
        directory: Its directory.
        words: Its arguments.
        options: The options of the supervised run; ``None`` starts the script alone.
        flags: More arguments of the callback.
        output: The name of a file for its output.
        environment: More variables.
    """
    script = (str(SCRIPT), str(directory), *words)
    callback = f"every_n_train_steps=1, dirpath={directory / 'autosaves'}" + (f", {flags}" if flags else "")
    variables = {"PL_FAULT_TOLERANT_OPTIONS": callback, **environment}
    command = script if options is None else (*RUN, *options, "--", sys.executable, *script)
    return RunningTrial(directory, command, variables, output)


def supervised(directory: Path, *words: str, **more: Any) -> Trial:
    """Run the script under supervision, until it ends."""
    return begin(directory, *words, **more).wait()


@functools.cache
def undisturbed(num_ranks: int = 1, num_workers: int = 0) -> list[Any]:
    """Return the final weights of the script without the callback and without supervision."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name) / "undisturbed"
        words = (str(SCRIPT), str(directory), "--workers", str(num_workers))
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
        command = words if num_ranks == 1 else (*torchrun, *words)
        trial = RunningTrial(directory, command, {}).wait()
        assert trial.exit_code == 0, trial.output
        return trial.told("weights")
