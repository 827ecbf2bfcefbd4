"""The ways to save that the store law holds for, and the conditions on each after a fault."""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.contents import list_files, sum_files
from lightning_faulttolerant.checkpoint.directory import AtomicDirectory
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, FileEntry
from lightning_faulttolerant.checkpoint.saving import BackgroundWriter, atomic_torch_save
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file, load_path
from lightning_faulttolerant.storage.local import make_directory
from lightning_faulttolerant.storage.store import is_url, open_store
from lightning_faulttolerant.trainer.save.checkpoint_io import AtomicCheckpointIO

FORK = multiprocessing.get_context("fork")

# Enough for several writes: Python's buffers hold 4 to 128 KiB.
NUM_WEIGHTS = 40_000


@dataclass(frozen=True, kw_only=True)
class Writer:
    """One way to save.

    Args:
        name: The test's id.
        save: Save the content with this number; the directory need not exist.
        newest: Return the file that a restart would use, or None.
        removes_leftovers: Whether a save removes the leftovers of dead writers.
        cleans_up: Whether a save that raises leaves nothing.
        seconds: About how long a save takes.
    """

    name: str
    save: Callable[[Path, int], Any]
    newest: Callable[[Path], Path | str | None]
    load: Callable[[Any], dict[str, Any]] = load_file
    removes_leftovers: bool = True
    cleans_up: bool = True
    seconds: float = 0.02

    def number(self, directory: Path) -> int:
        """Return the number of the save that a restart would load, verified and whole, or 0."""
        path = self.newest(directory)
        if path is None:
            return 0
        checkpoint = self.load(path)
        assert torch.equal(checkpoint["weights"], content(checkpoint["number"])["weights"])
        return checkpoint["number"]


def content(number: int) -> dict[str, Any]:
    """Return the content that is saved under a number."""
    return {"number": number, "weights": torch.full((NUM_WEIGHTS,), number, dtype=torch.int32)}


def _series(keep_last: int, *, is_in_background: bool = False) -> Writer:
    def save(directory: Path, number: int) -> None:
        series = AutosaveSeries(directory, keep_last=keep_last)
        job = functools.partial(series.save, content(number), epoch=0, batch=number, global_step=number)
        _in_background(job) if is_in_background else job()

    def newest(directory: Path) -> str | None:
        return AutosaveSeries(directory).newest()

    return Writer(name=f"series-{keep_last}{'-in-background' if is_in_background else ''}", save=save, newest=newest)


def _save_incrementally(directory: Path, number: int) -> None:
    # Unlike `Path.glob`, `listdir` raises each error.
    for name in os.listdir(directory) if directory.exists() else ():
        if name.startswith("base-"):  # of an earlier process: old enough to be deleted
            os.utime(directory / name, (0, 0))
    changing = {"optimizer_states": torch.full((NUM_WEIGHTS,), number, dtype=torch.int16)}
    saved = {**content(number), "ones": torch.ones(NUM_WEIGHTS), **changing}
    AutosaveSeries(directory, keep_last=2, incremental=True).save(saved, epoch=0, batch=number, global_step=number)


def _load_incremental(path: str | Path) -> dict[str, Any]:
    checkpoint = load_file(path)
    assert torch.equal(checkpoint["ones"], torch.ones(NUM_WEIGHTS))
    assert checkpoint["optimizer_states"].unique().tolist() == [checkpoint["number"]]
    return checkpoint


def _in_background(job: Callable[[], Any]) -> None:
    """Do a job in the background writer's thread, as an asynchronous save does."""
    writer = BackgroundWriter("test")
    writer.start(job)
    writer.wait()
    error = writer.take_error()
    if error is not None:
        raise error


def _save_by_lightning(directory: Path, number: int) -> None:
    AtomicCheckpointIO().save_checkpoint(content(number), directory / "checkpoints" / "last.ckpt")


def _lightnings(directory: Path) -> Path | None:
    path = directory / "checkpoints" / "last.ckpt"
    return path if path.exists() else None


def _save_to_one_path(directory: Path, number: int) -> None:
    make_directory(directory)
    atomic_torch_save(content(number), directory / "last.ckpt")


def _one_path(directory: Path) -> Path | None:
    path = directory / "last.ckpt"
    return path if path.exists() else None


def _save_to_a_directory(directory: Path, number: int) -> None:
    saver = AtomicDirectory(directory, keep_last=2, strategy="mono")
    prepared = Path(saver.prepare_checkpoint_directory())
    (prepared / "shards").mkdir()
    with open(prepared / "shards" / "0.pt", "wb") as file:  # by path, torch would write where no fault can be injected
        atomic_torch_save(content(number), file)
    (prepared / "number.txt").write_text(str(number))
    saver.symlink_latest(prepared)


def _latest_directory(directory: Path) -> str | None:
    saver = AtomicDirectory(directory, strategy="mono")
    link, latest = directory / saver.symlink_name, saver.latest()
    assert os.path.lexists(link) == (latest is not None)
    return latest


def _load_directory(path: str | Path) -> dict[str, Any]:
    checkpoint = load_file(Path(path) / "shards" / "0.pt")
    assert (Path(path) / "number.txt").read_text() == str(checkpoint["number"])
    return checkpoint


SHARD = "__0_0.distcp"


def begin_objects(series: AutosaveSeries, number: int, *, keep: bool = False) -> str:
    """Write the shards of an autosave, on a disk or in a store; return where they are."""
    begun = series.begin_directory(epoch=0, batch=number, keep=keep)
    _write_objects(begun, number)
    return begun


def _write_objects(begun: str, number: int) -> None:
    for name, saved in ((SHARD, content(number)), (METADATA_NAME, {"number": number})):
        with open_store(begun).writer(name) if is_url(begun) else open(Path(begun, name), "wb") as file:
            atomic_torch_save(saved, file)


def commit_objects(series: AutosaveSeries, begun: str) -> str:
    """Commit the shards of an autosave; return its path."""
    if not is_url(begun):
        return series.commit_directory(begun, sum_files(begun, list_files(begun)))
    sums = {}
    for name in open_store(begun).names():
        if name != MANIFEST_NAME:
            data = open_store(begun).read(name)
            sums[name] = FileEntry(size_bytes=len(data), crc32=zlib.crc32(data))
    return series.commit_directory(begun, sums)


def save_objects(series: AutosaveSeries, number: int, *, keep: bool = False) -> str:
    """Save shards, and commit them; return the path of the autosave."""
    return commit_objects(series, begin_objects(series, number, keep=keep))


def load_objects(path: str) -> int:
    """Return the number of an autosave of shards, verified."""
    number: int = load_path(path)["number"]
    shard = load_file(open_store(path).path(SHARD))
    assert shard["number"] == number
    assert torch.equal(shard["weights"], content(number)["weights"])
    return number


def _save_shards(directory: Path, number: int) -> None:
    series = AutosaveSeries(directory, keep_last=2)
    begun = series.begin_directory(epoch=0, batch=number)
    try:
        _write_objects(begun, number)
        commit_objects(series, begun)
    except OSError:
        with suppress(OSError):
            series.drop_directory(begun)
        raise


# Code that begins a directory and fails to fill it has to call abort, or leave it to the next save.
DIRECTORY = Writer(
    name="directory",
    save=_save_to_a_directory,
    newest=_latest_directory,
    load=_load_directory,
    cleans_up=False,
    seconds=0.1,
)
SHARDS = Writer(
    name="shards",
    save=_save_shards,
    newest=lambda directory: AutosaveSeries(directory).newest(),
    load=lambda path: {"number": load_objects(str(path)), **content(load_objects(str(path)))},
    cleans_up=False,
    seconds=0.1,
)
ONE_PATH = Writer(name="one-path", save=_save_to_one_path, newest=_one_path, removes_leftovers=False)
SERIES = _series(2)
INCREMENTAL = Writer(
    name="incremental",
    save=_save_incrementally,
    newest=lambda directory: AutosaveSeries(directory).newest(),
    load=_load_incremental,
    seconds=0.04,
)
CHECKPOINT_IO = Writer(
    name="checkpoint-io",
    save=_save_by_lightning,
    newest=_lightnings,
    load=AtomicCheckpointIO().load_checkpoint,
    removes_leftovers=False,
)
FILE_WRITERS = [_series(1, is_in_background=True), SERIES, INCREMENTAL, ONE_PATH, CHECKPOINT_IO]
WRITERS = [*FILE_WRITERS, DIRECTORY, SHARDS]


def prepared(writer: Writer, directory: Path, *, num_saves: int) -> Callable[[], Path]:
    """Return a function that creates fresh directories below this one, each with `num_saves` saves in it."""
    original = directory / "original"
    original.mkdir(parents=True)
    for number in range(1, num_saves + 1):
        writer.save(original / "run", number)
    copies = (directory / str(number) for number in itertools.count(1))

    def fresh() -> Path:
        here = next(copies)
        shutil.copytree(original, here, symlinks=True)
        return here / "run"

    return fresh


def leftovers(directory: Path) -> list[str]:
    """Return the names of temporary files."""
    return sorted(path.name for path in directory.rglob("*") if ".tmp" in path.name)


def exit_code(main: Callable[[], Any]) -> int:
    """Run a function in a forked process and return its exit code; negative for a signal that killed it."""
    process = FORK.Process(target=main)
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


@contextmanager
def temporary_directory_elsewhere(directory: Path) -> Iterator[None]:
    """Make ``$TMPDIR`` another directory, for this process and those that it forks."""
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
