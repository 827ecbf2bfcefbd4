"""The ways to save that the store law holds for, and what must be true of each after a fault."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_faulttolerant.checkpoint import AutosaveSeries, atomic_torch_save, load_file
from lightning_faulttolerant.checkpoint.atomic_file import make_directory

FORK = multiprocessing.get_context("fork")

# Enough for several writes: Python's buffers hold 4 to 128 KiB.
NUM_WEIGHTS = 40_000


@dataclass(frozen=True, kw_only=True)
class Writer:
    """One way to save.

    Args:
        name: For the test's id.
        save: Saves the content with this number; the directory need not exist.
        newest: Returns the file that a restart would take, None where there is none.
        removes_leftovers: Whether a save removes what dead writers left.
    """

    name: str
    save: Callable[[Path, int], Any]
    newest: Callable[[Path], Path | str | None]
    load: Callable[[Path], dict[str, Any]] = load_file
    removes_leftovers: bool = True

    def number(self, directory: Path) -> int:
        """Return the number of what a restart would load, verified and whole; 0 where there is nothing."""
        path = self.newest(directory)
        if path is None:
            return 0
        checkpoint = self.load(path)
        assert torch.equal(checkpoint["weights"], content(checkpoint["number"])["weights"])
        return checkpoint["number"]


def content(number: int) -> dict[str, Any]:
    """What is saved under a number."""
    return {"number": number, "weights": torch.full((NUM_WEIGHTS,), number, dtype=torch.int32)}


def _series(keep_last: int) -> Writer:
    def save(directory: Path, number: int) -> Path:
        series = AutosaveSeries(directory, keep_last=keep_last)
        return series.save(content(number), epoch=0, batch=number, global_step=number)

    return Writer(name=f"series-{keep_last}", save=save, newest=lambda directory: AutosaveSeries(directory).newest())


def _save_to_one_path(directory: Path, number: int) -> None:
    make_directory(directory)
    atomic_torch_save(content(number), directory / "last.ckpt")


def _one_path(directory: Path) -> Path | None:
    path = directory / "last.ckpt"
    return path if path.exists() else None


ONE_PATH = Writer(name="one-path", save=_save_to_one_path, newest=_one_path, removes_leftovers=False)
SERIES = _series(2)
WRITERS = [_series(1), SERIES, ONE_PATH]


def leftovers(directory: Path) -> list[str]:
    """Return the names of temporary files."""
    return sorted(path.name for path in directory.rglob("*") if ".tmp" in path.name)


def exit_code(main: Callable[[], Any]) -> int:
    """Run a function in a forked process; negative for a signal that killed it."""
    process = FORK.Process(target=main)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@contextmanager
def temporary_directory_elsewhere(directory: Path) -> Iterator[None]:
    """Let ``$TMPDIR`` be another directory, for this process and those that it forks."""
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = str(directory)
    try:
        yield
    finally:
        tempfile.tempdir = before
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable
