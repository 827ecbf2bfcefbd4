"""The samples of an iterable data set that are drawn again and dropped, with a digest of them all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_faulttolerant.loader.sample_digest import sample_digest


class DrawnAgain:
    """Counts samples that are drawn again.

    Args:
        samples: Gives them; it is not asked for an iterator, which would begin again where a data set is its own.
    """

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples
        self.num_drawn, self.digest = 0, 0

    def draw_up_to(self, number: int) -> None:
        """Draw samples until there were so many, or no more come."""
        while self.num_drawn < number:
            try:
                sample = next(self._samples)
            except StopIteration:
                return
            self.digest = sample_digest(sample, self.digest)
            self.num_drawn += 1
