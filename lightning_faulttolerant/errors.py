"""Every error that this package raises, in one tree.

::

    FaultToleranceError (RuntimeError)
    ├── CheckpointError             something is wrong with files
    │   ├── DamagedCheckpointError      a file does not verify
    │   ├── NoValidCheckpointError      there are autosaves, but none verifies
    │   ├── UnsafeCheckpointError       it holds what weights_only=True refuses, and is not trusted
    │   ├── RunInUseError               another process writes into this run's directory
    │   └── RanksLostError              ranks could not do together what they must do together
    ├── NotExactError               something can't be captured or restored exactly
    │   └── FingerprintMismatchError    the run that resumes is not the run that saved
    ├── UnsupportedTrainerError     the Trainer is one that this package can't serve
    ├── LedgerError                 the ledger can't be written
    ├── DrillFault                  a drill has asked for this exception
    ├── StreamingError              a streaming data set can't be read, or can't deliver what was planned
    │   ├── IndexFileError              an index can't be had, or lists no samples
    │   │   ├── MissingIndexError           it is not there (also a FileNotFoundError)
    │   │   └── DamagedIndexError           it is no index, or names a file outside its directory (also a ValueError)
    │   ├── ShardError                  a shard could not be had
    │   │   ├── MissingShardError           it is not where the index says (also a FileNotFoundError)
    │   │   ├── DamagedShardError           its size or its hash is not that of the index (also a ValueError)
    │   │   └── CacheLimitError             there is no room for it in the cache (also a ValueError)
    │   └── UnsafeDataError             a column is pickled, and allow_unsafe_types is off (also a ValueError)
    └── SamplerError                a sampler was used in a way that would lose or repeat samples
        ├── HasNotResetProgressError    another epoch was set in the middle of one
        └── AdvancedTooFarError         more samples were counted than the epoch has

    TrainingStopped (SystemExit)    a signal or a deadline ended the run; saved, if the message does not say otherwise

``ValueError`` and ``TypeError`` are raised for bad arguments, when an object is made.
"""

from __future__ import annotations

from lightning_faulttolerant.advice import worded


class FaultToleranceError(RuntimeError):
    """Base of all errors of this package."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(worded(arg) if isinstance(arg, str) else arg for arg in args))


class CheckpointError(FaultToleranceError):
    """Something is wrong with the files of a run."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file does not verify: it is truncated, or a record's checksum is wrong."""


class NoValidCheckpointError(CheckpointError):
    """There are autosaves, but none of them verifies."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint holds what ``weights_only=True`` refuses, and is not trusted."""


class RunInUseError(CheckpointError):
    """Another process writes into the directory of this run."""


class RanksLostError(CheckpointError):
    """The ranks of a run could not agree: one is gone, does not answer in time, or is at another step."""


class NotExactError(FaultToleranceError):
    """Something can't be captured or restored exactly, and ``strict`` is on."""


class FingerprintMismatchError(NotExactError):
    """The run that resumes differs from the run that saved: other data, model, optimizer or arguments."""


class UnsupportedTrainerError(FaultToleranceError):
    """The Trainer, or what it was set up with, is not one that this package can serve."""


class LedgerError(FaultToleranceError):
    """The ledger of a run can't be written, so that nothing could be compared."""


class DrillFault(FaultToleranceError):
    """A drill has asked for this exception: nothing is wrong with the script."""


class StreamingError(FaultToleranceError):
    """A streaming data set can't be read, or can't deliver what its epoch was planned to be."""


class IndexFileError(StreamingError):
    """An index can't be had, is damaged, or lists no samples."""


class MissingIndexError(IndexFileError, FileNotFoundError):
    """There is no index. As in the original library this is also a ``FileNotFoundError``."""


class DamagedIndexError(IndexFileError, ValueError):
    """An index can't be read, or names a file outside the directory of its data set."""


class ShardError(StreamingError):
    """A shard could not be had; the message names it, its address and the attempts."""


class MissingShardError(ShardError, FileNotFoundError):
    """A shard is not where the index says. As in the original library this is also a ``FileNotFoundError``."""


class DamagedShardError(ShardError, ValueError):
    """The size or the hash of a shard is not that of the index, also when it is downloaded again."""


class CacheLimitError(ShardError, ValueError):
    """There is no room for a shard below ``cache_limit``, and nothing that may be evicted."""


class UnsafeDataError(StreamingError, ValueError):
    """A column is pickled, so that reading it may run any code, and ``allow_unsafe_types`` is off."""


class SamplerError(FaultToleranceError):
    """A sampler was used in a way that would lose or repeat samples."""


class HasNotResetProgressError(SamplerError):
    """Another epoch was set in the middle of one, without ``reset_progress``."""


class AdvancedTooFarError(SamplerError):
    """More samples were counted as consumed than the epoch has."""


class TrainingStopped(SystemExit):
    """The run was stopped from outside after its state was saved; nothing after ``fit`` runs.

    It is a ``SystemExit``, so that the process ends with the exit code that its surroundings expect
    (128 + the signal's number: 143 for SIGTERM, 130 for SIGINT; 75 for a deadline; 76 if a SLURM job is queued again)
    and without a traceback.
    """

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} (exit code {self.code})"

    def __reduce__(self) -> tuple[type[TrainingStopped], tuple[object, str]]:
        # Pools send it to their script: one that did not arrive would leave them waiting.
        return type(self), (self.code, self.reason)
