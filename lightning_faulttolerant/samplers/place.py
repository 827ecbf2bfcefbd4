"""The rank that a sampler deals to: the given one, or the current one of the process group or environment."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_faulttolerant.streaming.world import current_world


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """One rank among all.

    Args:
        rank: The rank, from 0.
        num_replicas: The number of ranks.
    """

    rank: int
    num_replicas: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_replicas:
            raise ValueError(f"rank is {self.rank}, but num_replicas is {self.num_replicas}: it must be less, from 0.")


def place_of(*, num_replicas: int | None, rank: int | None) -> RankPlace:
    """Return the given place. A missing part is read from the process group or the environment now.

    Raises:
        ValueError: If the place doesn't exist.
    """
    if num_replicas is None or rank is None:
        world = current_world()
        num_replicas = world.num_ranks if num_replicas is None else num_replicas
        rank = world.rank if rank is None else rank
    return RankPlace(rank=rank, num_replicas=num_replicas)
