"""Messages between ranks besides the gradients: over a separate gloo group, with a time limit.

No device is used. A dead rank is an error on the others: the connection to it breaks, or the time runs out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, final

import torch.distributed as dist

from lightning_faulttolerant.errors import CheckpointError, RanksLostError

_Held = TypeVar("_Held")
_Result = TypeVar("_Result")


class Ranks(Protocol):
    """The ranks that do something together, in the same order on each.

    `to_all`, `to_first`, and `from_first` are collectives: all ranks must call them, in the same order. Never call them
    where another rank may not: not in a signal handler, not after an exception. Each raises `RanksLostError` if a rank
    is gone, does not answer in time, or is at another step.
    """

    @property
    def rank(self) -> int:
        """This process's number among them, from 0."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""

    def label(self, rank: int) -> str:
        """Return a rank's name for messages."""

    def to_all(self, step: str, value: object) -> list[Any]:
        """Send a value to all ranks, and return all values in order."""

    def to_first(self, step: str, value: object) -> list[Any] | None:
        """Send a value to the first rank; return all values in order on that rank, and ``None`` on the others."""

    def from_first(self, step: str, value: object) -> Any:
        """Return the first rank's value on every rank."""

    def close(self) -> None:
        """Close the connections; each rank by itself."""


@final
@dataclass(frozen=True)
class Alone:
    """A rank that does not communicate."""

    rank: int = 0
    num_ranks: int = 1

    def label(self, rank: int) -> str:
        """Return the process's name for messages."""
        return "this process"

    def to_all(self, step: str, value: object) -> list[object]:
        """Return this rank's value."""
        return [value]

    def to_first(self, step: str, value: object) -> list[object]:
        """Return this rank's value."""
        return [value]

    def from_first(self, step: str, value: object) -> object:
        """Return this rank's value."""
        return value

    def close(self) -> None:
        """Do nothing."""


@final
class RankGroup:
    """Ranks that exchange Python objects; created by all of them at the same time.

    Args:
        ranks: Their numbers in the default group, in one order.
        timeout: How long one exchange may wait for the slowest rank.
        message: What an error says, with ``{}`` for the reason.

    Raises:
        RanksLostError: From each exchange too: if a rank is gone, does not answer in time, or is at another step.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta, *, message: str = "{}") -> None:
        self._ranks = list(ranks)
        self._timeout = timeout
        self._message = message
        self.num_ranks = len(self._ranks)
        self.rank = self._ranks.index(dist.get_rank())
        try:
            # A separate group: the default one may be NCCL, which can't send objects on the CPU and has its own time
            # limit. Ranks outside of the group don't take part.
            # A group of some ranks is named by its ranks. A group of all ranks is named by a number that no other group
            # ever has: with the name of a group that is gone, it would find the addresses of the old group.
            some = len(self._ranks) < dist.get_world_size()
            self._group = dist.new_group(self._ranks, timeout=timeout, backend="gloo", use_local_synchronization=some)
        except RuntimeError as error:
            raise self._silence("the first exchange", error) from error

    def label(self, rank: int) -> str:
        """Return a rank's name, by its number in the default group."""
        return f"rank {self._ranks[rank]}"

    def close(self) -> None:
        """Close the connections; each rank does so alone."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def to_all(self, step: str, value: object) -> list[object]:
        """Send a value to all ranks, and return all values in order."""
        answers: list[object] = [None] * len(self._ranks)
        try:
            dist.all_gather_object(answers, (step, value), group=self._group)
        except RuntimeError as error:
            raise self._silence(step, error) from error
        return self._checked(answers)

    def to_first(self, step: str, value: object) -> list[object] | None:
        """Send a value to the first rank; return all values in order on that rank, and ``None`` on the others."""
        answers: list[object] | None = [None] * len(self._ranks) if self.rank == 0 else None
        try:
            dist.gather_object((step, value), answers, dst=self._ranks[0], group=self._group)
        except RuntimeError as error:
            raise self._silence(step, error) from error
        return None if answers is None else self._checked(answers)

    def from_first(self, step: str, value: object) -> object:
        """Return the first rank's value on every rank."""
        received = [(step, value if self.rank == 0 else None)]
        try:
            dist.broadcast_object_list(received, src=self._ranks[0], group=self._group)
        except RuntimeError as error:
            raise self._silence(step, error) from error
        if received[0][0] != step:
            raise self._lost(
                f"the ranks are out of step: rank {self._ranks[0]} is at {received[0][0]!r}, this one at {step!r}"
            )
        return received[0][1]

    def _checked(self, answers: list[Any]) -> list[object]:
        self._check([step for step, _ in answers])
        return [value for _, value in answers]

    def _check(self, steps: list[str]) -> None:
        if len(set(steps)) > 1:
            places = ", ".join(f"rank {rank} is at {step!r}" for rank, step in zip(self._ranks, steps, strict=False))
            raise self._lost(f"the ranks are out of step: {places}")

    def _silence(self, step: str, error: RuntimeError) -> RanksLostError:
        reason = str(error).splitlines()[0]
        return self._lost(
            f"rank {self._ranks[self.rank]} had no answer at {step!r}: {reason} Another rank has died, has failed "
            f"earlier, or took longer than {self._timeout}"
        )

    def _lost(self, reason: str) -> RanksLostError:
        return RanksLostError(self._message.format(reason))


def together(ranks: Ranks, step: str, work: Callable[[], _Result]) -> list[_Result]:
    """Do something on each rank and exchange the results; if it fails on one, every rank raises.

    Args:
        ranks: The participating ranks.
        step: The name of the step; all ranks must be at the same one.
        work: The work of this rank; the result must be picklable.

    Returns:
        The results of all, in order.

    Raises:
        CheckpointError: If it failed on another rank. An error of this rank's own work is raised unchanged.
    """
    own_error: Exception | None = None
    result, failure = None, ""
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - raised again below, once the other ranks know
        own_error, failure = error, f"{type(error).__name__}: {error}"
    try:
        answers = ranks.to_all(step, (failure, result))
    finally:
        if own_error is not None:
            try:
                raise own_error
            finally:
                own_error = None  # its traceback refers to this frame: a cycle would keep the saver alive
    failures = [f"{ranks.label(rank)}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if failures:
        raise CheckpointError(
            f"Another rank failed, so no rank continues with this checkpoint. {'; '.join(failures)}. Earlier "
            "checkpoints still exist."
        )
    return [result for _, result in answers]


def by_first(ranks: Ranks, step: str, held: _Held | None, work: Callable[[_Held], _Result]) -> _Result:
    """Let rank 0 do its part of a save, and return the result on every rank; a collective.

    Args:
        ranks: The participating ranks.
        step: The name of the step; all ranks must be at the same one.
        held: What only rank 0 has, such as the series of autosaves; ``None`` on the others.
        work: The work of rank 0, which receives it.

    Raises:
        CheckpointError: On the other ranks, if it failed. On rank 0 the exception itself is raised.
    """
    if ranks.rank > 0 or held is None:
        answer: tuple[str, _Result] = ranks.from_first(step, None)
        failure, result = answer
        if failure:
            raise CheckpointError(f"Rank 0 could not save. The autosaves so far are kept: {failure}")
        return result
    try:
        result = work(held)
    except Exception as error:
        ranks.from_first(step, (f"{type(error).__name__}: {error}", None))
        raise
    ranks.from_first(step, ("", result))
    return result
