"""The law for this package's samplers: they resume exactly without calls of ``advance``."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant import InterruptibleDistributedSampler, InterruptibleSampler, ResumableDataLoader
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.law import elastic_runs
from tests.law.elastic_runs import Leg, Plan, Rows, consumed
from tests.rank_runs import for_ranks
from tests.runs import FIRST_EPOCH, LATER_EPOCH, Cut, Net, assert_continues, assert_exact, each_cut, fit_net

pytestmark = for_ranks

NUM_MANY = 10**10


class Many(Dataset[Tensor]):
    """Has too many samples for a permutation in memory; each draws."""

    def __len__(self) -> int:
        return NUM_MANY

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / NUM_MANY) + 0.1 * torch.randn(4)


class Advances(Callback):
    """Counts the consumed batches in the sampler, which is not needed."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Tensor, batch_idx: int
    ) -> None:
        self.sampler.advance(len(batch))


@each_cut
@pytest.mark.parametrize("kind", ["single, torch", "distributed, feistel, 2 workers"])
def test_a_sampler_continues_without_advance(cut: Cut, kind: str) -> None:
    """A sampler continues in its epoch's order, new in each epoch, with the draws of workers and of training."""

    def train() -> DataLoader[Any]:
        if kind.startswith("single"):
            return DataLoader(NoisyDataset(), batch_size=4, sampler=InterruptibleSampler(range(32), seed=3))
        sampler = InterruptibleDistributedSampler(range(32), order="feistel")
        return DataLoader(NoisyDataset(), batch_size=4, sampler=sampler, num_workers=2)

    assert_continues(cut, train=train)


@pytest.mark.parametrize("cut", [FIRST_EPOCH, LATER_EPOCH], ids=["first-epoch", "later-epoch"])
def test_a_user_who_calls_advance_all_the_same_breaks_nothing(cut: Cut) -> None:
    """The sampler's own count continues, too, so that its epochs start and end as in the uninterrupted run."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        sampler = InterruptibleSampler(range(32))
        loader = DataLoader(NoisyDataset(), batch_size=4, sampler=sampler)
        trainer = fit_net([Advances(sampler), *callbacks], directory, train=loader, max_epochs=3)
        assert (sampler.epoch, sampler.progress) == (2, 32)
        return trainer

    [cost] = assert_resumes_exactly(fit, [KillAt(cut.kill)], options={"every_n_train_steps": cut.every})
    assert (cost.epoch, cost.batch) == cut.continues_at


@pytest.mark.parametrize("worker_rng", ["capture", "per_sample"])
def test_ten_billion_samples_resume_at_once(worker_rng: str) -> None:
    """A computed order starts at the position itself, without a permutation or any earlier index."""

    def train() -> DataLoader[Any]:
        sampler = InterruptibleDistributedSampler(NUM_MANY, order="feistel")
        return DataLoader(Many(), batch_size=4, sampler=sampler, num_workers=2)

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, train=train(), max_epochs=2, limit_train_batches=5)

    options = {"every_n_train_steps": 1, "worker_rng": worker_rng}
    costs = assert_resumes_exactly(fit, [KillAt(3), KillAt(4)], options=options)
    assert [(cost.epoch, cost.batch) for cost in costs] == [(0, 3), (1, 2)]


def test_per_sample_continues() -> None:
    """With ``per_sample``, samples keep their seeds after a resume in the middle of the second epoch."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        loader = DataLoader(NoisyDataset(), batch_size=4, sampler=InterruptibleSampler(range(32)))
        return fit_net(callbacks, directory, train=loader)

    options = {"every_n_train_steps": 1, "worker_rng": "per_sample"}
    [cost] = assert_resumes_exactly(fit, [KillAt(13)], options=options)
    assert (cost.epoch, cost.batch) == (1, 5)


def two_ranks(callbacks: list[Callback], directory: Path, *, order: str) -> Trainer:
    """Fit on two ranks."""
    sampler = InterruptibleDistributedSampler(range(32), order=order)  # type: ignore[arg-type]
    loader = DataLoader(NoisyDataset(), batch_size=2, sampler=sampler)
    arguments = {"devices": 2, "strategy": "ddp"}
    return fit_net(callbacks, directory, train=loader, module=Net(), **arguments)


def test_two_ranks_continue() -> None:
    """Each rank continues in its own part of the order; the sampler, created before the ranks, finds them."""
    fit = functools.partial(two_ranks, order="feistel")
    [cost] = assert_resumes_exactly(fit, [KillAt(11)], options={"every_n_train_steps": 1}, num_ranks=2)
    assert (cost.epoch, cost.batch) == (1, 3)


@pytest.mark.parametrize("order", ["torch", "feistel"])
def test_another_number_of_ranks_continues(order: str) -> None:
    """With `elastic=True` one rank finishes the epoch of two: together they have each sample once."""
    options = {"elastic": True, "worker_rng": "per_sample"}
    plan = Plan(length=24, max_epochs=2, options=options)
    sampler = {"shuffle": False, "sampler": InterruptibleDistributedSampler(24, order=order)}  # type: ignore[arg-type]
    legs = [Leg(num_ranks=2, batch_size=2, kill=(0, 2), loader=sampler), Leg(num_ranks=1, batch_size=4, loader=sampler)]
    done = elastic_runs.run(plan, *legs)
    whole = InterruptibleDistributedSampler(24, order=order)  # type: ignore[arg-type]
    for epoch in range(2):
        whole.set_epoch(epoch)
        assert consumed(done, epoch) == list(whole)
    assert len(Rows(24)) == 24


def test_a_resumable_loader_is_followed_as_any_other() -> None:
    """FaultTolerance keeps the Trainer's position in a ResumableDataLoader, and its rules apply."""
    assert_continues(
        LATER_EPOCH,
        train=lambda: ResumableDataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=2),
        validation=lambda: ResumableDataLoader(NoisyDataset(8), batch_size=4),
    )


def test_a_run_killed_at_the_start_of_an_epoch_and_again_in_it_continues_exactly() -> None:
    """An order without drawn batches resumes, and its random state is known to the next process, too."""
    costs = assert_exact(list, KillAt(5), KillAt(3), KillAt(1))
    assert [(cost.epoch, cost.batch) for cost in costs] == [(1, 0), (1, 3), (1, 4)]
