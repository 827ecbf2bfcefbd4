"""What ranks tell one another besides their gradients: over a gloo group of its own, with a time limit.

No device is touched, and a dead rank is an error on the others: the connection to it breaks, or the time is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from lightning_faulttolerant.errors import RanksLostError


@final
class Channel:
    """A way for ranks to tell one another Python objects; made by all of them at the same time.

    Each exchange is a collective of the channel's ranks: all of them must come to it, in the same order.

    Args:
        ranks: Their numbers in the default group, in one order.
        timeout: How long one exchange may wait for the slowest rank.

    Raises:
        RanksLostError: As each exchange does: if a rank is gone, does not answer in time, or is at another step.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        self.ranks = list(ranks)
        self._timeout = timeout
        self.place = self.ranks.index(dist.get_rank())
        """This one's place among them, from 0."""
        try:
            # Of its own: the default group may be NCCL, which knows no objects on the CPU, and has a time limit of its
            # own. Ranks outside of the group don't take part.
            # A group of some of them is named by its ranks, one of all by a number that no other group ever has. With
            # the name of a group that is gone it would find the addresses of that one.
            some = len(self.ranks) < dist.get_world_size()
            self._group = dist.new_group(self.ranks, timeout=timeout, backend="gloo", use_local_synchronization=some)
        except RuntimeError as error:
            raise self._silence("the first exchange", error) from error

    def close(self) -> None:
        """Give the connections back; each rank by itself."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def to_all(self, step: str, value: Any) -> list[Any]:
        """Tell all ranks, and learn from each, in order."""
        answers: list[Any] = [None] * len(self.ranks)
        try:
            dist.all_gather_object(answers, (step, value), group=self._group)
        except RuntimeError as error:
            raise self._silence(step, error) from error
        return self._checked(answers)

    def to_first(self, step: str, value: Any) -> list[Any] | None:
        """Tell the first rank; return what all have told, in order, on that one, and ``None`` on the others."""
        answers: list[Any] | None = [None] * len(self.ranks) if self.place == 0 else None
        try:
            dist.gather_object((step, value), answers, dst=self.ranks[0], group=self._group)
        except RuntimeError as error:
            raise self._silence(step, error) from error
        return None if answers is None else self._checked(answers)

    def from_first(self, step: str, value: Any) -> Any:
        """Return the first rank's value on every rank."""
        told = [(step, value if self.place == 0 else None)]
        try:
            dist.broadcast_object_list(told, src=self.ranks[0], group=self._group)
        except RuntimeError as error:
            raise self._silence(step, error) from error
        if told[0][0] != step:
            raise RanksLostError(
                f"they have lost each other: rank {self.ranks[0]} is at {told[0][0]!r}, this one at {step!r}"
            )
        return told[0][1]

    def _checked(self, answers: list[Any]) -> list[Any]:
        self._check([step for step, _ in answers])
        return [value for _, value in answers]

    def _check(self, steps: list[str]) -> None:
        if len(set(steps)) > 1:
            places = ", ".join(f"rank {rank} is at {step!r}" for rank, step in zip(self.ranks, steps, strict=False))
            raise RanksLostError(f"they have lost each other: {places}")

    def _silence(self, step: str, error: RuntimeError) -> RanksLostError:
        reason = str(error).splitlines()[0]
        return RanksLostError(
            f"rank {self.ranks[self.place]} had no answer at {step!r}: {reason} One of the others has died, has failed"
            f" before it came here, or took longer than {self._timeout}"
        )
