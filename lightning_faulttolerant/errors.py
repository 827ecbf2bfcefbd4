"""Every error that this package raises, in one tree.

::

    FaultToleranceError (RuntimeError)
    ├── CheckpointError             a file of the run is not usable
    │   ├── DamagedCheckpointError      a file does not verify
    │   ├── NoValidCheckpointError      autosaves exist, but none verifies
    │   ├── UnsafeCheckpointError       the file holds objects that weights_only=True refuses, and is not trusted
    │   ├── RunInUseError               another process writes to the directory of the run
    │   └── RanksLostError              the ranks could not complete a common step
    ├── NotExactError               something can't be captured or restored exactly
    │   └── FingerprintMismatchError    the run that resumes is not the run that saved
    ├── UnsupportedTrainerError     this package can't serve the Trainer
    ├── LedgerError                 the ledger can't be written
    ├── ReplayError                 a replay can't be done
    ├── BranchError                 a branch can't begin
    ├── IncidentError               an incident ended the run: the loss or a gradient is not finite, for example
    ├── DrillFault                  a drill raises this exception on purpose
    ├── StreamingError              a streaming data set can't be read, or can't deliver the planned epoch
    │   ├── IndexFileError              an index is not available, or lists no samples
    │   │   ├── MissingIndexError           it does not exist (also a FileNotFoundError)
    │   │   └── DamagedIndexError           not an index, or it names a file outside its directory (also a ValueError)
    │   ├── ShardError                  a shard is not available
    │   │   ├── MissingShardError           it is not where the index says (also a FileNotFoundError)
    │   │   ├── DamagedShardError           its size or hash differs from the index (also a ValueError)
    │   │   └── CacheLimitError             the cache has no room for it (also a ValueError)
    │   └── UnsafeDataError             a column is pickled, and allow_unsafe_types is off (also a ValueError)
    └── SamplerError                a sampler was used in a way that would lose or repeat samples
        ├── HasNotResetProgressError    another epoch was set in the middle of one
        └── AdvancedTooFarError         more samples were counted than the epoch has

    TrainingStopped (SystemExit)    a signal or a deadline ended the run; saved, unless the message says otherwise
    └── NotRepeatedError            a batch that has run before is another one now

``ValueError`` and ``TypeError`` are raised for bad arguments, when an object is created.

Messages advise what their reader can set. If the callback comes from ``PL_FAULT_TOLERANT_TRAINING``, no script contains
``FaultTolerance(strict=False)``. Then the same advice reads ``PL_FAULT_TOLERANT_OPTIONS="strict=false"``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable


class FaultToleranceError(RuntimeError):
    """Base class of all errors in this package."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(worded(arg) if isinstance(arg, str) else arg for arg in args))


class CheckpointError(FaultToleranceError):
    """A file of a run is not usable."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file does not verify: it is truncated, or the checksum of a record is wrong."""


class NoValidCheckpointError(CheckpointError):
    """Autosaves exist, but none of them verifies."""


class UnsafeCheckpointError(CheckpointError):
    """A checkpoint holds objects that ``weights_only=True`` refuses, and is not trusted."""


class RunInUseError(CheckpointError):
    """Another process writes to the directory of this run."""


class RanksLostError(CheckpointError):
    """The ranks of a run could not agree: one is gone, does not answer in time, or is at another step."""


class NotExactError(FaultToleranceError):
    """Something can't be captured or restored exactly, and ``strict`` is on."""


class FingerprintMismatchError(NotExactError):
    """The run that resumes differs from the run that saved: other data, model, optimizer, or arguments."""


class UnsupportedTrainerError(FaultToleranceError):
    """This package can't serve the Trainer, or something that the Trainer was set up with."""


class LedgerError(FaultToleranceError):
    """The ledger of a run can't be written, so nothing could be compared."""


class ReplayError(FaultToleranceError):
    """A replay can't be done: the run has no such exception, or ``--set`` names a value that can't be set."""


class BranchError(FaultToleranceError):
    """A branch can't begin: its autosave does not exist, or a changed setting can't take effect on it."""


class IncidentError(FaultToleranceError):
    """An incident ended the run, as ``FlightRecorder(stop=True)`` requests. The message names the command to type."""


class DrillFault(FaultToleranceError):
    """A drill raises this exception on purpose: nothing is wrong with the script."""


class StreamingError(FaultToleranceError):
    """A streaming data set can't be read, or can't deliver its epoch as planned."""


class IndexFileError(StreamingError):
    """An index is not available, is damaged, or lists no samples."""


class MissingIndexError(IndexFileError, FileNotFoundError):
    """An index does not exist. As in the original library, this is also a ``FileNotFoundError``."""


class DamagedIndexError(IndexFileError, ValueError):
    """An index can't be read, or names a file outside the directory of its data set."""


class ShardError(StreamingError):
    """A shard is not available; the message gives its name, its address, and the attempts."""


class MissingShardError(ShardError, FileNotFoundError):
    """A shard is not where the index says. As in the original library, this is also a ``FileNotFoundError``."""


class DamagedShardError(ShardError, ValueError):
    """The size or the hash of a shard differs from the index, even after another download."""


class CacheLimitError(ShardError, ValueError):
    """A shard does not fit below ``cache_limit``, and nothing may be evicted."""


class UnsafeDataError(StreamingError, ValueError):
    """A column is pickled, so reading it may run any code, and ``allow_unsafe_types`` is off."""


class SamplerError(FaultToleranceError):
    """A sampler was used in a way that would lose or repeat samples."""


class HasNotResetProgressError(SamplerError):
    """Another epoch was set in the middle of an epoch, without ``reset_progress``."""


class AdvancedTooFarError(SamplerError):
    """More samples were counted as consumed than the epoch has."""


class TrainingStopped(SystemExit):
    """The run was stopped from outside after its state was saved; nothing after ``fit`` runs.

    It is a ``SystemExit``, so the process ends without a traceback, and with the exit code that its surroundings
    expect: 128 + the signal's number (143 for SIGTERM, 130 for SIGINT), 75 for a deadline, 76 if a SLURM job is queued
    again.
    """

    def __init__(self, code: int, reason: str, by: str = "") -> None:
        super().__init__(code)
        self.reason, self.by = reason, by

    def __str__(self) -> str:
        return f"{self.reason} (exit code {self.code})"

    def __reduce__(self) -> tuple[type[TrainingStopped], tuple[object, str, str]]:
        # Pools send it to their script, and would wait if it did not arrive.
        return type(self), (self.code, self.reason, self.by)


class NotRepeatedError(TrainingStopped):
    """A batch that an earlier process has run, too, is another one now. The exit code is 77; nothing is saved."""


OPTIONS_VARIABLE = "PL_FAULT_TOLERANT_OPTIONS"
SEPARATOR = "|"
"""Separates the elements of a list."""

_LITERAL = r"True|False|None|\.\.\.|\"[^\"]*\"|'[^']*'|\d+(?:\.\d+)?|\([^()]*\)"
_ADVICE = re.compile(
    r"(?:\b(?P<verb>[Pp]ass|[Uu]se|[Ww]ith) )?"
    rf"(?:FaultTolerance\((?P<name>\w+)=(?P<value>{_LITERAL})\)|\b(?P<bare>\w+)=(?P<bare_value>{_LITERAL}))"
    r"(?P<a> (?=an? ))?"
)
_VERBS = {"pass": "set", "Pass": "Set", "use": "set", "Use": "Set"}
_names: set[str] = set()


def speak_of_variable(names: Iterable[str]) -> None:
    """Let messages name the variable from now on, instead of these arguments.

    Args:
        names: The names of the callback's arguments; empty if the callback is the script's own.
    """
    _names.clear()
    _names.update(names)


def worded(text: str) -> str:
    """Return a message that tells the user to set something that this user can set.

    Args:
        text: With arguments as ``FaultTolerance(strict=False)``, or as ``strict=False`` after "pass", "use", or "with".
    """
    return _ADVICE.sub(_by_variable, text) if _names else text


def _by_variable(found: re.Match[str]) -> str:
    verb, is_bare = found["verb"], found["bare"] is not None
    name, value = (found["bare"], found["bare_value"]) if is_bare else (found["name"], found["value"])
    if name not in _names or (is_bare and verb is None):
        return found[0]
    before = "" if verb is None else f"{_VERBS.get(verb, verb)} "
    after = "" if found["a"] is None else " to " if before.lower() == "set " else " "
    return f'{before}{OPTIONS_VARIABLE}="{name}={_in_variable(ast.literal_eval(value))}"{after}'


def _in_variable(value: object) -> str:
    if value is Ellipsis:
        return "..."
    if isinstance(value, (tuple, list)):
        return SEPARATOR.join(map(_in_variable, value))
    return value if isinstance(value, str) else str(value).lower()
