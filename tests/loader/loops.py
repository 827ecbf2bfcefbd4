"""Plain training loops without Lightning: their events, their states at each position, and the law of resumes."""

from __future__ import annotations

import io
import itertools
import json
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import ResumableDataLoader
from lightning_faulttolerant.loader.exactness import Exactness
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state.packing import pack_blobs, unpack_blobs
from lightning_faulttolerant.state.rng import rng_state, set_rng_state

Event = tuple[Any, ...]
Make = Callable[[], Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint of the loop: before batch `batch` of epoch `epoch`, perhaps before its iterator is created."""

    epoch: int
    batch: int
    state: dict[str, Any] = field(repr=False)
    is_between: bool = False


def seed(number: int) -> None:
    """Seed the three global generators."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def safe(state: Any) -> Any:
    """Return `state` as it comes out of a checkpoint that was loaded with ``weights_only=True``."""
    file = io.BytesIO()
    torch.save(pack_blobs({"state": state}), file)
    file.seek(0)
    return unpack_blobs(torch.load(file, weights_only=True))["state"]


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


def loop(loader: Any, *, num_epochs: int, draw: Callable[[], Any] = own_draws) -> list[Event]:
    """Return the events of a loop without a tracker: its batches, and the loop's own draws after each."""
    events = []
    for epoch in range(num_epochs):
        start_epoch(loader, epoch)
        events += [(epoch, k, listed(batch), draw()) for k, batch in enumerate(loader)]
    return events


def follow(
    loader: DataLoader[Any], state: Any = None, *, strict: bool = True, **arguments: Any
) -> tuple[TrackedLoader, DataLoader[Any]]:
    """Return a tracker of `loader`, into which `state` was loaded, and the copy that it follows."""
    tracker = TrackedLoader(loader, exactness=Exactness(strict=strict), **arguments)
    copy = tracker.copy_of(loader)
    if state is not None:
        tracker.load_state_dict(state)
    return tracker, copy


def tracked_loop(
    loader: DataLoader[Any],
    *,
    num_epochs: int,
    resume: Saved | None = None,
    save: bool | int = False,
    draw: Callable[[], Any] = own_draws,
) -> tuple[list[Event], list[Saved]]:
    """Return the events of a tracked loop, and, with `save`, its state at every position, or at that one."""
    tracker, tracked = follow(loader)
    events: list[Event] = []
    saved: list[Saved] = []
    places = itertools.count()

    def is_due() -> bool:
        return save if isinstance(save, bool) else next(places) == save

    for epoch in range(resume.epoch if resume else 0, num_epochs):
        start_epoch(tracked, epoch)
        k = 0
        if resume is not None:
            k, state = resume.batch, safe(resume.state)
            tracker.load_state_dict(state["loader"])
            before, iterator = rng_state(), None if resume.is_between else iter(tracked)
            assert rng_state() == before, "a resume draws nothing"
            assert tracker.held.load_state_dict(state["held"]) == []
            set_rng_state(state["rng"])
            iterator = iter(tracked) if iterator is None else iterator
            resume = None
        else:
            iterator = iter(tracked)
        while True:
            if is_due():
                saved.append(Saved(epoch=epoch, batch=k, state=full_state(tracker, k)))
            batch = next(iterator, None)
            if batch is None:
                break
            events.append((epoch, k, listed(batch), draw()))
            k += 1
        if is_due():
            state = full_state(tracker, None)
            saved.append(Saved(epoch=epoch + 1, batch=0, state=state, is_between=True))
    tracker.close_workers()
    return events, saved


def full_state(tracker: TrackedLoader, consumed: int | None) -> dict[str, Any]:
    """Return the content of a checkpoint of the loop."""
    tracker.held.search()  # for objects created since, as the Trainer's autosaves do
    return {"loader": tracker.state_dict(consumed), "rng": rng_state(), "held": tracker.held.state_dict()}


def after(events: list[Event], saved: Saved) -> list[Event]:
    """Return the events from a position on."""
    return [event for event in events if event[:2] >= (saved.epoch, saved.batch)]


def assert_every_cut(
    make: Make,
    *,
    num_epochs: int = 2,
    cuts: Collection[int] | slice = slice(None),
    draw: Callable[[], Any] = own_draws,
    number: int = 1,
    again: int | None = None,
) -> None:
    """Assert that a tracked loop changes nothing, and that the rest after each cut is that of the uninterrupted loop.

    `again` is the number of batches after which the resumed loop is saved, and resumed, a second time.
    """
    seed(number)
    reference = loop(make(), num_epochs=num_epochs, draw=draw)
    seed(number)
    events, saved = tracked_loop(make(), num_epochs=num_epochs, save=True, draw=draw)
    assert events == reference
    for k, cut in enumerate(saved[cuts] if isinstance(cuts, slice) else [saved[k] for k in cuts if k < len(saved)]):
        seed(100 + k)
        save = False if again is None else again
        resumed, later = tracked_loop(make(), num_epochs=num_epochs, resume=cut, save=save, draw=draw)
        assert resumed == after(reference, cut), f"cut before batch {cut.batch} of epoch {cut.epoch}"
        for second in later:
            seed(200 + k)
            twice, _ = tracked_loop(make(), num_epochs=num_epochs, resume=second, draw=draw)
            assert twice == after(reference, second), f"cuts {cut.epoch, cut.batch}, {second.epoch, second.batch}"


def plain_of(loader: ResumableDataLoader[Any]) -> DataLoader[Any]:
    """Return torch's own loader with the same arguments."""
    plain = DataLoader.__new__(DataLoader)
    vars(plain).update(loader.__getstate__())
    return plain


def resumable_loop(
    loader: Any, *, num_epochs: int, saved: list[Any] | None = None, epoch_of: Callable[[Any, int], Any] | None = None
) -> list[Event]:
    """Return a loop's events from the loader's epoch on; put pairs of position and state into `saved`."""
    events: list[Event] = []
    if saved is not None:
        saved.append((0, json.loads(json.dumps(loader.state_dict()))))
    for epoch in range(loader.epoch, num_epochs):
        start_epoch(loader, epoch)
        batches: Iterator[Any] = iter(loader) if epoch_of is None else epoch_of(loader, epoch)
        for batch in batches:
            events.append((epoch, 0, listed(batch), *own_draws()))
            if saved is not None:
                saved.append((len(events), json.loads(json.dumps(loader.state_dict()))))
        if saved is not None:
            saved.append((len(events), json.loads(json.dumps(loader.state_dict()))))
    return events


def assert_resumable(
    make: Make,
    *,
    num_epochs: int = 2,
    cuts: slice = slice(None),
    epoch_of: Callable[[Any, int], Any] | None = None,
    is_plain: bool = True,
) -> None:
    """Assert that a loop over a new `ResumableDataLoader` continues exactly from the state at each position.

    With `is_plain`, the uninterrupted loop is also compared with a loop over torch's own loader.
    """
    saved: list[Any] = []
    seed(1)
    reference = resumable_loop(make(), num_epochs=num_epochs, saved=saved, epoch_of=epoch_of)
    assert reference
    if is_plain:
        seed(1)
        assert resumable_loop_of_plain(make(), num_epochs) == reference
    for number, (position, state) in enumerate(saved[cuts]):
        seed(100 + number)
        loader = make()
        loader.load_state_dict(state)
        assert same(loader.state_dict(), state)
        assert resumable_loop(loader, num_epochs=num_epochs, epoch_of=epoch_of) == reference[position:], position


def resumable_loop_of_plain(loader: ResumableDataLoader[Any], num_epochs: int) -> list[Event]:
    """Return the events of the same loop over torch's own loader."""
    return [(epoch, 0, batch, *draws) for epoch, _, batch, draws in loop(plain_of(loader), num_epochs=num_epochs)]


def same(one: Any, other: Any) -> bool:
    """Return whether two states are equal."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
