"""The ranks of a fit: each sends the others what they need to save, stop, and resume together."""

from __future__ import annotations

import resource
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar, final

import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.channel import Channel
from lightning_faulttolerant.errors import CheckpointError, UnsupportedTrainerError

_Result = TypeVar("_Result")

# All ranks wait for a save on rank 0, for as long as torch waits for a collective.
_TIMEOUT = timedelta(minutes=30)
_SPARE_DESCRIPTORS = 16  # a listener, an autosave, connections to workers


class Ranks(Protocol):
    """The ranks that train together.

    `to_first` and `from_first` are collectives: all ranks must call them, in the same order. Never call them where
    another rank may not: not in a signal handler, not after an exception.
    """

    @property
    def rank(self) -> int:
        """The global rank of this process."""

    @property
    def num_ranks(self) -> int:
        """The world size."""

    def to_first(self, step: str, value: Any) -> list[Any] | None:
        """Send a value to rank 0. Return the values of all ranks, in order, on rank 0, and ``None`` on the others.

        Raises:
            RanksLostError: If a rank is gone, does not answer in time, or is at another step.
        """

    def from_first(self, step: str, value: Any) -> Any:
        """Return rank 0's value on every rank.

        Raises:
            RanksLostError: If a rank is gone, does not answer in time, or is at another step.
        """

    def close(self) -> None:
        """Close the connections; each rank by itself."""


@final
@dataclass(frozen=True)
class Alone:
    """The only rank."""

    rank: int = 0
    num_ranks: int = 1

    def to_first(self, step: str, value: Any) -> list[Any]:
        """Return this rank's value."""
        return [value]

    def from_first(self, step: str, value: Any) -> Any:
        """Return this rank's value."""
        return value

    def close(self) -> None:
        """Do nothing."""


@final
class RankGroup:
    """Several ranks. All of them create it at the same time, when their process group exists."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        check_descriptors(self.num_ranks)
        self._channel = Channel(range(self.num_ranks), _TIMEOUT)

    def to_first(self, step: str, value: Any) -> list[Any] | None:
        """Send a value to rank 0; see `Ranks`."""
        return self._channel.to_first(step, value)

    def from_first(self, step: str, value: Any) -> Any:
        """Return rank 0's value; see `Ranks`."""
        return self._channel.from_first(step, value)

    def close(self) -> None:
        """Close the connections."""
        self._channel.close()


def check_descriptors(num_ranks: int) -> None:
    """Check that this process may open as many connections as this number of ranks takes.

    gloo connects each rank with every other one. If it can't, it ends the process without a message from Python. Rank 0
    has one more connection for each rank.

    Raises:
        UnsupportedTrainerError: If the process may not open that many.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = Path("/proc/self/fd")
    num_open = len(list(descriptors.iterdir())) if descriptors.exists() else 0
    needed = num_open + 2 * num_ranks + _SPARE_DESCRIPTORS
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise UnsupportedTrainerError(
            f"This process may have {limit} files and connections open, has {num_open}, and {num_ranks} ranks that save"
            f" together need {needed}. They could not be connected. Start each rank behind"
            f" `ulimit -n {max(needed, 65536)}`, or leave FaultTolerance out."
        )


def connect(trainer: Trainer) -> Ranks:
    """Connect the ranks of a fit when its process group exists; all of them at the same time."""
    return Alone() if trainer.world_size == 1 else RankGroup()


def by_first(ranks: Ranks, step: str, work: Callable[[], _Result]) -> _Result:
    """Let rank 0 do its part of a save, and return the result on every rank; a collective.

    Raises:
        CheckpointError: On the other ranks, if it failed. On rank 0 the exception itself is raised.
    """
    if ranks.rank > 0:
        told: tuple[str, _Result] = ranks.from_first(step, None)
        failure, result = told
        if failure:
            raise CheckpointError(f"Rank 0 could not save. The autosaves so far are kept: {failure}")
        return result
    try:
        result = work()
    except Exception as error:
        ranks.from_first(step, (f"{type(error).__name__}: {error}", None))
        raise
    ranks.from_first(step, ("", result))
    return result
