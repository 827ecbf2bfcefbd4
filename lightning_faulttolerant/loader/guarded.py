"""A data set for workers whose samples may fail to load: the error takes the place of the batch, and is counted.

Without this, torch sends the error in place of the batch, and the worker returns no state with it. A run that leaves
such a batch out could not be resumed after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, final

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info


@final
class Unloaded:
    """Stands in a worker for a sample that could not be loaded.

    Args:
        error: The error. torch raises it in the main process if it comes in place of a batch.
    """

    def __init__(self, error: ExceptionWrapper) -> None:
        self.error = error


def unloaded_now() -> Unloaded:
    """Return what stands for the exception that is being handled."""
    info = get_worker_info()
    number = "" if info is None else f" {info.id}"
    return Unloaded(ExceptionWrapper(where=f"in DataLoader worker process{number}"))  # type: ignore[no-untyped-call]


def error_in(samples: object) -> ExceptionWrapper | None:
    """Return why the samples of a batch could not be loaded, or ``None`` if they were."""
    found = samples[0] if isinstance(samples, list) and samples else samples
    return found.error if isinstance(found, Unloaded) else None


@final
class GuardedSamples:
    """Stands in for a map-style data set while torch creates the workers of a loader.

    Args:
        dataset: The loader's data set. Every attribute is looked up on it.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> object:
        try:
            return self._dataset[index]
        except Exception:  # noqa: BLE001 - torch raises it in the main process
            return unloaded_now()

    def __getitems__(self, indices: Any) -> list[object]:
        """Return the samples of a batch, or one that says why they could not be loaded."""
        try:
            at_once = getattr(self._dataset, "__getitems__", None)
            return at_once(indices) if at_once else [self._dataset[index] for index in indices]
        except Exception:  # noqa: BLE001 - likewise
            return [unloaded_now()]

    @contextlib.contextmanager
    def stand_in(self, loader: DataLoader[Any]) -> Iterator[None]:
        """Replace the data set of `loader` while an iterator is created, which keeps it; restore it afterwards."""
        parts = vars(loader)
        parts["dataset"] = self
        try:
            yield
        finally:
            parts["dataset"] = self._dataset

    def init_worker(self) -> None:
        """Let user functions in this worker find their own data set."""
        object.__setattr__(get_worker_info(), "dataset", self._dataset)  # plain assignment is refused
