"""The time that this rank spends itself on data, steps, evaluation, and saves, and which ranks are slow by that.

Only Python's clock is read, a few times a batch: no device is synchronized, and no rank waits for another. The times of
all ranks travel with the states that a save gathers anyway.

A step counts without its backward pass, and without DDP's copy of the buffers before its forward pass: there, ranks
wait for each other. On a GPU, a step is what Python does until it has queued the work: a GPU that is itself slow can't
be told from here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.records.slow_ranks import NUM_SAVES, OwnSeconds, SlowRank, slow_ranks
from lightning_faulttolerant.trainer.adapters.compat import SYNC_BUFFERS
from lightning_faulttolerant.trainer.patches import Method, Patches

_T = TypeVar("_T")


class OwnTimes:
    """The times of one rank in one fit. The code around fetches writes `fetch_began` and `data` itself, for speed."""

    __slots__ = (
        "_began",
        "_evaluation",
        "_evaluation_began",
        "_latest",
        "_save",
        "_taken",
        "_together",
        "data",
        "data_taken",
        "fetch_began",
        "slow",
        "steps",
    )

    def __init__(self) -> None:
        self.fetch_began = 0.0
        """When the fetch in progress began; 0 if there is none."""
        self.data = 0.0
        """How long training has waited for data."""
        self.data_taken = 0.0
        """How long it had waited for data when the last state was taken."""
        self.steps = 0.0
        """How long the batches took, each from its fetch to the end of its step; with several ranks."""
        self.slow: tuple[SlowRank, ...] = ()
        """The ranks that were slow over the last three saves, on rank 0."""
        self._evaluation = self._evaluation_began = self._save = self._together = 0.0
        self._began = perf_counter()
        self._taken: OwnSeconds = (0.0, 0.0, 0.0, 0.0)
        self._latest: deque[tuple[Sequence[OwnSeconds], float]] = deque(maxlen=NUM_SAVES)

    def begin_evaluation(self) -> None:
        """Note that a validation run begins or continues."""
        self._evaluation_began = perf_counter() - self._save

    def end_evaluation(self) -> None:
        """Note that its last batch is done. What follows may wait for other ranks."""
        if self._evaluation_began:
            self._evaluation += perf_counter() - self._save - self._evaluation_began
        self._evaluation_began = 0.0

    def timed(self, work: Callable[[], _T]) -> _T:
        """Do a part of a save for which this rank waits for no other, and return its result."""
        began = perf_counter()
        try:
            return work()
        finally:
            self._save += perf_counter() - began

    def apart(self, original: Method) -> Method:
        """Return a method whose time is no part of a step: ranks wait for each other in it."""

        def together(*args: object, **kwargs: object) -> object:
            began = perf_counter()
            result = original(*args, **kwargs)
            self._together += perf_counter() - began
            return result

        return together

    def take(self) -> OwnSeconds:
        """Return what this rank has spent itself since the last call."""
        now = (self.data, max(self.steps - self.data - self._together, 0.0), self._evaluation, self._save)
        before, self._taken = self._taken, now
        return tuple(one - other for one, other in zip(now, before, strict=True))  # type: ignore[return-value]

    def hear(self, of_ranks: Sequence[OwnSeconds]) -> None:
        """Receive what all ranks have spent since the last save, on rank 0."""
        began, self._began = self._began, perf_counter()
        if not any(own[:3] != (0.0, 0.0, 0.0) for own in of_ranks):
            return  # the first save of a fit comes before its first batch
        self._latest.append((of_ranks, self._began - began))
        self.slow = ()
        if len(self._latest) == NUM_SAVES:
            sums = [
                tuple(map(math.fsum, zip(*own, strict=True))) for own in zip(*(o for o, _ in self._latest), strict=True)
            ]
            self.slow = slow_ranks(sums, math.fsum(seconds for _, seconds in self._latest))  # type: ignore[arg-type]


def follow_steps(trainer: Trainer, patches: Patches, times: OwnTimes) -> None:
    """Measure steps and backward passes, if there are other ranks to compare with.

    Args:
        trainer: The trainer that runs the fit.
        patches: Undoes it.
        times: Receives the times.
    """

    def advancing(original: Method) -> Method:
        def advance(data_fetcher: object) -> None:
            began = perf_counter()
            original(data_fetcher)
            times.steps += perf_counter() - began

        return advance

    if trainer.world_size > 1:
        patches.wrap(trainer.fit_loop.epoch_loop, "advance", advancing)
        patches.wrap(trainer.strategy, "backward", times.apart)


def follow_buffers(trainer: Trainer, patches: Patches, times: OwnTimes) -> None:
    """Measure how long DDP copies buffers before each forward pass, once it exists.

    Args:
        trainer: The trainer that runs the fit.
        patches: Undoes it.
        times: Receives the times.
    """
    if isinstance(trainer.strategy.model, DistributedDataParallel):
        patches.wrap(trainer.strategy.model, SYNC_BUFFERS, times.apart)
