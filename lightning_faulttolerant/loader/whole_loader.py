"""A loader that is followed as a whole: by what it gives, rather than by what it consists of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class WholeLoader:
    """Sees to it that only the trainer's iterations are followed.

    Args:
        loader: The user's.
        place: Which of the trainer's it is.
    """

    num_workers = 0
    num_handed_out = 0
    is_gone = False

    def __init__(self, loader: Any, *, place: str = "") -> None:
        self.loader = loader
        self.place = place
        self.followed = loader
        """What the trainer is to iterate over."""
        self.is_followed: Callable[[], bool] = lambda: True
        self.is_held_back: Callable[[], bool] = lambda: False
        self.on_first_batch: Callable[[], None] = lambda: None

    def iterate(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Make the user's iterator for a new iteration, resumed where `load_state_dict` said so."""
        if not self.is_followed():
            return make_iterator()
        if self.is_held_back():
            return iter(())
        return _Announced(self._begun(make_iterator), self.on_first_batch)

    def _begun(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin an iteration that is followed, or continue with the one that was resumed."""
        raise NotImplementedError

    def close_workers(self) -> None:
        """Do nothing: workers that the user's loader may have are its own affair."""

    def release_workers(self) -> None:
        """Do nothing, likewise."""


class _Announced(Iterator[Any]):
    """Says that the first batch is asked for, right before it is."""

    def __init__(self, batches: Iterator[Any], before_first: Callable[[], None]) -> None:
        self._batches = batches
        self._before_first: Callable[[], None] | None = before_first

    def __next__(self) -> Any:
        if self._before_first is not None:
            before_first, self._before_first = self._before_first, None
            before_first()
        return next(self._batches)
