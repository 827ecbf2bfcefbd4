"""Private names of Lightning's that have to do with several ranks, checked on 2.5.6 to 2.6.6."""

from __future__ import annotations

import threading
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

SEAMS = {
    "trainer._accelerator_connector.cluster_environment": "queueing a SLURM job again",
}
STRATEGY_SEAMS = {
    "ModelParallelStrategy._save_distributed_checkpoint": "telling autosaves of several files from those of one",
    "FSDPStrategy._state_dict_type": "telling autosaves of several files from those of one",
}
METADATA_NAME = _METADATA_FILENAME
"""The file in a directory of shards that holds all that is not in shards."""
OBSERVER_THREAD = "child-process-observer"


def cluster_environment(trainer: Trainer) -> ClusterEnvironment | None:
    """Return the environment that has started the processes; a strategy for one device doesn't know it."""
    return trainer._accelerator_connector.cluster_environment


def call_off_observers() -> None:
    """Let the launcher's observer not kill rank 0 for the exit codes of the others: all end together, saved.

    It looks every 5 seconds whether a process that it has started has ended with an error, and takes 143 for one.
    """
    for thread in threading.enumerate():
        observer: Any = thread
        if thread.name == OBSERVER_THREAD and hasattr(observer, "_child_processes"):
            observer._child_processes = []


def saves_shards(strategy: Any) -> bool:
    """Return whether a strategy writes a checkpoint as a directory, each rank its own files."""
    if isinstance(strategy, ModelParallelStrategy):
        return bool(strategy._save_distributed_checkpoint)
    return isinstance(strategy, FSDPStrategy) and strategy._state_dict_type == "sharded"
