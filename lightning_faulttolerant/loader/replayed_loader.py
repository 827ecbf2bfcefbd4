"""A loader that is not a ``DataLoader`` and has no state: any iterable, resumed by a replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_faulttolerant.loader.derived_class import REPLAYED, class_of, swap
from lightning_faulttolerant.loader.exactness import why_not_drawn_again
from lightning_faulttolerant.loader.live_objects import torch_loaders_in
from lightning_faulttolerant.loader.own_iter import takes_each_batch_alone
from lightning_faulttolerant.loader.replayer import ReplayedIteration, Replayer
from lightning_faulttolerant.loader.tracked_class import is_resumable, keeps_own_position
from lightning_faulttolerant.loader.whole_loader import WholeLoader
from lightning_faulttolerant.state.generators import HeldGenerators


def is_replayed(loader: object) -> bool:
    """Return whether `loader` is followed by its batches: it is not torch's, or its class does more with them."""
    if not isinstance(loader, DataLoader):
        return True
    return not (is_resumable(loader) or keeps_own_position(loader) or takes_each_batch_alone(type(loader)))  # type: ignore[arg-type]  # mypy says it is not Hashable


def why_not_replayed(loader: Any) -> str | None:
    """Return why `loader` can't be drawn from again, or ``None`` if it can, as far as that is known in advance."""
    for name, inner in torch_loaders_in(loader).items():
        reason = why_not_drawn_again(inner)
        if reason is not None:
            return reason if inner is loader else f"it takes its batches from {name}, and {reason}"
    return None


class ReplayedLoader(WholeLoader):
    """Follows any iterable through its iterations.

    Args:
        loader: The user's loader.
        place: Which of the trainer's loaders it is.
        older: The objects that follow the fit's other loaders, created before.
    """

    def __init__(self, loader: Any, *, place: str = "", older: Iterable[WholeLoader] = ()) -> None:
        super().__init__(loader, place=place)
        kind: Any = type(loader)
        self._user_class = kind.__base__ if hasattr(kind, REPLAYED) else kind
        self._is_swapped = False
        others = [one.replayer for one in older if isinstance(one, ReplayedLoader)]
        self.replayer: Replayer = Replayer(loader, name=f"loader {place} ({self._user_class.__name__})", older=others)

    @property
    def strict(self) -> bool | None:
        """Whether anything inexact is an error; ``None`` if it is only noted."""
        return self.replayer.strict

    @strict.setter
    def strict(self, strict: bool | None) -> None:
        self.replayer.strict = strict

    @property
    def not_exact(self) -> list[str]:
        """The reasons why something is not exact."""
        return self.replayer.not_exact

    @not_exact.setter
    def not_exact(self, lines: list[str]) -> None:
        self.replayer.not_exact = lines

    @property
    def iteration(self) -> ReplayedIteration | None:
        """The latest iteration."""
        return self.replayer.iteration

    @property
    def held(self) -> HeldGenerators:
        """The generators that the loader holds."""
        return self.replayer.held

    def follow(self) -> None:
        """Observe the loader's iterations. Until `leave`, its class is one derived from its own.

        If its class doesn't allow that, or it is already followed in another place, `followed` stands in for it.
        """
        is_plain = isinstance(self.loader, torch.Tensor) or not hasattr(self._user_class, "__iter__")
        if not (is_plain or hasattr(type(self.loader), REPLAYED)):
            try:
                swap(self.loader, class_of(self._user_class, self.iterate, **{REPLAYED: True}))
            except TypeError:  # one of Python's classes, or a class that can't be derived from
                pass
            else:
                self._is_swapped = True
                return
        kind = _SizedStandIn if hasattr(self._user_class, "__len__") else _StandIn
        self.followed = kind(self.loader, self.iterate, self._make_iterator)

    def leave(self) -> None:
        """Restore the loader's own class."""
        if self._is_swapped:
            swap(self.loader, self._user_class)
            self._is_swapped = False

    def _make_iterator(self) -> Iterator[Any]:
        own = getattr(self._user_class, "__iter__", None)
        made: Iterator[Any] = iter(self.loader) if own is None else own(self.loader)
        return made

    def _begun(self, make_iterator: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        return self.replayer.iterate(make_iterator)

    def state_dict(self, consumed: int | None, iteration: ReplayedIteration | None = None) -> dict[str, Any]:
        """Return the position, as `Replayer.state_dict` does."""
        return self.replayer.state_dict(consumed, iteration)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Bring the loader to a position of `state_dict`."""
        self.replayer.load_state_dict(state_dict, self._make_iterator)

    def replayed(self) -> list[Any]:
        """Return the loader, and the iterators and similar objects in it, which a replay creates again."""
        return [self.loader, *self.replayer.live()]


class _StandIn:
    """Stands in for a loader whose class can't be derived from, such as a generator."""

    def __init__(
        self,
        loader: Any,
        iterate: Callable[[Callable[[], Iterator[Any]]], Iterator[Any]],
        make_iterator: Callable[[], Iterator[Any]],
    ) -> None:
        self.user_loader = loader
        self._iterate = iterate
        self._make_iterator = make_iterator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "user_loader":
            raise AttributeError(name)
        return getattr(self.user_loader, name)

    def __iter__(self) -> Iterator[Any]:
        return self._iterate(self._make_iterator)


class _SizedStandIn(_StandIn):
    def __len__(self) -> int:
        return len(self.user_loader)


def user_loader_of(loader: Any) -> Any:
    """Return the loader that `loader` stands in for, or `loader` itself."""
    return loader.user_loader if isinstance(loader, _StandIn) else loader
