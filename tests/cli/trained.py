"""Starts the training, and commands on it, as a user does: in processes forked from one that has imported Lightning."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests import processes
from tests.harness import python

ROOT = Path(__file__).parents[2]
TRAINING = Path(__file__).with_name("training.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class Ended(processes.Ended):
    def lines(self) -> list[str]:
        """Return what a replay itself has printed, without the script's output."""
        return self.output[self.output.index("Replay of fit") :].splitlines()


def start(where: Path, *words: str, **variables: str) -> Ended:
    """Run a Python command in a directory; its output is written beside it."""
    outside = where.with_name(f"{where.name}-output")
    outside.mkdir(exist_ok=True)
    own = ("PL_", "SLURM_", "PYTEST_", "FACTOR", "IS_CALM", "RULE")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(outside), **variables}
    asked = python.Command(words=[sys.executable, *words], directory=str(where), environment=environment)
    return Ended(*python.run(asked, scratch=outside / str(len(os.listdir(outside)))))


def train(where: Path, *arguments: str, launcher: Sequence[str] = (), **variables: str) -> Ended:
    """Run the training."""
    return start(where, *launcher, str(TRAINING), str(where / "out"), *arguments, **variables)


def on_training(
    where: Path,
    command: str,
    *options: str,
    arguments: Sequence[str] = (),
    launcher: Sequence[str] = (),
    script: Path = TRAINING,
    **variables: str,
) -> Ended:
    """Run a command of ours on the training with these arguments."""
    words = (*launcher, str(script), str(where / "out"), *arguments)
    ours = ("-m", "lightning_faulttolerant", command, *options, "--", sys.executable)
    return start(where, *ours, *words, **variables)


def content(directory: Path) -> dict[str, object]:
    """Return all that is below a directory: files with their content and time, links, directories."""
    found: dict[str, object] = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = None if path.is_dir() else (path.read_bytes(), path.stat().st_mtime_ns)
    return found
