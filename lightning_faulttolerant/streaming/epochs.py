"""Which epoch an iteration is, and where in it it begins: known to a data set's copies in all processes of one rank.

The numbers lie in a piece of shared memory without a name (nothing of it is left when the processes are gone). It is
that of one main process and its data-loading workers: a copy, and a rank that was forked or spawned with the data set,
has its own. It is written by whoever begins an iteration: the process itself, its `StreamingDataLoader`, or, under any
other loader, worker 0; the other workers of that loader wait for what worker 0 found. No lock is taken.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import get_worker_info

from lightning_faulttolerant.errors import StreamingError
from lightning_faulttolerant.streaming.ordering import Seeding
from lightning_faulttolerant.streaming.world import World

_NEXT_EPOCH, _NEXT_SAMPLE, _EPOCH, _SAMPLE, _IS_VAGUE, _IS_MOVED, _SEED, _PARTS, _NODES, _HEADER = range(10)
_SLOTS, _SLOT = 64, 4  # a slot: pool, iteration of the pool, epoch, sample
_WAIT_SECONDS = 120.0
_POLL_SECONDS = 0.001

# From epoch and sample: the same place, where the end of an epoch is the beginning of the next one.
Normal = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Where an iteration begins.

    Args:
        epoch: Which.
        sample: How many samples all ranks have consumed of it before.
        batch_size: Of a rank's steps, if somebody knows it.
        world: This rank's place, if the main process has found it out already.
        are_lent: Whether samples are only made batches of, which copies them.
    """

    epoch: int
    sample: int
    batch_size: int | None = None
    world: World | None = None
    are_lent: bool = False


class _SharedNumbers:
    """Whole numbers that a main process shares with its data-loading workers, and with nobody else.

    Ranks that are forked or spawned with a data set would else count each other's epochs as their own.

    Args:
        size: How many; all are 0 at first.
    """

    def __init__(self, size: int) -> None:
        self._put([0] * size)

    def _put(self, numbers: list[int]) -> None:
        self._tensor = torch.tensor(numbers, dtype=torch.int64)
        self._tensor.share_memory_()  # type: ignore[no-untyped-call]
        self._process_id = os.getpid()
        self._when_left = numbers
        _all_shared.add(self)

    def own(self) -> torch.Tensor:
        """Return the numbers of this process; of its main process, if it is a data-loading worker."""
        if self._process_id != os.getpid() and get_worker_info() is None:
            self._put(self._when_left)
        return self._tensor

    def leave(self) -> None:
        """Get ready to be in another process, which will have these numbers as they are now, worker or not."""
        self._when_left = self.own().tolist()

    def __getstate__(self) -> dict[str, Any]:
        self.leave()
        return vars(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not self._tensor.is_shared():  # type: ignore[no-untyped-call]  # not by multiprocessing: a copy
            self._put(self._when_left)
        _all_shared.add(self)


_all_shared: weakref.WeakSet[_SharedNumbers] = weakref.WeakSet()


def _leave_before_fork() -> None:
    for numbers in list(_all_shared):
        numbers.leave()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_leave_before_fork)


class EpochBook:
    """Keeps the epoch that is next, the one that is under way, and what a loaded state says of the order.

    Args:
        seeding: Of the order, until a state is loaded.
    """

    def __init__(self, seeding: Seeding) -> None:
        self._shared = _SharedNumbers(_HEADER + _SLOTS * _SLOT)
        self._numbers[_HEADER:] = -1
        self.num_put = 0
        """How many times this process has said where the next iteration begins."""
        self.put(0, 0, seeding)
        self._pool: int | None = None
        self._num_begun = 0

    @property
    def _numbers(self) -> torch.Tensor:
        return self._shared.own()

    @property
    def next_epoch(self) -> int:
        """The epoch that the next iteration is."""
        return int(self._numbers[_NEXT_EPOCH])

    @property
    def next_place(self) -> tuple[int, int]:
        """Epoch, and samples consumed of it, where the next iteration begins."""
        epoch, sample = self._numbers[_NEXT_EPOCH : _NEXT_SAMPLE + 1].tolist()
        return epoch, sample

    @property
    def is_vague(self) -> bool:
        """Whether several workers take turns under a loader whose batch size nobody has told."""
        return bool(self._numbers[_IS_VAGUE])

    @property
    def is_moved(self) -> bool:
        """Whether the iterator of the last iteration was moved to another place by a state of its own."""
        return bool(self._numbers[_IS_MOVED])

    @property
    def has_begun(self) -> bool:
        """Whether there was an iteration since a state was loaded."""
        return bool(self._numbers[_EPOCH] >= 0)

    @property
    def place(self) -> tuple[int, int]:
        """Epoch, and samples consumed of it, where the last iteration began; where the next one begins if none has."""
        at = _EPOCH if self.has_begun else _NEXT_EPOCH
        epoch, sample = self._numbers[at : at + 2].tolist()
        return epoch, sample

    @property
    def seeding(self) -> Seeding:
        """What the order is drawn from."""
        seed, parts, nodes = self._numbers[_SEED : _NODES + 1].tolist()
        return Seeding(seed=seed, num_canonical_nodes=parts or None, initial_nodes=nodes or None)

    def put(self, epoch: int, sample: int, seeding: Seeding) -> None:
        """Let the next iteration begin there."""
        self._numbers[_SEED] = seeding.seed
        self._numbers[_PARTS], self._numbers[_NODES] = seeding.num_canonical_nodes or 0, seeding.initial_nodes or 0
        self._numbers[_NEXT_EPOCH], self._numbers[_NEXT_SAMPLE] = epoch, sample
        self._numbers[_EPOCH], self._numbers[_IS_VAGUE], self._numbers[_IS_MOVED] = -1, 0, 0
        self.num_put += 1

    def note(self, epoch: int, sample: int, *, is_vague: bool = False, is_moved: bool = False) -> None:
        """Note that an iteration has begun there, or was moved there; the next one is the next epoch."""
        self._numbers[_EPOCH], self._numbers[_SAMPLE] = epoch, sample
        self._numbers[_IS_VAGUE], self._numbers[_IS_MOVED] = int(is_vague), int(is_moved)
        self._numbers[_NEXT_EPOCH], self._numbers[_NEXT_SAMPLE] = epoch + 1, 0

    def begin(self, normal: Normal, *, is_vague: bool = False) -> tuple[int, int]:
        """Begin the next iteration in this process; return its epoch and its first sample.

        Args:
            normal: Returns the beginning of the next epoch for the end of one.
            is_vague: Whether the place in this iteration can't be told.
        """
        epoch, sample = normal(*self._numbers[_NEXT_EPOCH : _NEXT_SAMPLE + 1].tolist())
        self.note(epoch, sample, is_vague=is_vague)
        return epoch, sample

    def begin_in_worker(self, normal: Normal, *, is_vague: bool = False) -> tuple[int, int]:
        """Begin the next iteration in one of the workers of a loader that has said nothing; return the same.

        Raises:
            StreamingError: If worker 0 does not begin it too.
        """
        info = get_worker_info()
        assert info is not None
        if self._pool is None:
            self._pool = _pool_of(info.id)
        iteration, self._num_begun = self._num_begun, self._num_begun + 1
        at = _HEADER + _SLOT * (self._pool % _SLOTS)
        if info.id == 0:
            epoch, sample = self.begin(normal, is_vague=is_vague and info.num_workers > 1)
            self._numbers[at] = -1
            # In this order: who reads the number of the iteration reads the place after it.
            self._numbers[at + 2], self._numbers[at + 3] = epoch, sample
            self._numbers[at + 1] = iteration
            self._numbers[at] = self._pool
            return epoch, sample
        return self._told_by_worker_0(at, iteration)

    def _told_by_worker_0(self, at: int, iteration: int) -> tuple[int, int]:
        deadline, parent = time.monotonic() + _WAIT_SECONDS, os.getppid()
        while True:
            pool, told, epoch, sample = self._numbers[at : at + _SLOT].tolist()
            if pool == self._pool and told == iteration:
                return epoch, sample
            if time.monotonic() > deadline or os.getppid() != parent:
                raise StreamingError(
                    f"Data-loading worker 0 has not begun iteration {iteration} of this data set within"
                    f" {_WAIT_SECONDS:g} s, so this worker can't know its epoch. See what keeps worker 0, or use"
                    " StreamingDataLoader, which tells its workers."
                )
            time.sleep(_POLL_SECONDS)


def _pool_of(worker: int) -> int:
    """Return a number that the workers of one iterator have in common, and those of no other one of this process."""
    # A process numbers its children, and a loader makes its workers one after the other. The number is in the name:
    # ForkProcess-3, or ForkProcess-1:3 where the main process is a child, too.
    number = multiprocessing.current_process().name.rpartition("-")[2].rpartition(":")[2]
    if not number.isdigit():
        raise StreamingError(
            f"The data-loading worker {multiprocessing.current_process().name!r} was given a name of its own, so that"
            " it can't be told which workers belong together. Use StreamingDataLoader, which tells its workers."
        )
    return int(number) - worker


class Channel:
    """Tells the workers of one `StreamingDataLoader` where each iteration begins, also those that live on.

    Args:
        is_shared: Whether workers live on from one iteration to the next, so that they must be told by shared memory.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._shared = _SharedNumbers(2) if is_shared else None
        self._start: Start | None = None

    def tell(self, start: Start) -> None:
        """Say where the next iteration begins, before its workers are made or woken."""
        self._start = start
        if self._shared is not None:
            numbers = self._shared.own()
            numbers[0], numbers[1] = start.epoch, start.sample

    def heard(self) -> Start:
        """Return where the iteration begins that this process begins now."""
        assert self._start is not None
        if self._shared is None:
            return self._start
        epoch, sample = self._shared.own().tolist()
        return replace(self._start, epoch=epoch, sample=sample)
