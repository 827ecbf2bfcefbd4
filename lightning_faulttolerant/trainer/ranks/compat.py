"""Private names of Lightning for training with several ranks, checked on 2.5.6 to 2.6.6."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import IO, Any, Protocol

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor

SEAMS = {
    "trainer._accelerator_connector.cluster_environment": "queueing a SLURM job again",
}
STRATEGY_SEAMS = {
    "ModelParallelStrategy._save_distributed_checkpoint": "distinguishing autosaves of several files from those of one",
    "FSDPStrategy._state_dict_type": "distinguishing autosaves of several files from those of one",
}
METADATA_NAME = _METADATA_FILENAME
"""The file in a directory of shards that holds everything outside the shards."""
OBSERVER_THREAD = "child-process-observer"


def cluster_environment(trainer: Trainer) -> ClusterEnvironment | None:
    """Return the environment that started the processes; a strategy for one device doesn't know it."""
    return trainer._accelerator_connector.cluster_environment


def call_off_observers() -> None:
    """Keep the launcher's observer from killing rank 0 for the exit codes of other ranks: all end together, saved.

    Every 5 seconds the observer checks whether a process that it started ended with an error, and 143 counts as one.
    """
    for thread in threading.enumerate():
        if thread.name == OBSERVER_THREAD:
            observer: Any = thread
            observer._child_processes = []


class ShardFiles(Protocol):
    """Files that are not on a disk."""

    def open_writer(self, path: str | os.PathLike[str]) -> AbstractContextManager[IO[bytes]]:
        """Open a file for writing."""

    def open_reader(self, path: str | os.PathLike[str]) -> AbstractContextManager[IO[bytes]]:
        """Open a file for reading."""

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a file exists."""


@contextlib.contextmanager
def files_of_shards(files: ShardFiles) -> Iterator[None]:
    """Within the block, let ``torch.distributed.checkpoint`` write and read these files, checked on 2.4 to 2.13.

    Its writers and readers for paths each create a ``FileSystem``, and Lightning offers no way to pass another writer.
    """
    from torch.distributed.checkpoint import filesystem  # noqa: PLC0415, RUF100 - takes a second to import

    class Files(filesystem.FileSystemBase):
        @contextlib.contextmanager
        def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
            with files.open_reader(path) if mode == "rb" else files.open_writer(path) as stream:
                yield stream

        def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
            return os.path.join(path, suffix)

        def init_path(self, path: str | os.PathLike[str]) -> str | os.PathLike[str]:
            return path

        def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
            files.rename(path, new_path)

        def mkdir(self, path: str | os.PathLike[str]) -> None:
            """Do nothing: a store has no directories."""

        @classmethod
        def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
            return True

        def exists(self, path: str | os.PathLike[str]) -> bool:
            return files.exists(path)

        def rm_file(self, path: str | os.PathLike[str]) -> None:
            raise NotImplementedError(f"{path} is to be replaced, but each autosave has its own directory")

    real = filesystem.FileSystem
    filesystem.FileSystem = Files  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        filesystem.FileSystem = real  # type: ignore[misc]


def saves_shards(strategy: object) -> bool:
    """Return whether a strategy writes a checkpoint as a directory in which each rank has its own files."""
    if isinstance(strategy, ModelParallelStrategy):
        return bool(strategy._save_distributed_checkpoint)
    if isinstance(strategy, FSDPStrategy):
        return strategy._state_dict_type == "sharded"
    return isinstance(strategy, DeepSpeedStrategy)


def gradient_buffer_of(optimizer: Any, number: int) -> Tensor:
    """Return where DeepSpeed's optimizer adds up the gradients of a group in float32. Checked on DeepSpeed 0.19.8."""
    buffer: Tensor = optimizer._get_compact_grad_partition_buffer(number).flat_partition
    return buffer
