"""The exception that has ended a training process, as it tells the process that supervises it."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

_PREFIX = "failure-"
_MAX_TEXT = 2000
_MAX_SAMPLES = 64
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingFailure:
    """An exception that has ended a process.

    Args:
        kind: The name of its class.
        text: Its message.
        function: The Trainer's function: ``fit``, ``validate``, ``test``, or ``predict``.
        epoch: The epoch, from 0.
        batch: The batch of the epoch, from 0; ``None`` before the first batch.
        evaluated: The batch of an evaluation, from 0; ``None`` outside of one.
        samples: The indices of the batch's samples by loader, where they are known.
        rank: The rank.
        time: When it was raised, in seconds since 1970.
        is_lost: Whether it only says that another rank has failed.
    """

    kind: str
    text: str
    function: str
    epoch: int
    batch: int | None
    evaluated: int | None = None
    samples: Mapping[str, list[object]] = field(default_factory=dict)
    rank: int = 0
    time: float
    is_lost: bool = False

    @property
    def identity(self) -> tuple[object, ...] | None:
        """What two failures share if they are the same exception at the same batch; ``None`` without a batch."""
        if self.batch is None or self.is_lost:
            return None
        text = _ADDRESS.sub("0x", self.text)
        return self.kind, text, self.function, self.epoch, self.batch, self.evaluated

    @property
    def place(self) -> str:
        """Where it was raised, in words."""
        if self.batch is None:
            return f"before the first batch of {self.function}"
        if self.evaluated is None:
            return f"in batch {self.batch} of epoch {self.epoch}"
        if self.function != "fit":
            return f"in batch {self.evaluated} of {self.function}"
        return f"in batch {self.evaluated} of the validation run after batch {self.batch} of epoch {self.epoch}"

    @property
    def samples_text(self) -> str:
        """The samples of the batch, in words; empty if they are not known."""
        return "; ".join(f"{loader}: {_listed(indices)}" for loader, indices in self.samples.items())


def _listed(indices: list[object]) -> str:
    more = len(indices) - _MAX_SAMPLES
    return ", ".join(map(str, indices[:_MAX_SAMPLES])) + (f", and {more} more" if more > 0 else "")


def write_failure(directory: str | os.PathLike[str], failure: TrainingFailure) -> None:
    """Write what has ended this process."""
    path = Path(directory) / f"{_PREFIX}{os.getpid()}.json"
    content = asdict(failure) | {"text": failure.text[:_MAX_TEXT]}
    temporary = path.with_suffix(".temporary")
    temporary.write_text(json.dumps(content, default=str), encoding="utf-8")
    os.replace(temporary, path)


def forget_failure(directory: str | os.PathLike[str]) -> None:
    """Remove what this process has written: the script has caught that exception, and continues."""
    with contextlib.suppress(OSError):
        os.unlink(Path(directory) / f"{_PREFIX}{os.getpid()}.json")


def read_failures(directory: str | os.PathLike[str]) -> list[TrainingFailure]:
    """Return what has ended the processes: first those that have failed by themselves, in order of time."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in Path(directory).glob(f"{_PREFIX}*.json")]
    return sorted((TrainingFailure(**content) for content in found), key=lambda one: (one.is_lost, one.time))
