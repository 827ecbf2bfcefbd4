"""The law for this package's streaming data sets: order and augmentations continue, and no sample is read twice."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant import ResumableDataLoader, StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.streaming.format.writer import MDSWriter
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.kills import StopInValidation
from tests.law import elastic_runs
from tests.law.elastic_runs import Leg, Plan
from tests.rank_runs import for_ranks
from tests.runs import (
    LATER_EPOCH,
    LATER_SHORT_EPOCH,
    SHORT_CUTS,
    Cut,
    Net,
    assert_continues,
    each_cut,
    each_num_workers,
    fit_net,
)

pytestmark = [
    *for_ranks,
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
]


def write_samples(directory: str, num_samples: int) -> None:
    """Write a data set in small shards."""
    with MDSWriter(out=directory, columns={"n": "int"}, size_limit=128) as writer:
        for n in range(num_samples):
            writer.write({"n": n})


@pytest.fixture(scope="module")
def data() -> Iterator[str]:
    """A data set of 32 samples in small shards."""
    with tempfile.TemporaryDirectory() as directory:
        write_samples(directory, 32)
        yield directory


@pytest.fixture(scope="module")
def short_data() -> Iterator[str]:
    """A data set of 20 samples: 5 batches, for loaders without workers."""
    with tempfile.TemporaryDirectory() as directory:
        write_samples(directory, 20)
        yield directory


class Augmented(StreamingDataset):
    """Returns a row with noise for each sample."""

    def __getitem__(self, at: Any) -> Tensor:
        n = super().__getitem__(at)["n"]
        return torch.linspace(-1, 1, 4) * (n / 16 - 1) + 0.1 * (random.gauss(0, 1) + float(torch.randn(())))


class Wrapped(IterableDataset[Tensor]):
    """Passes on the samples of a streaming data set, with noise."""

    def __init__(self, inner: StreamingDataset) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Tensor]:
        for row in self.inner:
            yield row + 0.1 * torch.randn(4)


def loader(data: str, **arguments: Any) -> StreamingDataLoader:
    """Return a shuffled loader of batches of 4."""
    dataset = Augmented(data, shuffle=True, batch_size=4, shuffle_block_size=16)
    return StreamingDataLoader(dataset, batch_size=4, **arguments)


@each_num_workers
@each_cut
def test_a_streaming_loader_continues(data: str, short_data: str, cut: Cut, num_workers: int) -> None:
    """A streaming loader continues in its epoch's order, with its workers' augmentations, also for validation."""
    directory = data if num_workers else short_data
    assert_continues(
        cut if num_workers else SHORT_CUTS[cut],
        train=lambda: loader(directory, num_workers=num_workers),
        validation=lambda: loader(directory, num_workers=num_workers),
        limit_val_batches=2,
    )


WAYS: dict[str, Callable[[str], DataLoader[Any]]] = {
    "a plain loader": lambda data: DataLoader(Augmented(data, shuffle=True, batch_size=4), batch_size=4, num_workers=2),
    "persistent workers": lambda data: loader(data, num_workers=2, persistent_workers=True),
    "passed on by another data set": lambda data: DataLoader(Wrapped(Augmented(data, shuffle=True)), batch_size=4),
}


@pytest.mark.parametrize("way", WAYS)
def test_other_loaders_continue(data: str, short_data: str, way: str) -> None:
    """A data set continues in any loader, and under another data set that reads it."""
    has_workers = way != "passed on by another data set"
    cut, directory = (LATER_EPOCH, data) if has_workers else (LATER_SHORT_EPOCH, short_data)
    assert_continues(cut, train=lambda: WAYS[way](directory))


def test_a_state_at_the_end_of_an_epoch(short_data: str) -> None:
    """Killed before the first batch of the third epoch, the run continues with that epoch's order."""
    cut = Cut(kill=10, every=5, continues_at=(2, 0))
    assert_continues(cut, train=lambda: loader(short_data), validation=lambda: loader(short_data), max_epochs=3)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["one loader", "two loaders", "passed on by two data sets"])
def test_training_and_validation_may_share_a_data_set(data: str, way: str) -> None:
    """Training and validation take turns with its epochs, also in a run that resumes at the start of one.

    A validation run is repeated: inside it, the data set can't tell which of its epochs comes next.
    """

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        dataset = Augmented(data, shuffle=True, batch_size=4)
        loaders: dict[str, list[DataLoader[Any]]] = {
            "one loader": [StreamingDataLoader(dataset, batch_size=4, num_workers=2)] * 2,
            "two loaders": [DataLoader(dataset, batch_size=4, num_workers=num) for num in (2, 0)],
            "passed on by two data sets": [DataLoader(Wrapped(dataset), batch_size=4) for _ in range(2)],
        }
        train, validation = loaders[way]
        return fit_net(callbacks, directory, train=train, validation=validation, max_epochs=3)

    options = {"every_n_train_steps": 1, "overhead_budget": 1.0}  # a capture before each validation batch
    costs = assert_resumes_exactly(fit, [KillAt(8), KillAt(5), StopInValidation(3)], options=options)
    assert [(cost.epoch, cost.batch) for cost in costs] == [(1, 0), (1, 5), (1, 8)]
    assert costs[-1].num_validation_batches_twice == 4


def test_two_ranks_continue(data: str) -> None:
    """Each rank continues in its own part, with its own augmentations."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        dataset = Augmented(data, shuffle=True, batch_size=2)
        train = StreamingDataLoader(dataset, batch_size=2)
        return fit_net(callbacks, directory, train=train, module=Net(), devices=2, strategy="ddp")

    [cost] = assert_resumes_exactly(fit, [KillAt(11)], options={"every_n_train_steps": 1}, num_ranks=2)
    assert (cost.epoch, cost.batch) == (1, 3)


class Indexed(StreamingDataset):
    """A sample is its number, and a row with noise."""

    def __getitem__(self, at: Any) -> Any:
        n = super().__getitem__(at)["n"]
        return n, torch.full((4,), n / 32) + torch.rand(4)


def global_steps(done: list[elastic_runs.Entries], epoch: int) -> list[list[int]]:
    """Return the samples of each global step of an epoch, over all legs."""
    found = []
    for entries in done:
        steps = entries.batches(epoch)
        found += [sorted(index for entry in step for index in entry["index"]) for step in steps]
    return found


@pytest.mark.parametrize(
    "legs",
    [
        pytest.param([(2, 2, 0), (1, 4, 2)], id="two ranks, then one with workers"),
        pytest.param([(1, 4, 0), (2, 2, 0), (1, 4, 2), (1, 4, 0)], id="many", marks=pytest.mark.slow),
    ],
)
def test_other_numbers_of_ranks_and_workers_continue(data: str, legs: list[tuple[int, int, int]]) -> None:
    """At an equal global batch each global step has the samples of the uninterrupted run."""
    plan = Plan(
        options={"elastic": True},
        make_dataset=lambda length: Indexed(data, shuffle=length > 7),
        make_loader=lambda dataset, **arguments: StreamingDataLoader(dataset, **{**arguments, "shuffle": None}),
    )
    kills = [(0, 3), (0, 6), (1, 2)]
    made = [
        Leg(num_ranks=ranks, batch_size=size, num_workers=workers, kill=kill)
        for (ranks, size, workers), kill in zip(legs, [*kills[: len(legs) - 1], None], strict=True)
    ]
    done = elastic_runs.run(plan, *made)
    order = StreamingDataLoader(StreamingDataset(data, shuffle=True), batch_size=4)
    for epoch in range(2):
        assert global_steps(done, epoch) == [sorted(batch["n"].tolist()) for batch in order]


def test_another_number_of_workers_continues(data: str) -> None:
    """The same ranks continue with two workers after none, if that is allowed."""
    plan = Plan(
        options={"elastic": True},
        make_dataset=lambda length: Indexed(data, shuffle=length > 7),
        make_loader=lambda dataset, **arguments: StreamingDataLoader(dataset, **{**arguments, "shuffle": None}),
    )
    done = elastic_runs.run(
        plan, Leg(num_ranks=1, batch_size=4, kill=(0, 3)), Leg(num_ranks=1, batch_size=4, num_workers=2)
    )
    order = StreamingDataLoader(StreamingDataset(data, shuffle=True), batch_size=4)
    for epoch in range(2):
        assert global_steps(done, epoch) == [sorted(batch["n"].tolist()) for batch in order]


@pytest.mark.slow
def test_other_ranks_continue_with_a_data_set_that_is_shared(data: str) -> None:
    """Other ranks continue a shared data set, even at its epoch's start, before a validation with another epoch."""
    made: dict[int, Indexed] = {}

    def run(*legs: Leg) -> list[list[list[int]]]:
        plan = Plan(
            options={"elastic": True},
            make_dataset=lambda _: made.setdefault(os.getpid(), Indexed(data, shuffle=True)),
            make_loader=lambda dataset, **arguments: StreamingDataLoader(dataset, **{**arguments, "shuffle": None}),
        )
        done = elastic_runs.run(plan, *legs)
        return [global_steps(done, epoch) for epoch in range(2)]

    alone = Leg(num_ranks=1, batch_size=4)
    assert run(Leg(num_ranks=2, batch_size=2, kill=(1, 0)), alone) == run(alone)


class Read(StreamingDataset):
    """Records which samples are read."""

    def __getitem__(self, at: Any) -> Tensor:
        self.read = [*getattr(self, "read", []), at]
        return torch.tensor([super().__getitem__(at)["n"], torch.rand(()).item()])


def test_a_resume_reads_no_sample_again(data: str) -> None:
    """In a custom loop, the samples of the consumed batches are not read, and the next epochs follow."""

    def made() -> tuple[Read, ResumableDataLoader[Any]]:
        dataset = Read(data, shuffle=True)
        return dataset, ResumableDataLoader(dataset, batch_size=4)

    def epochs(loader: ResumableDataLoader[Any]) -> list[Any]:
        return [(epoch, batch.tolist()) for epoch in range(loader.epoch, 3) for batch in loader]

    whole, loader = made()
    reference = [(0, batch.tolist()) for _, batch in zip(range(5), loader, strict=False)]
    state = loader.state_dict()
    resumed_dataset, resumed = made()
    resumed.load_state_dict(state)
    continued = made()[1]
    continued.load_state_dict(state)
    rest = epochs(resumed)
    assert epochs(continued) == rest
    assert sorted(n for epoch, batch in reference + rest[:3] for n, _ in batch) == list(range(32))
    assert len(rest) == 3 + 2 * 8
    assert resumed_dataset.read[:12] == [int(n) for _, batch in rest[:3] for n, _ in batch]
    assert not set(resumed_dataset.read[:12]) & set(whole.read[:20])
