"""A plain training loop without Lightning: its events, and its state at each position."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state.packing import pack_blobs, unpack_blobs
from lightning_faulttolerant.state.rng import rng_state, set_rng_state

Event = tuple[int, int, Any, float, float]


class Drawing(Dataset[Tensor]):
    """Each sample holds its index and draws from every generator, global and held, including cached Gaussians."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.python = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.lazy: random.Random | None = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Tensor:
        if self.lazy is None:
            self.lazy = random.Random(7)
        own = [self.python.gauss(0, 1), self.numpy.normal(), self.lazy.random()]
        common = [random.gauss(0, 1), np.random.randn(), torch.randn(()).item()]
        return torch.tensor([float(index), *own, *common], dtype=torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint of the loop: before batch `batch` of epoch `epoch`."""

    epoch: int
    batch: int
    state: dict[str, Any]


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
    """Tell a sampler its epoch, as a loop does."""
    set_epoch = getattr(loader.sampler, "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)


def loop(loader: DataLoader[Any], *, num_epochs: int) -> list[Event]:
    """Return the events of a loop without a tracker: its batches, and the loop's own draws after each."""
    events = []
    for epoch in range(num_epochs):
        start_epoch(loader, epoch)
        events += [(epoch, k, listed(batch), *own_draws()) for k, batch in enumerate(loader)]
    return events


def tracked_loop(
    loader: DataLoader[Any],
    *,
    num_epochs: int,
    resume: Saved | None = None,
    save: bool = False,
) -> tuple[list[Event], list[Saved]]:
    """Return the events of a tracked loop, and, with `save`, its state at every position."""
    tracker = TrackedLoader(loader)
    tracked = tracker.copy_of(loader)
    events: list[Event] = []
    saved: list[Saved] = []
    for epoch in range(resume.epoch if resume else 0, num_epochs):
        start_epoch(tracked, epoch)
        k = 0
        if resume is not None:
            k, state = resume.batch, safe(resume.state)
            tracker.load_state_dict(state["loader"])
            iterator = iter(tracked)
            assert tracker.held.load_state_dict(state["held"]) == []
            set_rng_state(state["rng"])
            resume = None
        else:
            iterator = iter(tracked)
        while True:
            if save:
                saved.append(Saved(epoch=epoch, batch=k, state=full_state(tracker, k)))
            batch = next(iterator, None)
            if batch is None:
                break
            events.append((epoch, k, listed(batch), *own_draws()))
            k += 1
    return events, saved


def full_state(tracker: TrackedLoader, consumed: int | None) -> dict[str, Any]:
    """Return the content of a checkpoint of the loop."""
    tracker.held.search()  # for objects created since, as the Trainer's autosaves do
    return {"loader": tracker.state_dict(consumed), "rng": rng_state(), "held": tracker.held.state_dict()}


def own_draws() -> tuple[float, float]:
    """Draw in the loop, as dropout does."""
    return random.gauss(0, 1), torch.rand(()).item()


def listed(batch: Any) -> Any:
    """Return a batch as plain values."""
    return batch.tolist() if isinstance(batch, Tensor) else batch


def after(events: list[Event], saved: Saved) -> list[Event]:
    """Return the events from a position on."""
    return [event for event in events if event[:2] >= (saved.epoch, saved.batch)]
