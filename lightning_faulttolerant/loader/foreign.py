"""Streaming data sets of other libraries, recognized by name: MosaicML Streaming and LitData need not be installed.

Each counts its epochs itself, and begins another one with each iteration. The count is kept here, so an iteration
begins again as the same epoch. Its consumed samples are drawn and dropped in the workers. The random states are saved
by this package. The libraries' own states hold no random states, and are not used.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from torch.utils.data import IterableDataset

_DEPTH = 3
_MAX_ITEMS = 100

MOSAIC, LITDATA = "MosaicML Streaming", "LitData"
_DATA_SETS = {
    ("streaming.base.dataset", "StreamingDataset"): MOSAIC,
    ("litdata.streaming.dataset", "StreamingDataset"): LITDATA,
}
_LOADERS = {
    ("streaming.base.dataloader", "StreamingDataLoader"): MOSAIC,
    ("litdata.streaming.dataloader", "StreamingDataLoader"): LITDATA,
}


def library_of(dataset: object) -> str | None:
    """Return the library of a streaming data set, or ``None`` if it is none of these."""
    return _found(type(dataset), _DATA_SETS)


def is_loader_of(user_class: type) -> bool:
    """Return whether a class of loaders belongs to one of these libraries, or is derived from one that does."""
    return _found(user_class, _LOADERS) is not None


def _found(kind: type, names: Mapping[tuple[str, str], str]) -> str | None:
    return next((names[key] for base in kind.__mro__ if (key := (base.__module__, base.__name__)) in names), None)


def why_not_followed(loader: Any) -> str | None:
    """Return why a loader of these libraries, or over their data sets, can't be followed, or ``None`` if it can."""
    dataset = loader.dataset
    if library_of(dataset) is not None:
        return None
    library = LITDATA if is_loader_of(type(loader)) else _library_held(dataset, _DEPTH)
    if library is None:
        return None
    return (
        f"its {type(dataset).__name__} passes on the samples of streaming data sets of {library}, so their epochs "
        "can't be set. Give the loader the StreamingDataset itself; a subclass may change the samples"
    )


def _library_held(dataset: object, depth: int) -> str | None:
    if not depth or not isinstance(dataset, IterableDataset):
        return None
    held = [child for value in list(vars(dataset).values()) for child in _items(value)]
    found = (library_of(child) or _library_held(child, depth - 1) for child in held)
    return next((library for library in found if library is not None), None)


def _items(value: object) -> list[Any]:
    return list(value[:_MAX_ITEMS]) if isinstance(value, (list, tuple)) else [value]


class ForeignEpochs:
    """The count of epochs of one loader's data set, if it belongs to one of these libraries.

    Args:
        loader: The user's loader.
    """

    def __init__(self, loader: Any) -> None:
        self._copy: weakref.ref[Any] | None = None
        self.library = library_of(loader.dataset)
        self._dataset = loader.dataset
        self._counts_itself = self.library == LITDATA and is_loader_of(type(loader))
        self._begun: int | None = None

    def follow(self, copy: object) -> None:
        """Count with the followed copy of the loader. It is not referenced, so no cycle keeps its workers alive."""
        self._copy = weakref.ref(copy)

    def begin(self) -> None:
        """Note the epoch of the iteration that is being created."""
        if self.library is not None:
            # LitData's loader counts before this point; MosaicML's data set counts when its workers begin.
            self._begun = self._next() - self._counts_itself

    def take_back(self) -> None:
        """Let an iteration that was requested but not created be the next one again."""
        if self._counts_itself:
            self._loader.current_epoch -= 1

    def state_dict(self, *, in_iteration: bool) -> dict[str, Any]:
        """Return the current epoch, or the next one."""
        if self.library is None:
            return {}
        epoch = self._begun if in_iteration else self._next()
        return {"library": self.library, "epoch": epoch}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Let the next iteration be the epoch in `state`."""
        if self.library is None or state.get("library") != self.library:
            return
        if self.library == MOSAIC:
            self._dataset.next_epoch = state["epoch"]
        elif self._counts_itself:
            self._loader.current_epoch = state["epoch"]
        else:
            self._dataset.set_epoch(state["epoch"])

    @property
    def _loader(self) -> Any:
        return None if self._copy is None else self._copy()

    def _next(self) -> int:
        if self.library == MOSAIC:
            return int(self._dataset.next_epoch)
        return int(self._loader.current_epoch if self._counts_itself else self._dataset.current_epoch)
