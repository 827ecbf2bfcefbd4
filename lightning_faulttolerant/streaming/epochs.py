"""The iterations over a streaming data set: the epoch of each, its first sample, and the samples that it yields.

All copies of a data set in the processes of one rank know the epoch and the first sample. These numbers are in unnamed
shared memory, which disappears with the processes. It belongs to one main process and its data-loading workers. A copy
has its own, and so has a rank that was forked or spawned with the data set. The memory is written by the process that
begins an iteration, by its `StreamingDataLoader`, or, with any other loader, by worker 0. The other workers of that
loader wait for the numbers of worker 0. No lock is taken.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from lightning_faulttolerant.errors import NotExactError, StreamingError
from lightning_faulttolerant.streaming.order.batching import RemainingPositions
from lightning_faulttolerant.streaming.order.epoch import EpochOrder
from lightning_faulttolerant.streaming.ordering import Seeding
from lightning_faulttolerant.streaming.shards import Ids
from lightning_faulttolerant.streaming.world import World

_NEXT_EPOCH, _NEXT_SAMPLE, _EPOCH, _SAMPLE, _IS_VAGUE, _IS_MOVED, _SEED, _PARTS, _HEADER = range(9)
_SLOTS, _SLOT = 64, 4  # a slot: pool, iteration of the pool, epoch, sample
_WAIT_SECONDS = 120.0
_POLL_SECONDS = 0.001

# Maps epoch and sample to the same position, with the end of an epoch as the beginning of the next one.
Normal = Callable[[int, int], tuple[int, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class IterationStart:
    """Where an iteration begins.

    Args:
        epoch: The epoch.
        sample: The number of its samples that all ranks have consumed before.
        batch_size: The batch size of a rank's steps.
        world: This rank's place.
        are_lent: Whether samples are only collated into batches, which copies them.
    """

    epoch: int
    sample: int
    batch_size: int
    world: World
    are_lent: bool = False


class _SharedNumbers:
    """Integers that a main process shares only with its data-loading workers.

    Otherwise, ranks that are forked or spawned with a data set would count each other's epochs as their own.

    Args:
        size: The number of integers; all are 0 at first.
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
        """Return the numbers of this process, or of its main process if it is a data-loading worker."""
        if self._process_id != os.getpid() and get_worker_info() is None:
            self._put(self._when_left)
        return self._tensor

    def leave(self) -> None:
        """Prepare to be in another process, worker or not. It gets the current values of these numbers."""
        self._when_left = self.own().tolist()

    def __getstate__(self) -> dict[str, object]:
        self.leave()
        return vars(self)

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update(state)
        if not self._tensor.is_shared():  # type: ignore[no-untyped-call]  # not by multiprocessing: a copy
            self._put(self._when_left)
        _all_shared.add(self)


_all_shared: weakref.WeakSet[_SharedNumbers] = weakref.WeakSet()


def _leave_before_fork() -> None:
    for numbers in list(_all_shared):
        numbers.leave()


os.register_at_fork(before=_leave_before_fork)


class NumDrawn:
    """The number of samples that one iteration has drawn."""

    num_taken = 0


class EpochBook:
    """Keeps the next epoch, the current one, and the seeding of the order from a loaded state.

    Args:
        seeding: The seeding of the order, until a state is loaded.
    """

    def __init__(self, seeding: Seeding) -> None:
        self._shared = _SharedNumbers(_HEADER + _SLOTS * _SLOT)
        self._numbers[_HEADER:] = -1
        self.num_put = 0
        """How many times this process has set where the next iteration begins."""
        self.put(0, 0, seeding)
        self._pool: int | None = None
        self._num_begun = 0
        self.drawn = NumDrawn()
        """The samples that the last iteration of this process has drawn."""

    @property
    def _numbers(self) -> torch.Tensor:
        return self._shared.own()

    @property
    def next_epoch(self) -> int:
        """The epoch of the next iteration."""
        return int(self._numbers[_NEXT_EPOCH])

    @property
    def next_place(self) -> tuple[int, int]:
        """The epoch where the next iteration begins, and the number of its samples that are consumed."""
        epoch, sample = self._numbers[_NEXT_EPOCH : _NEXT_SAMPLE + 1].tolist()
        return epoch, sample

    @property
    def is_vague(self) -> bool:
        """Whether several workers take turns in a loader with an unknown batch size."""
        return bool(self._numbers[_IS_VAGUE])

    @property
    def is_moved(self) -> bool:
        """Whether the last iteration's iterator was moved to another position by its own state."""
        return bool(self._numbers[_IS_MOVED])

    @property
    def has_begun(self) -> bool:
        """Whether an iteration has begun since a state was loaded."""
        return bool(self._numbers[_EPOCH] >= 0)

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and consumed samples at the start of the last iteration; of the next iteration if none has begun."""
        at = _EPOCH if self.has_begun else _NEXT_EPOCH
        epoch, sample = self._numbers[at : at + 2].tolist()
        return epoch, sample

    @property
    def seeding(self) -> Seeding:
        """The values that the order is drawn from."""
        seed, parts = self._numbers[_SEED : _PARTS + 1].tolist()
        return Seeding(seed=seed, num_canonical_nodes=parts or None)

    def put(self, epoch: int, sample: int, seeding: Seeding) -> None:
        """Let the next iteration begin there."""
        self._numbers[_SEED], self._numbers[_PARTS] = seeding.seed, seeding.num_canonical_nodes or 0
        self._numbers[_NEXT_EPOCH], self._numbers[_NEXT_SAMPLE] = epoch, sample
        self._numbers[_EPOCH], self._numbers[_IS_VAGUE], self._numbers[_IS_MOVED] = -1, 0, 0
        self.num_put += 1

    def note(self, epoch: int, sample: int, *, is_vague: bool = False, is_moved: bool = False) -> None:
        """Note that an iteration has begun or was moved there. The next iteration is the next epoch."""
        self._numbers[_EPOCH], self._numbers[_SAMPLE] = epoch, sample
        self._numbers[_IS_VAGUE], self._numbers[_IS_MOVED] = int(is_vague), int(is_moved)
        self._numbers[_NEXT_EPOCH], self._numbers[_NEXT_SAMPLE] = epoch + 1, 0

    def begin(self, normal: Normal, *, is_vague: bool = False) -> tuple[int, int]:
        """Begin the next iteration in this process; return its epoch and its first sample.

        Args:
            normal: Maps the end of an epoch to the beginning of the next one.
            is_vague: Whether the position in this iteration can't be determined.
        """
        epoch, sample = normal(*self._numbers[_NEXT_EPOCH : _NEXT_SAMPLE + 1].tolist())
        self.note(epoch, sample, is_vague=is_vague)
        return epoch, sample

    def begin_in_worker(self, normal: Normal, *, is_vague: bool = False) -> tuple[int, int]:
        """Begin the next iteration in a worker of a loader that has not set a start; return the same.

        Raises:
            StreamingError: If worker 0 does not begin it, too.
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
            # In this order: a reader that sees the number of the iteration then reads the position.
            self._numbers[at + 2], self._numbers[at + 3] = epoch, sample
            self._numbers[at + 1] = iteration
            self._numbers[at] = self._pool
            return epoch, sample
        return self._told_by_worker_0(at, iteration)

    def _told_by_worker_0(self, at: int, iteration: int) -> tuple[int, int]:
        deadline, parent = time.monotonic() + _WAIT_SECONDS, os.getppid()
        while True:
            pool, number, epoch, sample = self._numbers[at : at + _SLOT].tolist()
            if pool == self._pool and number == iteration:
                return epoch, sample
            if time.monotonic() > deadline or os.getppid() != parent:
                raise StreamingError(
                    f"Data-loading worker 0 has not begun iteration {iteration} of this data set within "
                    f"{_WAIT_SECONDS:g} s, so this worker can't know its epoch. Find out what delays worker 0, or use "
                    "StreamingDataLoader, which tells its workers."
                )
            time.sleep(_POLL_SECONDS)


def _pool_of(worker: int) -> int:
    """Return a number that the workers of one iterator share, and that no other iterator of this process has."""
    # A process numbers its children, and a loader creates its workers one after the other. The number is in the name:
    # ForkProcess-3, or ForkProcess-1:3 if the main process is a child, too.
    number = multiprocessing.current_process().name.rpartition("-")[2].rpartition(":")[2]
    if not number.isdigit():
        raise StreamingError(
            f"The data-loading worker {multiprocessing.current_process().name!r} has its own name, so this data set "
            "can't know which workers belong together. Use StreamingDataLoader, which tells its workers."
        )
    return int(number) - worker


class Channel:
    """Informs the workers of one `StreamingDataLoader` where each iteration begins, including persistent workers.

    Args:
        is_shared: Whether workers persist from one iteration to the next, and so must be informed by shared memory.
    """

    def __init__(self, *, is_shared: bool) -> None:
        self._shared = _SharedNumbers(2) if is_shared else None
        self._start: IterationStart | None = None

    def tell(self, start: IterationStart) -> None:
        """Set where the next iteration begins, before its workers are created or woken."""
        self._start = start
        if self._shared is not None:
            numbers = self._shared.own()
            numbers[0], numbers[1] = start.epoch, start.sample

    def heard(self) -> IterationStart:
        """Return where the iteration begins that this process begins now."""
        assert self._start is not None
        if self._shared is None:
            return self._start
        epoch, sample = self._shared.own().tolist()
        return replace(self._start, epoch=epoch, sample=sample)


# Maps a plan, and the number of samples already taken from it, to the remaining samples.
Read = Callable[["Plan", int], Iterator[object]]


class Plan:
    """The part of an epoch that one worker of one rank reads, from where the iteration begins.

    Args:
        order: The order of the epoch.
        deal: The deal of its rest to this worker of this rank.
        are_lent: Whether its samples are only collated into batches, which copies them.
    """

    def __init__(self, order: EpochOrder, deal: RemainingPositions, *, are_lent: bool = False) -> None:
        self.are_lent = are_lent
        self._order = order
        self.deal = deal

    def end_of_batch(self, num_taken: int) -> int:
        """Return the number of samples taken at the end of the current batch, or of the next one."""
        return num_taken - num_taken % self.deal.batch_size + self.deal.batch_size

    def blocks(self, num_taken: int, *, at_most: int) -> Iterator[Ids]:
        """Yield the ids of the remaining samples in blocks. The first block is one batch, which waits for no others.

        Args:
            num_taken: The number of samples of this part that have been taken.
            at_most: The number of ids in a block, if a batch is not larger.
        """
        batch_size = self.deal.batch_size
        batch, skipped = divmod(num_taken, batch_size)
        num_wanted = min(batch_size, at_most)
        while positions := self.deal.positions_of_worker(batch, max(1, num_wanted // batch_size)):
            batch += len(positions)
            num_wanted = min(2 * num_wanted, at_most)
            wanted = np.concatenate(positions)[skipped:]
            skipped = 0
            for begin in range(0, len(wanted), at_most):
                yield self._order.sample_ids(wanted[begin : begin + at_most])


class Samples(Iterator[Any]):
    """The samples of one worker in one epoch.

    Its state is valid for the same worker of the same world; the data set's state is valid for any.

    Args:
        plan: Creates the plan of an iteration that begins at a position.
        read: Reads the rest of a plan.
        note: Called with a position that this iteration was moved to.
        start: Where the iteration begins.
        world: The reader.
        drawn: Counts the samples.
    """

    def __init__(
        self,
        *,
        plan: Callable[[IterationStart, World], Plan],
        read: Read,
        note: Callable[[IterationStart], None],
        start: IterationStart,
        world: World,
        drawn: NumDrawn,
    ) -> None:
        self._plan, self._read, self._note = plan, read, note
        self._start, self._world = start, world
        self._drawn = drawn
        self._samples = read(plan(start, world), 0)

    def __next__(self) -> Any:
        try:
            sample = next(self._samples)
        except StopIteration:
            raise
        except Exception as error:
            # A generator that has raised ends. The epoch must not seem to have ended.
            self._samples = _Failed(error)
            raise
        self._drawn.num_taken += 1
        return sample

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, where this iteration began in it, and the number of samples this worker has yielded."""
        return {
            "version": 1,
            "epoch": self._start.epoch,
            "sample_in_epoch": self._start.sample,
            "batch_size": self._start.batch_size,
            "num_taken": self._drawn.num_taken,
            "world": asdict(self._world),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue at the position of another iteration of the same worker.

        Raises:
            NotExactError: If it was of another worker, or the ranks or workers differ.
        """
        saved = World(**state_dict["world"])
        if saved != self._world:
            raise NotExactError(
                f"The place of an iteration was saved by {saved}, and is loaded by {self._world}, which reads another"
                " part of the epoch. Load the state of StreamingDataLoader or StreamingDataset,"
                " which is the same for all ranks and workers."
            )
        self._start = replace(
            self._start,
            epoch=state_dict["epoch"],
            sample=state_dict["sample_in_epoch"],
            batch_size=state_dict["batch_size"] or 1,
        )
        self._drawn.num_taken = state_dict["num_taken"]
        self._samples = self._read(self._plan(self._start, self._world), self._drawn.num_taken)
        self._note(self._start)


class _Failed(Iterator[Any]):
    """Raises the same error again and again."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __next__(self) -> Any:
        raise self._error
