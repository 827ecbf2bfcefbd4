"""Several ranks: a checkpoint that other code saves inside a hook has the state of each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import NotTheSame
from lightning_faulttolerant.trainer.resume import resume
from tests.data_sets import NoisyDataset
from tests.hook_saves import assert_continues_from, saver, saving_module
from tests.law import elastic_runs
from tests.rank_runs import RankNet, for_ranks, of_first_rank, shuffled
from tests.sharded import ShardedNet, fsdp2

pytestmark = for_ranks
# The number of the call that saves, in the first epoch, which has 8 batches and 2 of validation.
CALLS = {
    "on_train_batch_start": 3,
    "on_train_batch_end": 3,
    "on_train_epoch_end": 0,
    "on_validation_start": 0,
    "on_validation_batch_end": 1,
    "on_validation_end": 0,
}


def assert_ranks_continue_from(
    hook: str, at: int, *, module: type[LightningModule] = RankNet, **arguments: Any
) -> None:
    """Check that two ranks obey the law when they resume from a save in the `at`-th call of a callback's `hook`."""
    assert_continues_from(
        hook,
        users=lambda: [saver(hook, at)],
        module=module,
        num_ranks=2,
        train=lambda: shuffled(2 if hook == "on_train_batch_end" else 0),
        validation=lambda: DataLoader(NoisyDataset(16), batch_size=4),
        devices=2,
        strategy="ddp",
        **arguments,
    )


@pytest.mark.slow
@pytest.mark.parametrize("hook", CALLS)
def test_saved_in_a_hook(hook: str) -> None:
    """Resumed from a checkpoint of a callback's hook, each rank continues exactly."""
    assert_ranks_continue_from(hook, CALLS[hook])


@pytest.mark.slow
def test_saved_by_the_module() -> None:
    """Resumed from a checkpoint that the module saves in its training step, each rank continues exactly."""
    assert_continues_from(
        "training_step",
        module=lambda: saving_module("training_step", 3, RankNet),
        num_ranks=2,
        train=shuffled,
        devices=2,
        strategy="ddp",
    )


def test_saved_in_a_window() -> None:
    """The same holds inside an accumulation window, where each rank has its own gradients."""
    assert_ranks_continue_from("on_train_batch_end", 3, accumulate_grad_batches=3)


class Ticks(Callback):
    """Counts batches, with another increment on each rank, and logs the count."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.count += 1 + trainer.global_rank

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.count += 1 + trainer.global_rank

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log("ticks", float(self.count))


class SeenNet(RankNet):
    """Sums its inputs in buffers inside and outside the state_dict, and logs the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("seen_beside", torch.zeros(()), persistent=False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._see(batch)
        self.log_dict({"seen": self.seen.clone(), "seen_beside": self.seen_beside.clone()})
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._see(batch)
        super().validation_step(batch, batch_idx)

    def _see(self, batch: Tensor) -> None:
        self.seen += batch.sum()
        self.seen_beside += batch.sum()


class SeenInShardsNet(SeenNet, ShardedNet):
    """Does the same in shards."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "strategy"),
    [("on_train_batch_start", "ddp"), ("on_validation_batch_end", "ddp"), ("on_validation_batch_end", fsdp2())],
)
def test_what_each_rank_keeps_is_of_the_same_instant(hook: str, strategy: Any) -> None:
    """After a save in the middle of a batch, each rank's callbacks and buffers are those of the batch's start."""
    assert_continues_from(
        hook,
        users=lambda: [Ticks(), saver(hook, CALLS[hook])],
        module=SeenNet if strategy == "ddp" else SeenInShardsNet,
        num_ranks=2,
        train=shuffled,
        validation=lambda: DataLoader(NoisyDataset(16), batch_size=4),
        devices=2,
        strategy=strategy,
    )


class DriftingNet(elastic_runs.Net):
    """Changes a weight on one rank only, in the batch of the checkpoint."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.layers[0].weight.data[0, 0] += 0.01 * self.global_rank
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_weights_that_have_drifted_apart_are_refused() -> None:
    """A resume from a checkpoint of weights that differed between ranks is refused, and they are named."""
    plan = elastic_runs.Plan(make_module=DriftingNet)
    legs = [elastic_runs.Leg(num_ranks=2, save=(0, 1)), elastic_runs.Leg(num_ranks=2)]
    elastic_runs.run(plan, *legs, error="The ranks hold different values of layers.0.weight")


@pytest.mark.slow
def test_gradients_of_rank_0_are_not_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rank 0's gradients on all ranks the run differs."""
    monkeypatch.setattr(resume, "state_of", of_first_rank("gradients"))
    with pytest.raises(NotTheSame, match="the run that continues from"):
        assert_ranks_continue_from("on_train_batch_end", 3, accumulate_grad_batches=3)
