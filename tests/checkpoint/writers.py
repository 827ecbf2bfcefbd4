"""The ways to save that the store law holds for, and what a restart finds of each."""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.contents import commit_files, list_files, sum_files
from lightning_faulttolerant.checkpoint.directory import AtomicDirectory
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, FileEntry, check_metadata
from lightning_faulttolerant.checkpoint.saving import atomic_torch_save
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import load_file, load_path
from lightning_faulttolerant.storage.local import make_directory
from lightning_faulttolerant.storage.store import is_url, open_store

SHARD = "__0_0.distcp"
NUM_WEIGHTS = 40_000
"""Enough for several writes: Python's buffers hold 4 to 128 KiB."""


def content(number: int) -> dict[str, Any]:
    """Return the content that is saved under a number."""
    return {"number": number, "weights": torch.full((NUM_WEIGHTS,), number, dtype=torch.int32)}


def save_file(series: AutosaveSeries, number: int, **more: Any) -> str:
    """Save a file; return its path."""
    return series.save({**content(number), **more}, epoch=0, batch=number, global_step=number)


def newest_of(series: AutosaveSeries) -> str | None:
    """Return the newest autosave that verifies and loads."""
    found = series.load_newest()
    return None if found is None else found[0]


def write_manifest(directory: str | os.PathLike[str], *, metadata: dict[str, Any] | None = None) -> None:
    """Commit a directory with the files that are in it."""
    check_metadata(metadata or {})
    commit_files(directory, sum_files(directory, list_files(directory)), metadata=metadata)


def begin_objects(series: AutosaveSeries, number: int) -> str:
    """Write the shards of an autosave, on a disk or in a store; return where they are."""
    begun = series.begin_directory(epoch=0, batch=number)
    for name, saved in ((SHARD, content(number)), (METADATA_NAME, {"number": number})):
        with open_store(begun).writer(name) if is_url(begun) else open(Path(begun, name), "wb") as file:
            atomic_torch_save(saved, file)
    return begun


def save_objects(series: AutosaveSeries, number: int) -> str:
    """Save shards, and commit them; return the path of the autosave."""
    begun = begin_objects(series, number)
    if not is_url(begun):
        return series.commit_directory(begun, sum_files(begun, list_files(begun)))
    shards = {name: open_store(begun).read(name) for name in open_store(begun).names() if name != MANIFEST_NAME}
    sums = {name: FileEntry(size_bytes=len(data), crc32=zlib.crc32(data)) for name, data in shards.items()}
    return series.commit_directory(begun, sums)


def load_objects(path: str | Path) -> dict[str, Any]:
    """Return the content of an autosave of shards, verified."""
    shard = load_file(open_store(str(path)).path(SHARD))
    assert load_path(path)["number"] == shard["number"]
    return shard


@dataclass(frozen=True, kw_only=True)
class Writer:
    """One way to save.

    Args:
        name: The test's id.
        save: Save the content with this number; the directory need not exist.
        newest: Return the file that a restart would use, or None.
        load: Load it.
        removes_leftovers: Whether a save removes the leftovers of dead writers.
        cleans_up: Whether a save that raises leaves nothing.
    """

    name: str
    save: Callable[[Path, int], Any]
    newest: Callable[[Path], Path | str | None] = lambda directory: newest_of(AutosaveSeries(directory))
    load: Callable[[Any], dict[str, Any]] = load_file
    removes_leftovers: bool = True
    cleans_up: bool = True

    def number(self, directory: Path) -> int:
        """Return the number of the save that a restart would load, verified and whole, or 0."""
        path = self.newest(directory)
        if path is None:
            return 0
        checkpoint = self.load(path)
        assert torch.equal(checkpoint["weights"], content(checkpoint["number"])["weights"])
        return checkpoint["number"]


def _save_incrementally(directory: Path, number: int) -> None:
    # Unlike `Path.glob`, `listdir` raises each error.
    for name in os.listdir(directory) if directory.exists() else ():
        if name.startswith("base-"):  # of an earlier process: old enough to be deleted
            os.utime(directory / name, (0, 0))
    changing = torch.full((NUM_WEIGHTS,), number, dtype=torch.int16)
    series = AutosaveSeries(directory, keep_last=2, incremental=True)
    save_file(series, number, ones=torch.ones(NUM_WEIGHTS), optimizer_states=changing)


def _load_incremental(path: str | Path) -> dict[str, Any]:
    checkpoint = load_file(path)
    assert torch.equal(checkpoint["ones"], torch.ones(NUM_WEIGHTS))
    assert checkpoint["optimizer_states"].unique().tolist() == [checkpoint["number"]]
    return checkpoint


def _save_to_one_path(directory: Path, number: int) -> None:
    make_directory(directory)
    atomic_torch_save(content(number), directory / "last.ckpt")


def _one_path(directory: Path) -> Path | None:
    return directory / "last.ckpt" if (directory / "last.ckpt").exists() else None


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


def _save_shards(directory: Path, number: int) -> None:
    series = AutosaveSeries(directory, keep_last=2)
    try:
        save_objects(series, number)
    except OSError:
        for path in directory.glob(f".*-{os.getpid()}-*"):
            with suppress(OSError):
                series.drop_directory(str(path))
        raise


SERIES = Writer(name="series", save=lambda directory, number: save_file(AutosaveSeries(directory, keep_last=1), number))
INCREMENTAL = Writer(name="incremental", save=_save_incrementally, load=_load_incremental)
ONE_PATH = Writer(name="one-path", save=_save_to_one_path, newest=_one_path, removes_leftovers=False)
FILE_WRITERS = [SERIES, INCREMENTAL, ONE_PATH]
# Code that begins a directory and fails to fill it has to call abort, or leave it to the next save.
_OF_A_DIRECTORY = functools.partial(Writer, cleans_up=False)
DIRECTORY = _OF_A_DIRECTORY(name="directory", save=_save_to_a_directory, newest=_latest_directory, load=_load_directory)
SHARDS = _OF_A_DIRECTORY(name="shards", save=_save_shards, load=load_objects)
WRITERS = [*FILE_WRITERS, DIRECTORY, SHARDS]
