"""The samples of an iterable data set that are drawn again and dropped, with a digest of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_faulttolerant.loader.sample_digest import sample_digest


class DrawnAgain:
    """Counts samples that are drawn again.

    Args:
        samples: The iterator. `iter` is not called on it: a data set that is its own iterator would begin again.
    """

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples
        self.num_drawn, self.digest = 0, 0

    def draw_up_to(self, number: int) -> None:
        """Draw samples until this number is reached, or no more come."""
        while self.num_drawn < number:
            try:
                sample = next(self._samples)
            except StopIteration:
                return
            self.digest = sample_digest(sample, self.digest)
            self.num_drawn += 1
