"""The ranks that share a series of directories: they do each step together, or all of them raise."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, final

import torch.distributed as dist

from lightning_faulttolerant.checkpoint.channel import Channel
from lightning_faulttolerant.errors import CheckpointError, RanksLostError

_Result = TypeVar("_Result")


class Ranks(Protocol):
    """The participating ranks, in the same order on each."""

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""

    @property
    def place(self) -> int:
        """This rank's place among them, from 0."""

    def gather(self, step: str, value: Any) -> list[Any]:
        """Send a value to the other ranks at the same step, and return all values in order."""

    def label(self, place: int) -> str:
        """Return a rank's name for messages."""


@final
@dataclass(frozen=True)
class Alone:
    """A rank that does not communicate."""

    num_ranks: int = 1
    place: int = 0

    def gather(self, step: str, value: Any) -> list[Any]:
        """Return the rank's own value."""
        return [value]

    def label(self, place: int) -> str:
        """Return the process's name for messages."""
        return "this process"


@final
class Grouped:
    """The ranks of a process group; created by all of them at the same time.

    Args:
        group: A ``torch.distributed`` group; None for the default group.
        timeout: How long one step may wait for the slowest rank.
    """

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self._ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        self.num_ranks = len(self._ranks)
        try:
            self._channel = Channel(self._ranks, timeout)
        except RanksLostError as error:
            raise _lost(error) from error
        self.place = self._channel.place

    def gather(self, step: str, value: Any) -> list[Any]:
        """Send a value to the other ranks at the same step, and return all values in order.

        Raises:
            RanksLostError: If a rank has died, does not answer in time, or is at another step.
        """
        try:
            return self._channel.to_all(step, value)
        except RanksLostError as error:
            raise _lost(error) from error

    def label(self, place: int) -> str:
        """Return a rank's name, by its number in the default group."""
        return f"rank {self._ranks[place]}"


def _lost(error: RanksLostError) -> RanksLostError:
    return RanksLostError(
        f"The ranks could not agree on a checkpoint: {error}. Nothing was committed by this step. Look for the first"
        " error of the other ranks. All of them must call the methods of a saver in the same order; a rank that can't"
        " finish its part of a checkpoint should call abort(), then the others needn't wait."
    )


def find_ranks(strategy: str, group: Any, timeout: timedelta) -> tuple[Ranks, int]:
    """Return the ranks that participate.

    Args:
        strategy: ``"sync_any"``, ``"sync_all"``, ``"async"`` or ``"mono"``.
        group: A ``torch.distributed`` group; None for the default group.
        timeout: How long one step may wait for the slowest rank.

    Returns:
        The ranks, and this one's number for the name of an ``"async"`` series.

    Raises:
        ValueError: If there are several processes and no process group, or this rank is not in the group.
        CheckpointError: If the other ranks do not answer.
    """
    is_grouped = dist.is_available() and dist.is_initialized()
    if group is not None and (not is_grouped or dist.get_rank(group) < 0):
        raise ValueError("This process is not in the process group that was given. Make the saver on its ranks only.")
    if strategy == "mono":
        return Alone(), 0
    if strategy == "async":
        return Alone(), dist.get_rank(group) if is_grouped else _number_from_environment("RANK", 0)
    if is_grouped:
        return (Grouped(group, timeout) if dist.get_world_size(group) > 1 else Alone()), 0
    num_ranks = _number_from_environment("WORLD_SIZE", 1)
    if num_ranks > 1:
        raise ValueError(
            f'WORLD_SIZE is {num_ranks} and there is no process group: with strategy="{strategy}" each rank would take '
            "itself for the only one, and write over the others. Call torch.distributed.init_process_group before the "
            'saver is made, or pass strategy="async" (each rank its own directories).'
        )
    return Alone(), 0


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
        answers = ranks.gather(step, (failure, result))
    finally:
        if own_error is not None:
            try:
                raise own_error
            finally:
                own_error = None  # its traceback refers to this frame: a cycle would keep the saver alive
    failures = [f"{ranks.label(place)}: {text}" for place, (text, _) in enumerate(answers) if text]
    if failures:
        raise CheckpointError(
            f"Another rank failed, so no rank continues with this checkpoint. {'; '.join(failures)}. What was "
            "committed before is still there."
        )
    return [result for _, result in answers]


def _number_from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default
