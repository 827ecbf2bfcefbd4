"""The law for StochasticWeightAveraging, which swaps the scheduler and adds an epoch."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, StochasticWeightAveraging

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt
from lightning_faulttolerant.trainer.adapters.compat import WEIGHT_AVERAGING
from lightning_faulttolerant.trainer.steps.digests import digest
from tests.callbacks import swa
from tests.modules import NormNet, PlainNet
from tests.processes import run
from tests.runs import RaiseAt, assert_exact, fit_net

EVERY_STEP = {"every_n_train_steps": 1}
ALWAYS = {"overhead_budget": 1.0}
NUM_BATCHES = 5


class UnscheduledNet(NormNet):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.02)


# 4 epochs: the second, third, and fourth are averaged; with batch norm a fifth only updates the norm.
@pytest.mark.parametrize(
    ("module", "kill"),
    [*((NormNet, kill) for kill in (3, 5, 6, 12, 15, 19)), *((kind, 12) for kind in (PlainNet, UnscheduledNet))],
)
def test_stochastic_weight_averaging(module: Any, kill: int) -> None:
    """Killed before, during, or between the averaged epochs, averages and schedule continue."""
    [cost] = assert_exact(swa, KillAt(kill), module=module, max_epochs=4)
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


@pytest.mark.parametrize("strategy", ["cos", "linear"])
@pytest.mark.parametrize("kill", [21, 22, 24])
def test_stochastic_weight_averaging_in_the_epoch_that_updates_batch_norm(kill: int, strategy: str) -> None:
    """Killed in the last epoch, which trains nothing, the running statistics continue."""
    options = {"train_time_interval": timedelta(microseconds=1)}  # it takes no optimizer step
    [cost] = assert_exact(lambda: swa(strategy), KillAt(kill), module=NormNet, max_epochs=4, options=options)
    assert (cost.epoch, cost.batch) == divmod(kill, NUM_BATCHES)


def test_stochastic_weight_averaging_beside_a_rate_that_others_change() -> None:
    """Restoring its scheduler does not set a learning rate, since other code has changed the rate since."""

    def lower(trainer: Trainer, *_: Any) -> None:
        trainer.optimizers[0].param_groups[0]["lr"] *= 0.9

    def users() -> list[Callback]:
        average = StochasticWeightAveraging([0.05], swa_epoch_start=2, annealing_epochs=0)
        return [average, LambdaCallback(on_train_batch_end=lower)]

    assert_exact(users, KillAt(12), module=NormNet, max_epochs=4)


def test_stochastic_weight_averaging_beside_accumulation_by_epoch() -> None:
    """The factor that it restores at the end is that of the epoch, not the trainer's."""
    users = lambda: [GradientAccumulationScheduler({0: 1, 3: 2}), *swa()]  # noqa: E731
    options = {"train_time_interval": timedelta(microseconds=1)}
    [cost] = assert_exact(users, KillAt(22), module=NormNet, max_epochs=4, options=options)
    assert (cost.epoch, cost.batch) == (4, 2)


@pytest.mark.parametrize("kill", [4, 9, 24])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_stochastic_weight_averaging_in_a_validation_run(signum: int, kill: int) -> None:
    """Killed or stopped in a validation run before, during, or after the averaging, it continues."""
    options = {**ALWAYS, "train_time_interval": timedelta(microseconds=1)}
    fault = KillAt(kill, hook="validation", signum=signum)
    [cost] = assert_exact(swa, fault, module=NormNet, max_epochs=4, options=options)
    assert (cost.epoch, cost.batch) == (kill // NUM_BATCHES, 5)  # all batches of the epoch are done


@pytest.mark.parametrize("epoch", [1, 2, 4])
@pytest.mark.parametrize("hook", ["on_train_epoch_start", "on_train_epoch_end"])
def test_exception_beside_stochastic_weight_averaging(hook: str, epoch: int) -> None:
    """A save after an exception at the edges of its epochs has the state from before the edge."""
    [cost] = assert_exact(swa, RaiseAt(hook, epoch), module=NormNet, max_epochs=4, options=ALWAYS)
    assert cost.exit_code == 1


def end_of(trainer: Trainer) -> list[str]:
    """Return the final state of a fit with averages."""
    loop = [trainer.max_epochs, trainer.current_epoch, trainer.accumulate_grad_batches, trainer.should_stop]
    [config] = trainer.lr_scheduler_configs
    average, module = trainer.callbacks[0], trainer.lightning_module
    states = [module.state_dict(), average.state_dict(), config.scheduler.state_dict()]
    return [
        str(loop),
        *map(digest, states),
        str([child.momentum for child in module.layers if hasattr(child, "momentum")]),
    ]


def test_finished_run_with_averages_runs_again(tmp_path: Path) -> None:
    """A finished fit with averaged weights that is started again trains nothing and stays the same."""

    def main() -> None:
        trainer = fit_net([*swa(), FaultTolerance()], tmp_path, module=NormNet(), max_epochs=3)
        with (tmp_path / "ends.txt").open("a") as file:
            file.write(f"{end_of(trainer)}\n")
        os.kill(os.getpid(), signal.SIGKILL)

    for seed in (1, 2):
        run(main, seed=seed)
    first, again = (tmp_path / "ends.txt").read_text().splitlines()
    assert first == again
    assert first.startswith("['[3, 4, 1, False]'")


def weight_averaging() -> list[Callback]:
    """Return a WeightAveraging, if Lightning has it."""
    return [kind() for kind in WEIGHT_AVERAGING]


@pytest.mark.parametrize("users", [swa, *[weight_averaging] * len(WEIGHT_AVERAGING)])
def test_finished_run_with_averages_does_not_grow(users: Any, tmp_path: Path) -> None:
    """More epochs after a fit that ended with averaged weights are refused: the trained ones are gone."""

    def main(max_epochs: int) -> None:
        fit_net([*users(), FaultTolerance()], tmp_path, module=PlainNet(), max_epochs=max_epochs)
        os.kill(os.getpid(), signal.SIGKILL)

    assert run(lambda: main(3)).exit_code == -signal.SIGKILL
    ended = run(lambda: main(5))
    assert ended.exit_code == 1
    assert "averaged weights in place of the trained ones" in ended.output
