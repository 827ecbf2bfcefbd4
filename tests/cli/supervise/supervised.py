"""Starts the script of these tests, alone or in a supervised run, as real processes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.cli.supervise.training import Plan, told
from tests.harness import python

ROOT = Path(__file__).parents[3]
SCRIPT = Path(__file__).with_name("training.py")
RUN = ("-m", "lightning_faulttolerant", "run")


@dataclass(frozen=True)
class Trial:
    """How a command has ended, what it and its processes have printed, and the directory of the script."""

    exit_code: int
    output: str
    directory: Path

    def told(self, name: str) -> list[Any]:
        """Return what the script has written down."""
        return told(self.directory, name)

    @property
    def num_starts(self) -> int:
        """How many processes have trained."""
        return len({process_id for process_id, _ in self.told("steps")})


class RunningTrial:
    """A command of Python that runs."""

    def __init__(self, directory: Path, words: Sequence[str], output: str = "output", **environment: str) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._output, self._mark = directory, directory / f"{output}.txt", directory / f"{output}.mark"
        # What an outer run has set must not reach the script.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "SLURM_"))}
        variables = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
        command = python.Command(words=[sys.executable, *words], directory=str(directory), environment=variables)
        self.process = python.Popen(command, output=self._output, mark=self._mark)

    def steps(self) -> list[Any]:
        """Return the process and the number of each step so far."""
        return told(self._directory, "steps")

    def wait(self, timeout_seconds: float = 250) -> Trial:
        """Wait until it ends; it must end by itself, and leave no process.

        Raises:
            TimeoutError: If it does not end. It is killed, with all its processes.
        """
        try:
            code = self.process.wait(timeout_seconds)
            deadline = time.monotonic() + 8
            while (left := python.marked(self._mark)) and time.monotonic() < deadline:
                time.sleep(0.05)
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


def begin(
    directory: Path,
    plan: Plan,
    *,
    options: Sequence[str] | None = (),
    flags: str = "",
    output: str = "output",
) -> RunningTrial:
    """Start the script.

    Args:
        directory: Its directory.
        plan: Its arguments.
        options: The options of the supervised run; ``None`` starts the script alone.
        flags: More arguments of the callback.
        output: The name of a file for its output.
    """
    script = (str(SCRIPT), str(directory), json.dumps(asdict(plan)))
    command = script if options is None else (*RUN, *options, "--", sys.executable, *script)
    variables = {"PL_FAULT_TOLERANT_OPTIONS": f"every_n_train_steps=1, dirpath={directory / 'autosaves'}{flags}"}
    variables |= {"PL_FAULT_TOLERANT_TRAINING": "1"} if options is None else {}
    return RunningTrial(directory, command, output, **variables)


@functools.cache
def undisturbed(num_ranks: int = 1, num_workers: int = 0) -> list[Any]:
    """Return the final weights of the script without the callback and without supervision."""
    with tempfile.TemporaryDirectory() as name:
        words = (str(SCRIPT), name, json.dumps(asdict(Plan(num_workers=num_workers))))
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
        trial = RunningTrial(Path(name), words if num_ranks == 1 else (*torchrun, *words)).wait()
        assert trial.exit_code == 0, trial.output
        return trial.told("weights")
