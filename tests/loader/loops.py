"""Plain training loops without Lightning: their events, their states at each position, and the law of resumes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import ResumableDataLoader
from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.loader.tracked import TrackedLoader
from tests.loader.made import Drawing

Event = tuple[Any, ...]
Make = Callable[[], Any]


def seed(number: int) -> None:
    """Seed the three global generators."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def start_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tell a sampler or a data set its epoch, as a loop does."""
    for part in (loader.sampler, loader.dataset):
        set_epoch = getattr(part, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


def own_draws() -> tuple[float, float]:
    """Draw in the loop, as dropout does."""
    return random.gauss(0, 1), torch.rand(()).item()


def listed(batch: Any) -> Any:
    """Return a batch as plain values."""
    return batch.tolist() if isinstance(batch, Tensor) else batch


def follow(
    loader: DataLoader[Any], state: Any = None, *, strict: bool = True, **arguments: Any
) -> tuple[TrackedLoader, DataLoader[Any]]:
    """Return a tracker of `loader`, into which `state` was loaded, and the copy that it follows."""
    tracker = TrackedLoader(loader, exactness=Exactness(strict=strict), **arguments)
    copy = tracker.copy_of(loader)
    if state is not None:
        tracker.load_state_dict(state)
    return tracker, copy


def plain_of(loader: ResumableDataLoader[Any]) -> DataLoader[Any]:
    """Return torch's own loader with the same arguments."""
    plain = DataLoader.__new__(DataLoader)
    vars(plain).update(loader.__getstate__())
    return plain


def small(**arguments: Any) -> ResumableDataLoader[Any]:
    """Return a loader of 5 batches."""
    return ResumableDataLoader(Drawing(5), **{"batch_size": 1, "shuffle": True, **arguments})


def begun(loader: ResumableDataLoader[Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the state of a loader after its first batch, and the rest of its epoch."""
    next(batches := iter(loader))
    return loader.state_dict(), [listed(batch) for batch in batches]


def resumable_loop(
    loader: Any,
    *,
    num_epochs: int,
    saved: list[Any] | None = None,
    cuts: slice = slice(None),
    epoch_of: Callable[[Any, int], Iterator[Any]] | None = None,
    draw: Callable[[], Any] = own_draws,
) -> list[Event]:
    """Return a loop's events from the loader's epoch on: its batches, and the loop's own draws after each.

    Pairs of position and state at the cuts are put into `saved`. A loader of torch's own has all its epochs.
    """
    events: list[Event] = []
    places = itertools.count()

    def save() -> None:
        if saved is not None and next(places) in range(1_000)[cuts]:
            saved.append((len(events), json.loads(json.dumps(loader.state_dict()))))

    save()
    # The epoch is read from the state, since Fabric's wrapper does not show properties.
    for epoch in range(loader.state_dict()["epoch"] if hasattr(loader, "state_dict") else 0, num_epochs):
        start_epoch(loader, epoch)
        for batch in loader if epoch_of is None else epoch_of(loader, epoch):
            events.append((epoch, listed(batch), draw()))
            save()
        save()
    return events


def assert_resumable(
    make: Make,
    *,
    num_epochs: int = 2,
    cuts: slice = slice(None),
    epoch_of: Callable[[Any, int], Iterator[Any]] | None = None,
    draw: Callable[[], Any] = own_draws,
    is_plain: bool = True,
) -> None:
    """Assert that a loop over a new `ResumableDataLoader` continues exactly from the state at each position.

    Each loader but the first has loaded the state of another position before. With `is_plain`, the uninterrupted loop
    is also compared with a loop over torch's own loader.
    """
    saved: list[Any] = []
    seed(1)
    reference = resumable_loop(make(), num_epochs=num_epochs, saved=saved, cuts=cuts, epoch_of=epoch_of, draw=draw)
    assert reference
    if is_plain:
        seed(1)
        assert resumable_loop(plain_of(make()), num_epochs=num_epochs, draw=draw) == reference
    for number, (position, state) in enumerate(saved):
        seed(100 + number)
        loader = make()
        if number > 0:
            loader.load_state_dict(saved[number - 1][1])
        loader.load_state_dict(state)
        assert json.loads(json.dumps(loader.state_dict())) == state
        resumed = resumable_loop(loader, num_epochs=num_epochs, epoch_of=epoch_of, draw=draw)
        assert resumed == reference[position:], position
