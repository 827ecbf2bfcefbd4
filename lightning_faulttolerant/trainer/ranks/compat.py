"""Private names of Lightning for training with several ranks, checked on 2.5.6 to 2.6.6."""

from __future__ import annotations

import threading
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor

SEAMS = {
    "trainer._accelerator_connector.cluster_environment": "queueing a SLURM job again",
}
STRATEGY_SEAMS = {
    "ModelParallelStrategy._save_distributed_checkpoint": "telling autosaves of several files from those of one",
    "FSDPStrategy._state_dict_type": "telling autosaves of several files from those of one",
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
