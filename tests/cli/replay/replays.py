"""Starts the training, and replays of it, as a user does: in processes forked from one that has imported Lightning."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.harness import python

TRAINING = Path(__file__).with_name("training.py")
ROOT = Path(__file__).parents[3]
LAUNCHER = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


@dataclass(frozen=True)
class Replayed:
    """How a process ended, and what it printed."""

    exit_code: int
    output: str

    def lines(self) -> list[str]:
        """Return what the command itself has printed, without the script's output."""
        return self.output[self.output.index("Replay of fit") :].splitlines()


def train(where: Path, *arguments: str, launcher: tuple[str, ...] = (), **variables: str) -> Replayed:
    """Run the training in a directory."""
    return _start(where, *launcher, str(TRAINING), str(where / "out"), *arguments, **variables)


def replay(
    where: Path, *options: str, arguments: tuple[str, ...] = (), launcher: tuple[str, ...] = (), **variables: str
) -> Replayed:
    """Replay the training that was run in a directory with these arguments."""
    command = (sys.executable, *launcher, str(TRAINING), str(where / "out"), *arguments)
    return _start(where, "-m", "lightning_faulttolerant", "replay", *options, "--", *command, **variables)


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


def _start(where: Path, *words: str, **variables: str) -> Replayed:
    own = ("PL_", "SLURM_", "PYTEST_", "FACTOR", "IS_CALM", "FLIPPED")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(where), **variables}
    outside = where.with_name(f"{where.name}-output")
    outside.mkdir(exist_ok=True)
    output = outside / f"{len(list(outside.iterdir()))}.txt"
    command = python.Command(words=(sys.executable, *words), directory=str(where), environment=environment)
    code = python.Popen(command, output=output, mark=outside / "mark").wait()
    return Replayed(code, output.read_text())
