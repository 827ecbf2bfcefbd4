"""ZeRO 1 and 2: a killed run continues exactly, also inside an accumulation window of DeepSpeed's engine.

They run in an environment that has DeepSpeed (``make deepspeed``).
"""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("deepspeed")

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.hook_saves import assert_continues_from, saver
from tests.kills import StopInValidation
from tests.law import elastic_runs
from tests.rank_runs import SECONDS, RankNet, Slowly, for_ranks, rank_fit, shuffled
from tests.with_deepspeed.on_cpu import DeepSpeedOnCpu

pytestmark = [
    *for_ranks,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class LayerNormNet(RankNet):
    """Normalizes in a way that CPUs support in bfloat16, too. One layer is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.layers[0].bias.requires_grad = False


def fit_in_windows(stage: int, **arguments: Any) -> Callable[[list[Callback], Path], Trainer]:
    """Return a fit with windows of three batches. DeepSpeed continues a window over the end of an epoch of eight."""
    strategy = DeepSpeedOnCpu(stage=stage)
    return rank_fit(2, strategy=strategy, accumulate_grad_batches=3, gradient_clip_val=0.5, **arguments)


@pytest.mark.parametrize(("stage", "precision"), [(1, "32-true"), (2, "32-true"), (1, "bf16-mixed"), (2, "bf16-mixed")])
def test_killed_inside_a_window(stage: int, precision: str) -> None:
    """A run continues inside a window of the engine, with the gradients that it has added up so far.

    Lightning counts a step after the third and sixth batch of an epoch. In the second epoch, these are inside a window
    of the engine: it has trained eight batches before.
    """
    module = RankNet if precision == "32-true" else LayerNormNet
    fit = fit_in_windows(stage, module=module, precision=precision, limit_val_batches=1)
    first, second = assert_resumes_exactly(
        fit,
        [KillAt(12, rank=1), KillAt(4, rank=0)],
        options={"every_n_train_steps": 1},
        num_ranks=2,
        timeout_seconds=SECONDS * 5,
    )
    assert (first.epoch, first.batch, second.epoch, second.batch) == (1, 3, 1, 6)


def test_stopped_in_validation() -> None:
    """A stop in a validation run, with a window open around it, is saved there, and the run continues exactly."""
    fit = fit_in_windows(
        2,
        val_check_interval=4,
        max_epochs=1,
        validation=lambda: DataLoader(NoisyDataset(120), batch_size=4),
        users=lambda: [Slowly()],
    )
    [cost] = assert_resumes_exactly(
        fit,
        [StopInValidation(3, signal.SIGTERM)],
        options={"train_time_interval": timedelta(hours=1)},
        num_ranks=2,
        timeout_seconds=SECONDS * 5,
    )
    assert (cost.exit_code, cost.batch, cost.num_validation_batches_twice) == (143, 4, 0)


class FullDiskOfOneRank(Callback):
    """Lets the writes of rank 1 in the second save of the engine fail."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1 or trainer.global_rank != 1:
            return
        engine = trainer.strategy.model.checkpoint_engine
        save, failures = engine.save, [OSError(errno.ENOSPC, "No space left on device")]

        def fail_once(*arguments: Any, **named: Any) -> None:
            if failures:
                raise failures.pop()
            save(*arguments, **named)

        engine.save = fail_once


def test_disk_that_is_full_for_one_rank() -> None:
    """A rank that can't write must not leave the others in the engine's barrier. The next save succeeds."""
    fit = rank_fit(2, strategy=DeepSpeedOnCpu(stage=1), users=lambda: [FullDiskOfOneRank()], max_epochs=1)
    [cost] = assert_resumes_exactly(
        fit, [KillAt(4, rank=0)], options={"every_n_train_steps": 1}, num_ranks=2, timeout_seconds=SECONDS * 5
    )
    assert cost.batch == 4


def test_checkpoints_that_others_ask_for_continue() -> None:
    """A checkpoint that a callback saves in a hook resumes exactly, too."""
    hook = "on_train_batch_end"
    assert_continues_from(
        hook,
        users=lambda: [saver(hook, 1)],
        module=RankNet,
        train=shuffled,
        num_ranks=2,
        devices=2,
        strategy=DeepSpeedOnCpu(stage=2),
    )


def test_another_number_of_ranks_is_refused() -> None:
    """The engine does not split the state of an optimizer again, so a different number of ranks must be an error."""
    plan = elastic_runs.Plan(options={"elastic": True}, arguments={"limit_val_batches": 0})
    two, one = ({"num_ranks": n, "arguments": {"strategy": DeepSpeedOnCpu(stage=1)}} for n in (2, 1))
    elastic_runs.run(
        plan, elastic_runs.Leg(**two, kill=(1, 2)), elastic_runs.Leg(**one), error="under DeepSpeed: its engine"
    )
