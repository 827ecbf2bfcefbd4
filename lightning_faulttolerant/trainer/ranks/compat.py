"""Private names of Lightning for training with several ranks, checked on 2.5.6 to 2.6.6.

Those of torch's DistributedDataParallel were read in torch 2.4 and run on 2.13.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from typing import IO, Any, Protocol

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

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

    def open_writer(self, path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a file for writing."""

    def open_reader(self, path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[IO[bytes]]:
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


def has_shards(strategy: object) -> bool:
    """Return whether a strategy leaves each rank with a part of each weight."""
    return isinstance(strategy, (FSDPStrategy, ModelParallelStrategy))


def saves_shards(strategy: object) -> bool:
    """Return whether a strategy writes a checkpoint as a directory in which each rank has its own files."""
    if isinstance(strategy, ModelParallelStrategy):
        return bool(strategy._save_distributed_checkpoint)
    return isinstance(strategy, FSDPStrategy) and strategy._state_dict_type == "sharded"


DDP_SEAMS = {
    "ddp._get_ddp_logging_data": "the order of gradients in the buckets of three and more ranks",
    "ddp._build_params_for_reducer": "the same",
    "ddp._build_debug_param_to_name_mapping": "the same",
    "ddp._ddp_init_helper": "the same",
    "ddp._use_python_reducer": "the same under torch.compile's own reducer, which has none",
    "ddp._delay_all_reduce_params": "the same where some gradients are reduced together at the end",
    "ddp._comm_hooks": "communication hooks of such a run",
    "ddp.reducer._remove_autograd_hooks": "the same order: gradients would be reduced twice",
    "ddp.reducer._push_all_rebuilt_params": "the same order",
    "ddp.reducer._rebuild_buckets": "the same order",
    "ddp.reducer._set_static_graph": "the same order with static_graph=True",
    "ddp.logger._set_static_graph": "the same order with static_graph=True",
    "ddp._sync_buffers": "slow ranks of models with buffers: the others wait there before the forward pass",
}

SYNC_BUFFERS = "_sync_buffers"
"""The method in which DDP copies rank 0's buffers to all ranks, before each forward pass."""

_REBUILT = "rebuilt_per_bucket_param_indices"
_READY = "prev_iteration_grad_ready_order_indices"


def reduction_order(ddp: Any) -> list[int] | None:
    """Return the order of gradients in DDP's buckets from the next batch on, by number.

    ``None`` as long as it is the first layout, which a new DDP has too.
    """
    if ddp.find_unused_parameters and not ddp.static_graph:
        return None  # never rebuilt
    data = ddp._get_ddp_logging_data()
    if not data.get("has_rebuilt_buckets"):
        ddp.logger.set_runtime_stats_and_log()  # DDP reports each batch only when the next one begins
        data = ddp._get_ddp_logging_data()
    text = data.get(_REBUILT) if data.get("has_rebuilt_buckets") else data.get(_READY)
    return [int(number) for number in text.replace(",", " ").split()] if text else None


def is_after_its_first_backward(ddp: Any) -> bool:
    """Return whether a static graph is recorded, but not yet the order of its gradients."""
    data = ddp._get_ddp_logging_data()
    return bool(ddp.static_graph and data.get("iteration") == 1 and not data.get(_READY))


def why_not_reordered(ddp: Any, order: Sequence[int]) -> str | None:
    """Return why `set_reduction_order` can't be called."""
    num_parameters = len(ddp._build_params_for_reducer()[0])
    if sorted(order) != list(range(num_parameters)):
        return f"{len(order)} parameters were reduced, and now {num_parameters} are"
    if ddp._use_python_reducer or ddp._delay_all_reduce_params or ddp.mixed_precision is not None:
        return "its settings determine another order"
    return None


def set_reduction_order(ddp: Any, order: Sequence[int]) -> None:
    """Give DDP the buckets that it creates itself if gradients come in this order; a collective.

    DDP creates its buckets again after the first backward. A reducer does the same immediately if it gets the
    parameters in that order, and is told that all of them are ready.
    """
    parameters, are_sparse = ddp._build_params_for_reducer()
    ordered = [parameters[number] for number in order]
    ddp.reducer._remove_autograd_hooks()
    ddp._ddp_init_helper(
        ordered,
        [are_sparse[number] for number in order],
        ddp._build_debug_param_to_name_mapping(ordered),
        ddp.static_graph,
    )
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in ddp._comm_hooks:
        dist._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
    ddp.reducer._push_all_rebuilt_params()
    ddp.reducer._rebuild_buckets()


def hooks_with_state(ddp: Any) -> list[str]:
    """Return the communication hooks that keep a state from batch to batch."""
    kept: list[Any] = [(hook, state) for hook, state in ddp._comm_hooks if state is not None]
    return [
        getattr(hook, "__qualname__", type(hook).__qualname__)
        for hook, state in kept
        if not isinstance(state, dist.ProcessGroup)
    ]
