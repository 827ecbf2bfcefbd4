"""The law of a seed for each sample: the number of workers may change between starts, and nothing else changes."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion
from torch.utils.data import DataLoader, Subset

from lightning_faulttolerant import InterruptibleSampler
from tests.laws.cuts import Cut
from tests.laws.data_sets import (
    DrawingSampler,
    HoldingDataset,
    LazyDataset,
    ManyAtOnceDataset,
    NoisyCollate,
    NoisyDataset,
    Quiet,
    Squares,
    Unsized,
)
from tests.laws.rows import Group, Row
from tests.laws.runs import Training, assert_same, refusal, whole_run

pytestmark = pytest.mark.filterwarnings("ignore:Trying to infer the .batch_size.")

Make = Callable[..., Any]


def of(dataset: Callable[[], Any], kind: Any = DataLoader, **arguments: Any) -> Make:
    """Return what makes a loader with some number of workers."""
    return lambda **workers: kind(dataset(), **{"batch_size": 4, **arguments}, **workers)


def joined(num_workers: int) -> dict[str, Any]:
    """Several loaders, some cycled; an iterable data set keeps its number of workers."""
    makes = {
        "subset": of(lambda: Subset(HoldingDataset(40), range(4, 28)), shuffle=True),
        "short": of(lambda: NoisyDataset(12), shuffle=True),
        "unsized": of(lambda: HoldingDataset(24), Unsized, shuffle=True),
    }
    return {**{name: make(num_workers=num_workers) for name, make in makes.items()}, "fixed": of(Squares)()}


ROWS: dict[str, Make] = {
    "own sampler": of(lambda: NoisyDataset(24), sampler=InterruptibleSampler(range(24))),
    "joined": joined,
    "functions": of(lambda: LazyDataset(has_attribute=True), shuffle=True, collate_fn=NoisyCollate()),
    "whole batches fetched": of(lambda: ManyAtOnceDataset(24), shuffle=True),
}


class Changing:
    """A training whose starts have one number of workers after the other."""

    def __init__(self, make: Make, *, place: str = "train", worker_rng: str = "per_sample") -> None:
        self.num_workers = 0
        makes = {"train": of(lambda: NoisyDataset(24)), "validation": of(lambda: HoldingDataset(8)), place: make}
        loaders: Any = {name: partial(self.make, each) for name, each in makes.items()}
        options = {"worker_rng": worker_rng}
        self.group = Group(rows=(Row(name="other workers", options=options, only_with=True, **loaders),))

    def make(self, make: Make) -> Any:
        """Return a loader with the number of workers of this start."""
        return make(num_workers=self.num_workers)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("joined", "own sampler"))) for name in ROWS]
)
def test_other_workers(name: str, tmp_path: Path) -> None:
    """Started with 0, 2, and 3 workers, in training and validation, a run equals that with any one number."""
    changing = Changing(ROWS[name])
    whole = whole_run(changing.group, tmp_path / "whole")
    training = Training(group=changing.group, root=tmp_path / "cut")
    cuts = [Cut(at=(0, 3)), Cut(at=(0, 5), hook="validation"), Cut(at=(1, 2), by=signal.SIGTERM), None]
    end = 0
    for number, (cut, num_workers) in enumerate(zip(cuts, (0, 2, 3, 0), strict=True)):
        changing.num_workers = num_workers
        start = training.ended(cut)
        [(begin, until)] = assert_same(whole, start, name=f"start {number}")
        assert begin <= end, f"start {number} leaves out events {end} to {begin}"
        end = until
    assert end == len(whole[0])


REFUSED: dict[str, tuple[str, Make, str]] = {
    "captured": ("train", of(Quiet, shuffle=True), "capture"),
    "drawing sampler": ("train", of(lambda: Quiet(24), sampler=DrawingSampler(24)), "per_sample"),
    "iterable": ("validation", of(Squares), "per_sample"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_workers_are_refused(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """What other workers would change is refused, also in validation."""
    place, make, worker_rng = REFUSED[name]
    changing = Changing(make, place=place, worker_rng=worker_rng)
    training = Training(group=changing.group, root=tmp_path)
    training.ended(Cut(at=(0, 3)))
    changing.num_workers = 2
    start = training.ended(code=1)
    assert refusal(start.output, tmp_path) == snapshot
