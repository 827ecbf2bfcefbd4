"""Fault-tolerant training for PyTorch Lightning: killed at any moment, run again, it continues exactly where it was."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING

import lightning_faulttolerant.clock  # noqa: F401 - before anyone replaces what it binds
from lightning_faulttolerant.early_signals import EARLY
from lightning_faulttolerant.errors import (
    AdvancedTooFarError,
    CheckpointError,
    DamagedCheckpointError,
    FaultToleranceError,
    FingerprintMismatchError,
    HasNotResetProgressError,
    NotExactError,
    NoValidCheckpointError,
    RunInUseError,
    TrainingStopped,
    UnsafeCheckpointError,
    UnsupportedTrainerError,
)

if TYPE_CHECKING:
    from lightning_faulttolerant.checkpoint.directory import AtomicDirectory
    from lightning_faulttolerant.checkpoint.saving import atomic_torch_save
    from lightning_faulttolerant.loader.resumable import ResumableDataLoader
    from lightning_faulttolerant.records.incidents import MeasuredStep
    from lightning_faulttolerant.samplers.grouped import InterruptibleDistributedGroupedBatchSampler
    from lightning_faulttolerant.samplers.images import DistributedShardedDataset, ShardedMapDataset
    from lightning_faulttolerant.samplers.interruptible import InterruptibleDistributedSampler, InterruptibleSampler
    from lightning_faulttolerant.samplers.metrics import MetricsTracker, TimestampedTimer
    from lightning_faulttolerant.streaming.dataset import StreamingDataset
    from lightning_faulttolerant.streaming.format.writer import MDSWriter
    from lightning_faulttolerant.streaming.loader import StreamingDataLoader
    from lightning_faulttolerant.streaming.shards import Stream
    from lightning_faulttolerant.trainer.callback import FaultTolerance
    from lightning_faulttolerant.trainer.companions import FlightRecorder, HangWatch
    from lightning_faulttolerant.trainer.resume.report import ResumeReport
    from lightning_faulttolerant.trainer.save.checkpoint_io import AtomicCheckpointIO

    __version__: str

    InterruptableDistributedGroupedBatchSampler = InterruptibleDistributedGroupedBatchSampler
    InterruptableDistributedSampler = InterruptibleDistributedSampler
    InterruptableSampler = InterruptibleSampler

__all__ = [
    "AdvancedTooFarError",
    "AtomicCheckpointIO",
    "AtomicDirectory",
    "CheckpointError",
    "DamagedCheckpointError",
    "DistributedShardedDataset",
    "FaultTolerance",
    "FaultToleranceError",
    "FingerprintMismatchError",
    "FlightRecorder",
    "HangWatch",
    "HasNotResetProgressError",
    "InterruptableDistributedGroupedBatchSampler",
    "InterruptableDistributedSampler",
    "InterruptableSampler",
    "InterruptibleDistributedGroupedBatchSampler",
    "InterruptibleDistributedSampler",
    "InterruptibleSampler",
    "MDSWriter",
    "MeasuredStep",
    "MetricsTracker",
    "NoValidCheckpointError",
    "NotExactError",
    "ResumableDataLoader",
    "ResumeReport",
    "RunInUseError",
    "ShardedMapDataset",
    "Stream",
    "StreamingDataLoader",
    "StreamingDataset",
    "TimestampedTimer",
    "TrainingStopped",
    "UnsafeCheckpointError",
    "UnsupportedTrainerError",
    "atomic_torch_save",
]

# These need torch or Lightning, which take seconds to import.
_LAZY = {
    "AtomicCheckpointIO": "lightning_faulttolerant.trainer.save.checkpoint_io",
    "AtomicDirectory": "lightning_faulttolerant.checkpoint.directory",
    "DistributedShardedDataset": "lightning_faulttolerant.samplers.images",
    "FaultTolerance": "lightning_faulttolerant.trainer.callback",
    "FlightRecorder": "lightning_faulttolerant.trainer.companions",
    "HangWatch": "lightning_faulttolerant.trainer.companions",
    "InterruptibleDistributedGroupedBatchSampler": "lightning_faulttolerant.samplers.grouped",
    "InterruptibleDistributedSampler": "lightning_faulttolerant.samplers.interruptible",
    "InterruptibleSampler": "lightning_faulttolerant.samplers.interruptible",
    "MDSWriter": "lightning_faulttolerant.streaming.format.writer",
    "MeasuredStep": "lightning_faulttolerant.records.incidents",
    "MetricsTracker": "lightning_faulttolerant.samplers.metrics",
    "ResumableDataLoader": "lightning_faulttolerant.loader.resumable",
    "ResumeReport": "lightning_faulttolerant.trainer.resume.report",
    "ShardedMapDataset": "lightning_faulttolerant.samplers.images",
    "Stream": "lightning_faulttolerant.streaming.shards",
    "StreamingDataLoader": "lightning_faulttolerant.streaming.loader",
    "StreamingDataset": "lightning_faulttolerant.streaming.dataset",
    "TimestampedTimer": "lightning_faulttolerant.samplers.metrics",
    "atomic_torch_save": "lightning_faulttolerant.checkpoint.saving",
}

# The original library's spelling of its samplers.
_SPELLED_OTHERWISE = {
    "InterruptableDistributedGroupedBatchSampler": "InterruptibleDistributedGroupedBatchSampler",
    "InterruptableDistributedSampler": "InterruptibleDistributedSampler",
    "InterruptableSampler": "InterruptibleSampler",
}


EARLY.begin(os.environ)


def __getattr__(name: str) -> object:
    if name == "__version__":
        return _version()
    name = _SPELLED_OTHERWISE.get(name, name)
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version() -> str:
    from importlib import metadata  # slow to import, and no training needs it

    try:
        return metadata.version("lightning-faulttolerant")
    except metadata.PackageNotFoundError as error:
        raise AttributeError("no __version__: lightning_faulttolerant is not installed, only imported") from error


def __dir__() -> list[str]:
    return __all__
