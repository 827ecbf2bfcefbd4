"""Who reads: this process among all ranks, and this worker among those of its rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The place of one reader.

    Args:
        rank: Of this process among those that get different data, from 0.
        num_ranks: How many of those there are.
        ranks_per_node: How many of them share a machine, and its cache.
        worker: Of this rank, from 0.
        num_workers: Of each rank, at least 1: a process without workers is its own.
    """

    rank: int = 0
    num_ranks: int = 1
    ranks_per_node: int = 1
    worker: int = 0
    num_workers: int = 1

    @property
    def num_nodes(self) -> int:
        """How many machines there are."""
        return max(1, self.num_ranks // self.ranks_per_node)
