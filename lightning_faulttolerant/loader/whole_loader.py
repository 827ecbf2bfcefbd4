"""A loader that is followed as a whole: by its batches, not by its parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class WholeLoader:
    """Ensures that only the trainer's iterations are followed.

    Args:
        loader: The user's loader.
        place: Which of the trainer's loaders it is.
    """

    num_workers = 0
    num_handed_out = 0
    is_gone = False

    def __init__(self, loader: Any, *, place: str = "") -> None:
        self.loader = loader
        self.place = place
        self.followed = loader
        """The object that the trainer iterates over."""
        self.is_followed: Callable[[], bool] = lambda: True
        self.is_held_back: Callable[[], bool] = lambda: False
        self.on_first_batch: Callable[[], None] = lambda: None

    def iterate(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Create the user's iterator for a new iteration, at the position that `load_state_dict` set."""
        if not self.is_followed():
            return make_iterator()
        if self.is_held_back():
            return iter(())
        return _AnnouncedBatches(self._begun(make_iterator), self.on_first_batch)

    def _begun(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin an iteration that is followed, or continue the one that was resumed."""
        raise NotImplementedError

    def close_workers(self) -> None:
        """Do nothing: the user's loader manages its own workers."""

    def release_workers(self) -> None:
        """Do nothing, for the same reason."""


class _AnnouncedBatches(Iterator[Any]):
    """Calls a function right before the first batch is requested."""

    def __init__(self, batches: Iterator[Any], before_first: Callable[[], None]) -> None:
        self._batches = batches
        self._before_first: Callable[[], None] | None = before_first

    def __next__(self) -> Any:
        if self._before_first is not None:
            before_first, self._before_first = self._before_first, None
            before_first()
        return next(self._batches)
