"""The indices of each batch, as the index samplers have yielded them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from lightning_faulttolerant.loader.digests import START, updated
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, Loaders

_MASK = 0xFFFF_FFFF


@dataclass(kw_only=True, slots=True)
class _Followed:
    """A loader of the loop, with its last iteration, and how many batches that had yielded then."""

    place: str
    tracker: TrackedLoader
    iteration: Any = None
    num_out: int = 0


@final
class FollowedLoop:
    """One of the Trainer's loops: its counter, and the indices that its loaders yield.

    Args:
        loop: The loop that counts the batches.
        loaders: The loaders of the run.
        stage: The prefix of the places of the loop's loaders.
    """

    def __init__(self, loop: Any, loaders: Loaders, stage: str) -> None:
        self.current = loop.batch_progress.current
        self._loaders = loaders
        self._stage = stage
        self._is_training = stage == TRAIN
        self._followed: list[_Followed] = []
        self._moved: list[_Followed] = []
        """Those that have yielded the last batch."""

    def find_trackers(self) -> None:
        """Find the loaders that have indices."""
        known = {id(one.tracker): one for one in self._followed}
        self._followed = [
            known.get(id(one)) or _Followed(place=place, tracker=one)
            for place, one in self._loaders.trackers.items()
            if place.startswith(self._stage) and isinstance(one, TrackedLoader) and not one.is_gone
        ]

    def order(self) -> int:
        """Return a checksum of the indices of the loaders that have yielded a batch since the last call; 0 if none."""
        if self.current.ready <= 1:  # the first batch of an epoch, or of an evaluation
            self.find_trackers()
        prefetches = self._loaders.prefetches
        mark = prefetches.last if self._is_training and prefetches.is_on else None
        found, moved = 0, []
        for one in self._followed:
            iteration: Any = one.tracker.iteration
            num_out = 0 if iteration is None else iteration.num_out
            if mark is not None:  # the next batch is fetched already
                iteration, num_out = mark.iterations.get(one.place, (None, 0))
            if iteration is not None and num_out != (one.num_out if iteration is one.iteration else 0):
                one.iteration, one.num_out = iteration, num_out
                moved.append(one)
                others: set[str] = set()
                values = updated(START, iteration.record.batch(num_out - 1), others)[0]
                found = 31 * found + (0 if others else values)
        self._moved = moved or self._moved  # some optimizers call a step again
        return found & _MASK

    def indices(self) -> dict[str, object] | None:
        """Return the indices of the last batch, by the place of their loader; ``None`` if they are not known."""
        found = {one.place: one.iteration.record.batch(one.num_out - 1) for one in self._moved}
        return None if None in found.values() else found or None
