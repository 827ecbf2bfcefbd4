"""Messages between ranks besides the gradients: over a separate gloo group, with a time limit.

No device is used. A dead rank is an error on the others: the connection to it breaks, or the time runs out.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist

from lightning_faulttolerant.errors import RanksLostError


@final
class Channel:
    """A channel on which ranks exchange Python objects; created by all of them at the same time.

    Each exchange is a collective of the channel's ranks: all of them must call it, in the same order.

    Args:
        ranks: Their numbers in the default group, in one order.
        timeout: How long one exchange may wait for the slowest rank.

    Raises:
        RanksLostError: From each exchange too: if a rank is gone, does not answer in time, or is at another step.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        self.ranks = list(ranks)
        self._timeout = timeout
        self.place = self.ranks.index(dist.get_rank())
        """This rank's place among them, from 0."""
        try:
            # A separate group: the default one may be NCCL, which can't send objects on the CPU and has its own time
            # limit. Ranks outside of the group don't take part.
            # A group of some ranks is named by its ranks. A group of all ranks is named by a number that no other group
            # ever has: with the name of a group that is gone, it would find the addresses of the old group.
            some = len(self.ranks) < dist.get_world_size()
            self._group = dist.new_group(self.ranks, timeout=timeout, backend="gloo", use_local_synchronization=some)
        except RuntimeError as error:
            raise self._silence("the first exchange", error) from error

    def close(self) -> None:
        """Close the connections; each rank does so alone."""
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def to_all(self, step: str, value: Any) -> list[Any]:
        """Send a value to all ranks, and return all values in order."""
        answers: list[Any] = [None] * len(self.ranks)
        try:
            dist.all_gather_object(answers, (step, value), group=self._group)
        except RuntimeError as error:
            raise self._silence(step, error) from error
        return self._checked(answers)

    def to_first(self, step: str, value: Any) -> list[Any] | None:
        """Send a value to the first rank; return all values in order on that rank, and ``None`` on the others."""
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
