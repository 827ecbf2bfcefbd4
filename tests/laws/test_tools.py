"""Scripts that tools start: profilers, Hydra, notebooks, pools, Ray, submitit, Optuna. Typed again, they continue."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import python
from tests.laws.events import Event, read, slice_of
from tests.laws.processes import signal_to

pytestmark = [pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "scripts/train.py"
TERM, KILL = signal.SIGTERM, signal.SIGKILL
NOTEBOOK = ("-c", "from nbclient.cli import main; main()", "notebook.ipynb")
PROFILER = ("-m", "cProfile", "-o", "profile.out")


@dataclass(frozen=True)
class Tool:
    """How a script is started.

    Args:
        words: The arguments of Python.
        fits: The fits that it trains; the last one is cut.
        code: The exit code of a start that is stopped; any failure if it is ``None``.
    """

    words: tuple[str, ...]
    fits: tuple[str, ...] = ("one",)
    code: int | None = 128 + TERM


TWO = ("one", "two")
TOOLS = {
    "script": Tool(("train.py", "one")),
    "loop": Tool(("train.py", "loop"), TWO),
    "module": Tool(("-m", "train", "one")),
    "profiler": Tool((*PROFILER, "train.py", "one"), code=0),
    "debugger": Tool(("-m", "debugpy", "--listen", "127.0.0.1:0", "train.py", "one")),
    "notebook": Tool(NOTEBOOK, code=None),
    "hydra": Tool(("train.py", "hydra")),
    "hydra sweep": Tool(("train.py", "hydra", "-m", "+name=one,two"), TWO),
    **{name: Tool(("train.py", name), TWO, None) for name in ("fork", "spawn", "joblib", "ray", "submitit")},
}
REAL = {"module", "debugger", "notebook"}
"""Their second start is not forked from this process: it is one as from a shell."""
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("script", "hydra"))) for name in TOOLS]


class Project:
    """A directory with the script, in which it is started."""

    def __init__(self, root: Path, ray_directory: str) -> None:
        self.root, self.number = root, 0
        self.directory = root / "project"
        self.directory.mkdir(parents=True)
        shutil.copy(SCRIPT, self.directory)
        self.environment = {"RAY_DIRECTORY": ray_directory, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        cell = {"cell_type": "code", "id": "a", "metadata": {}, "outputs": [], "execution_count": None}
        source = "import sys; sys.path.insert(0, '.')\nfrom train import train\ntrain('one')"
        notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{**cell, "source": source}]}
        (self.directory / "notebook.ipynb").write_text(json.dumps(notebook))

    def start(
        self, *words: str, cut: str = "", is_on: bool = True, is_real: bool = False
    ) -> tuple[int, str, dict[str, list[Event]]]:
        """Start Python with these arguments; return its exit code, what it printed, and the events of each fit."""
        self.number += 1
        record = self.root / f"record-{self.number}"
        record.mkdir()
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PL_", "PYTEST", "JPY"))}
        environment = {
            **inherited, **self.environment, "RECORD": str(record), "CUT": cut, "HOME": str(self.root),
            "PL_FAULT_TOLERANT_TRAINING": str(int(is_on)), "PL_FAULT_TOLERANT_OPTIONS": "every_n_train_steps=1",
        }  # fmt: skip
        words = (sys.executable, *words)
        if is_real:
            with open(self.root / f"real-{self.number}.txt", "w") as file:
                process = subprocess.Popen(
                    words, cwd=self.directory, env=environment, stdout=file, stderr=file, start_new_session=True
                )
                code = process.wait()
                signal_to(process.pid, KILL, os.killpg)
            output = Path(file.name).read_text()
        else:
            command = python.Command(words=words, directory=str(self.directory), environment=environment)
            code, output = python.run(command, scratch=self.root / f"scratch-{self.number}")
        return code, output, {path.stem: read(path) for path in record.iterdir()}


@pytest.fixture
def ray_directory() -> Iterator[str]:
    """Yield a directory whose name is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        yield directory


@pytest.mark.parametrize("signum", [TERM, pytest.param(KILL, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NAMES)
def test_tool(name: str, signum: signal.Signals, tmp_path: Path, ray_directory: str) -> None:
    """Cut twice, the command continues each fit to the end of the uninterrupted one; then it is a new run."""
    tool = TOOLS[name]
    _, output, whole = Project(tmp_path / "plain", ray_directory).start(*tool.words, is_on=False)
    assert whole.keys() == {*tool.fits}, output
    project = Project(tmp_path / "cut", ray_directory)
    for place in ("0 3", "1 2", None):
        cut = f"{tool.fits[-1]} {place} {int(signum)}" if place else ""
        is_real = name in REAL and signum == TERM and place == "1 2"
        code, output, found = project.start(*tool.words, cut=cut, is_real=is_real)
        expected = 0 if place is None else tool.code if signum == TERM else None
        assert code == expected if expected is not None else code != 0, output
        for fit, events in found.items():
            begin, end = slice_of(whole[fit], events, whole_name="the plain run", part_name=f"{fit} to {place}")
            assert fit != tool.fits[-1] or place == "0 3" or begin > 0, output
            assert place or end == len(whole[fit]), output
    _, output, again = project.start(*tool.words)
    assert again == whole, output


@pytest.mark.slow
def test_trial_of_optuna_that_is_run_again_continues(tmp_path: Path, ray_directory: str) -> None:
    """A study that is stopped in a trial repeats the trial, which continues."""
    project = Project(tmp_path, ray_directory)
    code, output, _ = project.start("train.py", "optuna", cut=f"one 0 3 {int(TERM)}")
    assert code == 128 + TERM, output
    time.sleep(3.5)  # Optuna takes a trial without a heartbeat for dead
    code, output, found = project.start("train.py", "optuna")
    assert code == 0, output
    assert "Resumed exactly before batch 4 of epoch 0" in output
    assert [events[-1]["kind"] for events in found.values()].count("end") >= 1
