"""A plain loop over a ResumableDataLoader, and the law for it: each cut continues exactly."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_faulttolerant import ResumableDataLoader
from tests.loader.loops import listed, loop, own_draws, seed

Event = tuple[Any, ...]
Make = Callable[[], ResumableDataLoader[Any]]


def safe(state: Any) -> Any:
    """Return `state` as it comes out of a file that was loaded with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def tell(loader: DataLoader[Any], epoch: int) -> None:
    """Tell a sampler its epoch, as a loop does."""
    set_epoch = getattr(loader.sampler, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


def run(
    loader: ResumableDataLoader[Any], *, num_epochs: int, saved: dict[int, Any] | None = None, tells: bool = True
) -> list[Event]:
    """Return a loop's events from the loader's epoch on; put its state at each position into `saved`."""
    events: list[Event] = []
    if saved is not None:
        saved[0] = safe(loader.state_dict())
    for epoch in range(loader.epoch, num_epochs):
        if tells:
            tell(loader, epoch)
        for batch in loader:
            events.append((epoch, listed(batch), *own_draws()))
            if saved is not None:
                saved[len(events)] = safe(loader.state_dict())
    return events


def assert_resumes(make: Make, *, num_epochs: int = 3, every: int = 1) -> None:
    """Assert that a newly created loader continues exactly with the rest of a run from each position."""
    seed(1)
    reference = [(epoch, batch, *draws) for epoch, _, batch, *draws in loop(_plain(make()), num_epochs=num_epochs)]
    saved: dict[int, Any] = {}
    seed(1)
    assert run(make(), num_epochs=num_epochs, saved=saved) == reference
    for position in list(saved)[::every]:
        seed(100 + position)
        loader = make()
        seed(200 + position)
        loader.load_state_dict(saved[position])
        assert _same(loader.state_dict(), saved[position])
        assert run(loader, num_epochs=num_epochs) == reference[position:], f"cut after batch {position}"


def _plain(loader: ResumableDataLoader[Any]) -> DataLoader[Any]:
    plain = DataLoader.__new__(DataLoader)
    vars(plain).update(loader.__getstate__())
    return plain


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
