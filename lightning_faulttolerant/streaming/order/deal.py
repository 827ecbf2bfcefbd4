"""Which rank reads which positions of the flat order in each step. A global step has the same samples in every world.

A global step takes the next ``num_ranks * batch_size`` positions. Node ``a`` takes the positions that are ``a`` modulo
the number of nodes, and deals them to its ranks in turn. Of a rank's ``W`` workers, worker ``w`` reads the steps ``w``,
``w + W``, ...
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from lightning_faulttolerant.streaming.order.draws import Ints
from lightning_faulttolerant.streaming.world import World


def positions_of_step(step: int, *, start: int, world: World, batch_size: int) -> Ints:
    """Return the positions of the batch of this rank in a full step, in the order of the batch.

    Args:
        step: The step, counted from the start or the resume, from 0.
        start: The number of positions of the epoch that all ranks together had consumed before.
        world: The reader.
        batch_size: The number of samples in one batch of one rank.
    """
    deal = RemainingPositions(num_positions=sys.maxsize, start=start, world=world, batch_size=batch_size)
    return deal.positions(step)


def nodes_of(world: World) -> tuple[int, int]:
    """Return the number of nodes, and the number of ranks on each."""
    return world.num_nodes, world.ranks_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class RemainingPositions:
    """The rest of an epoch, dealt to one rank.

    All ranks get equally many samples in every step. If the remaining positions don't divide evenly, some ranks repeat
    a sample of their node in the last step. There are fewer repeats than ranks, and no sample is left out.

    Args:
        num_positions: The number of positions in the whole epoch.
        start: The number of positions that all ranks together had consumed before.
        world: The reader.
        batch_size: The number of samples in one batch of one rank.
        initial_nodes: The number of nodes that a run of the original library began with. It is set if that library
            keeps the order inside a global batch for the current number of nodes (see `kept_nodes`). The batch is then
            dealt as to the initial nodes, read in turn, and cut again.
        is_in_turn: Whether the first rank has the first positions of each global batch, the second rank the next ones,
            and so on, regardless of nodes. All steps must then be full.

    Source: the partition of MosaicML Streaming 0.13 (``orig``, ``relaxed``), without its tables.
    """

    num_positions: int
    start: int = 0
    world: World
    batch_size: int
    initial_nodes: int | None = None
    is_in_turn: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}.")
        if not 0 <= self.start <= self.num_positions:
            raise ValueError(
                f"An epoch of {self.num_positions} positions can't continue from position {self.start}. The state is"
                " that of another data set or of another epoch_size."
            )

    @property
    def num_samples(self) -> int:
        """The number of samples that each rank reads from here to the end of the epoch."""
        return -(-(self.num_positions - self.start) // self.world.num_ranks)

    @property
    def num_steps(self) -> int:
        """The number of steps from here to the end of the epoch. The last one may have a smaller batch."""
        return -(-self.num_samples // self.batch_size)

    @property
    def num_full_steps(self) -> int:
        """The number of steps from here that have a position for each sample, without repeats."""
        return (self.num_positions - self.start) // self._of_step

    def positions(self, step: int) -> Ints:
        """Return the positions of the batch of this rank in a step, counted from ``start``, in order."""
        return self._full(np.array([step]))[0] if step < self.num_full_steps else self._last(step)

    def positions_of_worker(self, first: int, count: int) -> list[Ints]:
        """Return the positions of the next ``count`` batches of this worker, which has read ``first`` batches.

        Fewer are returned at the end of the epoch. Concatenate them to request their samples in one call.
        """
        world = self.world
        steps = range(world.worker + first * world.num_workers, self.num_steps, world.num_workers)[:count]
        full = range(steps.start, min(steps.stop, self.num_full_steps), steps.step)
        return [*self._full(np.array(full, np.int64)), *map(self._last, steps[len(full) :])]

    def _full(self, steps: Ints) -> Ints:
        """Return the positions in full steps: a row for each step, a column for each sample."""
        num_nodes, ranks_per_node = nodes_of(self.world)
        of_batch = np.arange(self.batch_size, dtype=np.int64)
        if self.initial_nodes is None or self._of_step % (self.initial_nodes * ranks_per_node):
            device, place = np.full_like(of_batch, self.world.rank), of_batch
        else:
            num_nodes = self.initial_nodes
            in_turn = self.world.rank * self.batch_size + of_batch
            device, place = np.divmod(in_turn, self._of_step // (num_nodes * ranks_per_node))
        node, rank_of_node = np.divmod(device, ranks_per_node)
        base = self.start + steps[:, None] * self._of_step
        if self.is_in_turn:
            return base + self.world.rank * self.batch_size + of_batch
        positions: Ints = base + (node - base) % num_nodes + num_nodes * (rank_of_node + ranks_per_node * place)
        return positions

    @property
    def _of_step(self) -> int:
        return self.world.num_ranks * self.batch_size

    def _last(self, step: int) -> Ints:
        """Return the positions in a step that is not full and may repeat some."""
        num_nodes, ranks_per_node = nodes_of(self.world)
        node, rank_of_node = divmod(self.world.rank, ranks_per_node)
        first = self.start + (node - self.start) % num_nodes
        of_node = max(0, -(-(self.num_positions - first) // num_nodes))
        begin = step * self.batch_size
        places = rank_of_node + ranks_per_node * np.arange(begin, min(begin + self.batch_size, self.num_samples))
        missing = self.num_samples * ranks_per_node - of_node
        if not of_node:  # fewer positions than nodes: this node has no samples
            return self.start + places % (self.num_positions - self.start)
        has_enough = ranks_per_node + missing - 1 <= of_node
        again = places - ranks_per_node - missing + 1 if has_enough else places % of_node
        return first + num_nodes * np.where(places < of_node, places, again)


def normalised(epoch: int, position: int, *, num_positions: int) -> tuple[int, int]:
    """Return epoch and position. A position at the end of an epoch becomes the beginning of the next one."""
    return (epoch + 1, 0) if position >= num_positions else (epoch, position)
