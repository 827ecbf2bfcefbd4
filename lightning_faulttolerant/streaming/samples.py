"""One iteration over a streaming data set in one process: its samples, and how many of them have been taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.streaming.epochs import IterationStart
from lightning_faulttolerant.streaming.order import EpochOrder, RemainingPositions
from lightning_faulttolerant.streaming.shards import Ids
from lightning_faulttolerant.streaming.world import World

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
    """

    def __init__(
        self,
        *,
        plan: Callable[[IterationStart, World], Plan],
        read: Read,
        note: Callable[[IterationStart], None],
        start: IterationStart,
        world: World,
    ) -> None:
        self._plan, self._read, self._note = plan, read, note
        self._start, self._world = start, world
        self._num_taken = 0
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
        self._num_taken += 1
        return sample

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, where this iteration began in it, and the number of samples this worker has yielded."""
        return {
            "version": 1,
            "epoch": self._start.epoch,
            "sample_in_epoch": self._start.sample,
            "batch_size": self._start.batch_size,
            "num_taken": self._num_taken,
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
                f"The place of an iteration was saved by {saved}, and is loaded by {self._world}. What this worker"
                " reads would be another part of the epoch. Load the state of StreamingDataLoader or StreamingDataset,"
                " which is the same for all ranks and workers."
            )
        self._start = replace(
            self._start,
            epoch=state_dict["epoch"],
            sample=state_dict["sample_in_epoch"],
            batch_size=state_dict["batch_size"],
        )
        self._num_taken = state_dict["num_taken"]
        self._samples = self._read(self._plan(self._start, self._world), self._num_taken)
        self._note(self._start)


class _Failed(Iterator[Any]):
    """Raises the same error again and again."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __next__(self) -> Any:
        raise self._error
