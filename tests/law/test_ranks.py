"""Several ranks: each resumes with its own generators, loaders, metrics, logged values, and gradients."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from lightning_faulttolerant.testing import KillAt, NotTheSame, assert_resumes_exactly
from lightning_faulttolerant.testing.exactness import Runs
from lightning_faulttolerant.trainer.resume import resume
from tests.data_sets import HoldingDataset, NoisyDataset
from tests.kills import StopInValidation
from tests.rank_runs import (
    SECONDS,
    RankNet,
    assert_ranks_continue,
    assert_ranks_resume,
    for_ranks,
    of_first_rank,
    rank_fit,
    shuffled,
)
from tests.runs import FIRST_EPOCH, LATER_EPOCH, Cut, make_trainer

pytestmark = for_ranks


@pytest.mark.parametrize(
    ("num_workers", "cut", "rank"),
    [pytest.param(0, FIRST_EPOCH, 0, marks=pytest.mark.slow), (2, LATER_EPOCH, 1)],
    ids=["no-workers", "workers"],
)
def test_two_ranks_continue(num_workers: int, cut: Cut, rank: int) -> None:
    """With one rank killed, both resume exactly at their positions."""
    assert_ranks_continue(cut, rank=rank, train=lambda: shuffled(num_workers))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "cut", "rank"),
    [(0, LATER_EPOCH, 2), (2, FIRST_EPOCH, None)],
    ids=["one-is-killed", "all-are-killed"],
)
def test_three_ranks_continue(num_workers: int, cut: Cut, rank: int | None) -> None:
    """Three ranks continue exactly if one or all are killed."""
    assert_ranks_continue(cut, rank=rank, num_ranks=3, train=lambda: shuffled(num_workers, num_ranks=3))


@pytest.mark.slow
def test_broken_again_and_again() -> None:
    """A run continues that is killed on one rank after the other, in a batch, after one, and in validation."""
    faults = [
        KillAt(2, rank=1),
        KillAt(1, hook="end", rank=0),
        KillAt(4, hook="validation", rank=1),
        [KillAt(1, rank=0), KillAt(1, rank=1)],
    ]
    costs = assert_ranks_resume(rank_fit(2), faults)
    assert len(costs) == 4


def test_killed_in_validation() -> None:
    """Autosaves by time come inside a validation run, too, before batches that both ranks reach."""
    fit = rank_fit(2, validation=lambda: DataLoader(NoisyDataset(40), batch_size=4))
    fault, options = StopInValidation(3, signal.SIGKILL), {"train_time_interval": timedelta(microseconds=1)}
    [cost] = assert_resumes_exactly(fit, [fault], options=options, num_ranks=2, timeout_seconds=SECONDS)
    assert (cost.num_batches_twice, cost.num_validation_batches_twice) == (0, 1)


# State that each rank has for itself.


class OwnBuffers(RankNet):
    """Keeps its loss in a buffer that DDP's forward passes do not synchronize; its next loss depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.detach()
        return loss


@pytest.mark.parametrize(
    "part",
    [
        None,
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("rng", "held", "loaders", "metrics", "results")),
    ],
)
def test_state_of_rank_0_is_not_the_same(part: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with a part of rank 0's state, or all of it, on all ranks differs."""
    monkeypatch.setattr(resume, "state_of", of_first_rank(part))
    with pytest.raises(NotTheSame, match=r"of the interrupted run|A restart began"):
        assert_ranks_continue(
            FIRST_EPOCH, rank=0, train=lambda: DataLoader(HoldingByRank(), batch_size=4, shuffle=True)
        )


class HoldingByRank(HoldingDataset):
    """Draws from its own generators; the higher the rank, the more."""

    def __init__(self) -> None:
        super().__init__(64)

    def __getitem__(self, index: int) -> Tensor:
        for _ in range(torch.distributed.get_rank()):
            self.python.gauss(0, 1), self.numpy.normal(), self.legacy.randn(), torch.randn(1, generator=self.torch)
        return super().__getitem__(index)


@pytest.mark.slow
def test_windows_of_three_batches() -> None:
    """With accumulation, workers, norms per rank, and an unsynchronized buffer, the ranks resume exactly."""
    cut = Cut(kill=13, every=1, continues_at=(1, 3))
    assert_ranks_continue(
        cut, accumulate_grad_batches=3, train=lambda: shuffled(2), module=OwnBuffers, limit_val_batches=0
    )


# Data that differs between ranks.


class OwnRows(NoisyDataset):
    """Has a number of rows that depends on the rank: 32 on rank 0, 40 on rank 1."""

    def __init__(self) -> None:
        super().__init__(32 + 8 * torch.distributed.get_rank())
        self.rows += torch.distributed.get_rank()


class OwnOrder(Sampler[list[int]]):
    """Yields larger batches on rank 1, in an order from Python's generator, from which rank 1 has drawn more."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.length = len(data)  # type: ignore[arg-type]
        self.size = 3 + torch.distributed.get_rank()

    def __len__(self) -> int:
        return self.length // self.size

    def __iter__(self) -> Iterator[list[int]]:
        order = random.sample(range(self.length), self.length)
        return (order[i * self.size : (i + 1) * self.size] for i in range(len(self)))


class Shards(IterableDataset[Tensor]):
    """Every rank and each of its workers reads its own lines."""

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        number, num_workers = (info.id, info.num_workers) if info else (0, 1)
        num_ranks, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        for line in range(rank * num_workers + number, 64, num_ranks * num_workers):
            yield torch.full((4,), float(line)) / 64 + 0.1 * torch.randn(4)


class OwnData(RankNet):
    """Creates its loader when the ranks are known, another one on each rank."""

    def train_dataloader(self) -> DataLoader[Any]:
        data = OwnRows()
        return DataLoader(data, batch_sampler=OwnOrder(data), num_workers=2)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(OwnRows(), batch_size=4)


class OwnShards(RankNet):
    """Streams."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Shards(), batch_size=4)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Shards(), batch_size=4, num_workers=2)


@pytest.mark.slow
@pytest.mark.parametrize("module", [OwnData, OwnShards])
@pytest.mark.parametrize("cut", [FIRST_EPOCH, LATER_EPOCH], ids=["first", "later"])
def test_each_rank_has_its_own_data(module: type[LightningModule], cut: Cut) -> None:
    """Data sets, samplers, batch sizes, and streams may differ between ranks."""

    def fit(callbacks: list[Any], directory: Path) -> Any:
        trainer = make_trainer(
            callbacks,
            directory,
            devices=2,
            strategy="ddp",
            use_distributed_sampler=False,
            limit_train_batches=8,
            limit_val_batches=2,
        )
        trainer.fit(module())
        return trainer

    [cost] = assert_ranks_resume(fit, [KillAt(cut.kill, rank=1)], every=cut.every)
    assert (cost.epoch, cost.batch) == cut.continues_at


@pytest.mark.slow
def test_callbacks_of_each_rank() -> None:
    """An EarlyStopping that monitors a value of each rank keeps its state."""
    assert_ranks_continue(
        LATER_EPOCH, rank=0, users=lambda: [EarlyStopping("val_loss", patience=5), EarlyStopping("synced_val_loss")]
    )


@pytest.mark.slow
def test_other_seed_of_the_distributed_sampler_is_refused(tmp_path: Path) -> None:
    """A restart with another Lightning seed, which would shuffle differently from the next epoch, is refused."""

    def fit(callbacks: list[Any], directory: Path) -> Any:
        number = len(list(directory.parent.glob("run-*-rank-0.jsonl")))
        os.environ["PL_GLOBAL_SEED"] = str(number)
        return rank_fit(2)(callbacks, directory)

    runs = Runs(fit, tmp_path, {"every_n_train_steps": 8}, SECONDS, num_ranks=2)
    assert runs.start("run", [KillAt(9, rank=1)], seed=1, with_callback=True).exit_code < 0
    resumed = runs.start("run", [], seed=2, with_callback=True)
    assert resumed.exit_code == 1, resumed.output
    assert "sampler_seed: 0 when it was saved, 1 now" in resumed.output


class DriftingNet(RankNet):
    """Changes a weight on one rank only."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.layers[0].weight.data[0, 0] += 0.01 * self.global_rank
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_weights_that_drift_apart_are_refused() -> None:
    """A checkpoint has one copy of the weights: weights that differ between ranks are an error that names them."""
    with pytest.raises(NotTheSame, match=r"NotExactError: The ranks hold different values of layers\.0\.weight\."):
        assert_ranks_resume(rank_fit(2, module=DriftingNet), [KillAt(3)])
