"""Cases in which the law was broken once, each found by somebody who tried."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torchmetrics import MeanMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.wrappers import MinMaxMetric

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.faults import ALWAYS, EVERY_STEP, RaiseIn
from tests.processes import Script, run
from tests.runs import Net, fit_eight, fit_net, make_trainer
from tests.scripts import autosaves, protected, tell, told, weights


def loader(**arguments: Any) -> DataLoader[Any]:
    """Return a training loader, of 8 batches unless another data set is passed."""
    return DataLoader(**{"dataset": NoisyDataset(), "batch_size": 4, **arguments})


class BufferSampler(Sampler[int]):
    """Yields indices from random places of a buffer."""

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        buffer = list(range(8))
        for index in range(8, 40):
            place = int(torch.randint(len(buffer), ()))
            yield buffer[place]
            buffer[place] = index % 32


class ChunkSampler(Sampler[int]):
    """Draws a permutation for each chunk, every third batch."""

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, 32, 12):
            size = min(12, 32 - begin)
            yield from (begin + torch.randperm(size)).tolist()


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("cut", [3, 6, 13])
@pytest.mark.parametrize("sampler", [BufferSampler, ChunkSampler])
def test_sampler_that_draws_between_batches(sampler: type, cut: int, num_workers: int) -> None:
    """A sampler's own draws are restored, though dropout and data draw from the same generator."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        return fit_net(callbacks, directory, train=loader(sampler=sampler(), num_workers=num_workers))

    assert_resumes_exactly(fit, [KillAt(cut)], options=EVERY_STEP)


class LateDataset(NoisyDataset):
    """Creates a generator at its 18th sample."""

    def __init__(self) -> None:
        super().__init__()
        self.num_fetched = 0

    def __getitem__(self, index: int) -> Tensor:
        self.num_fetched += 1
        if self.num_fetched == 18:
            self.late = random.Random(5)
        drawn = self.late.random() if hasattr(self, "late") else 0.0
        return super().__getitem__(index) + drawn


@pytest.mark.parametrize("num_workers", [0, 1])
def test_generator_that_is_made_late(num_workers: int) -> None:
    """A generator that an object creates in the middle of an epoch belongs to the state from then on.

    Without workers the counter belongs to the user; the fit does not depend on it after the cut.
    """

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        data = LateDataset()
        if num_workers == 0:
            data.num_fetched = 0 if not (directory / "again").exists() else 100
            (directory / "again").touch()
        return fit_net(callbacks, directory, train=loader(dataset=data, num_workers=num_workers), max_epochs=1)

    assert_resumes_exactly(fit, [KillAt(6)], options=EVERY_STEP)


class ManyBoxes(NoisyDataset):
    """Holds thousands of annotations before its generator."""

    def __init__(self) -> None:
        super().__init__(20)
        self.annotations = [{"boxes": [[0.0] * 4 for _ in range(5)]} for _ in range(9000)]
        self.history = deque([random.Random(3)])
        self.rng = random.Random(5)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + self.rng.random() + self.history[0].random()


def test_generators_beside_large_data() -> None:
    """A generator is found although thousands of other objects come before it."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        return fit_net(callbacks, directory, train=loader(dataset=ManyBoxes()), max_epochs=1)

    assert_resumes_exactly(fit, [KillAt(3)], options=EVERY_STEP)


class ExtraState(Net):
    """Counts its steps in its extra state in the state_dict, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"num_steps": self.num_steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.num_steps = state["num_steps"]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.num_steps += 1
        return super().training_step(batch + self.num_steps, batch_idx)


def test_extra_state_of_a_module_after_an_exception() -> None:
    """After an exception, a module's extra state is that of the capture, not that of the exception."""
    options = {**ALWAYS, "every_n_train_steps": 100}

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        return fit_net(callbacks, directory, module=ExtraState())

    [cost] = assert_resumes_exactly(fit, [RaiseIn("on_after_backward", 3)], options=options)
    assert cost.batch == 3


class GathersGradients(Net):
    """Accumulates gradients over four batches by itself."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 4 == 0:
            optimizer.zero_grad()


def test_gradients_that_the_user_keeps() -> None:
    """If the module decides when gradients are cleared, they are part of the state."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        return fit_eight(callbacks, directory, module=GathersGradients())

    assert_resumes_exactly(fit, [KillAt(6)], options=EVERY_STEP)


class Reloads(Net):
    """Creates its training loader, and with it a generator that starts over."""

    def train_dataloader(self) -> Any:
        return loader(dataset=NoisyDataset(20), shuffle=True, generator=torch.Generator().manual_seed(3))

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(8), batch_size=4)


@pytest.mark.parametrize("cut", [3, 8, 13])
def test_loaders_are_reloaded_in_the_same_epochs(cut: int) -> None:
    """With reload_dataloaders_every_n_epochs=2, a resume in an odd epoch reloads when the whole run does."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        arguments = {"max_epochs": 5, "reload_dataloaders_every_n_epochs": 2}
        trainer = make_trainer(callbacks, directory, **arguments)
        trainer.fit(Reloads())
        return trainer

    assert_resumes_exactly(fit, [KillAt(cut)], options=EVERY_STEP)


def test_accumulation_that_a_callback_changes_is_no_other_run() -> None:
    """A GradientAccumulationScheduler does not make the run a different one."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        return fit_net([*callbacks, GradientAccumulationScheduler({0: 3, 1: 1})], directory)

    assert_resumes_exactly(fit, [KillAt(8)], options=EVERY_STEP)


class Holds(Callback):
    """Draws from its own generator in each batch."""

    def __init__(self) -> None:
        self.generator = random.Random(7)

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        with torch.no_grad():
            module.layers[0].bias += 0.01 * self.generator.random()


def test_callback_with_a_generator_after_another_number_of_callbacks() -> None:
    """A callback's generator keeps its name with one callback more or fewer before it."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        return fit_net([*callbacks, Holds()], directory)

    assert_resumes_exactly(fit, [KillAt(3)], options=EVERY_STEP)


class TurnsUnsafe(Callback):
    """Has a state that becomes unloadable in the middle of the run."""

    def __init__(self) -> None:
        self.history: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.history.append(np.mean([1.0]))

    def state_dict(self) -> dict[str, Any]:
        return {"history": list(self.history)}


def test_state_that_turns_unsafe_replaces_no_good_autosave(tmp_path: Path) -> None:
    """The first state that would not load is an error immediately, and the autosave before it stays."""
    ended = run(lambda: fit_net([protected(trust_autosaves=False), TurnsUnsafe()], tmp_path))
    assert ended.exit_code == 1
    assert "UnsafeCheckpointError" in ended.output
    assert "batch=2" in autosaves(tmp_path)[-1].name


class RaisesToo(Callback):
    """Fails in the hook in which other callbacks clean up."""

    def on_exception(self, *_: Any) -> None:
        raise RuntimeError("while cleaning up")


def test_autosaves_stay_though_another_callback_hides_the_exception(tmp_path: Path) -> None:
    """A fit that did not finish keeps its autosaves, even if the package does not see the exception."""

    def main() -> None:
        try:
            fit_net([RaisesToo(), protected(), RaiseIn("on_after_backward", 3)], tmp_path)
        except RuntimeError:
            tell(tmp_path, "caught", True)

    assert run(main).exit_code == 0
    assert told(tmp_path, "caught") == [True]
    assert autosaves(tmp_path) != []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_more_epochs_after_a_finished_fit_with_persistent_workers(num_workers: int, tmp_path: Path) -> None:
    """Persistent workers are part of the finished state: more epochs equal those of one long fit."""

    def main(name: str, max_epochs: int, kill: bool) -> None:
        train = loader(shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0)
        trainer = fit_net([protected()], tmp_path / name, train=train, max_epochs=max_epochs)
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        tell(tmp_path, name, weights(trainer))

    assert run(lambda: main("whole", 3, kill=False)).exit_code == 0
    assert run(lambda: main("grown", 2, kill=True)).exit_code == -signal.SIGKILL
    ended = run(lambda: main("grown", 3, kill=False), seed=99)
    assert ended.exit_code == 0, ended.output
    assert told(tmp_path, "grown") == told(tmp_path, "whole")


def test_more_steps_after_a_fit_that_ended_inside_an_epoch_are_refused(tmp_path: Path) -> None:
    """More steps after a fit that max_steps ended inside an epoch are refused: the rest of that epoch is lost."""

    def main(max_steps: int, kill: bool) -> None:
        fit_net([protected()], tmp_path, max_epochs=-1, max_steps=max_steps)
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)

    assert run(lambda: main(3, kill=True)).exit_code == -signal.SIGKILL
    ended = run(lambda: main(10, kill=False), seed=99)
    assert ended.exit_code == 1
    assert "NotExactError" in ended.output
    assert "middle of an epoch" in ended.output


class WrappedMetrics(Net):
    """Logs the extremes and a running mean of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.extremes = MinMaxMetric(MeanMetric())
        self.running = RunningMean(window=3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.extremes.update(loss.detach())
        self.running.update(loss.detach())
        found = {f"extreme {name}": value for name, value in self.extremes.compute().items()}
        self.log_dict({**found, "running": self.running.compute()}, on_step=True)
        return loss


@pytest.mark.parametrize("cut", [4, 8])
def test_wrappers_of_metrics(cut: int) -> None:
    """Plain attributes of torchmetrics' wrappers are part of the state."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        return fit_net(callbacks, directory, module=WrappedMetrics())

    assert_resumes_exactly(fit, [KillAt(cut)], options=EVERY_STEP)


class StuckInValidation(NoisyDataset):
    """Hangs in a worker at its second validation batch, if the run is armed."""

    def __init__(self, armed: Path) -> None:
        super().__init__(16)
        self.armed = armed

    def __getitem__(self, index: int) -> Tensor:
        if index == 8 and self.armed.exists():
            self.armed.unlink()
            time.sleep(1000)
        return super().__getitem__(index)


def test_stop_signal_while_a_validation_worker_is_stuck(tmp_path: Path) -> None:
    """A process whose validation waits for a stuck worker also ends in time, and that validation starts over."""

    class Armed(Callback):
        def on_train_start(self, *_: Any) -> None:
            (tmp_path / "armed").touch()

    def main(*callbacks: Callback) -> None:
        validation = DataLoader(StuckInValidation(tmp_path / "armed"), batch_size=4, num_workers=1)
        fit_net([protected(), *callbacks], tmp_path, validation=validation, max_epochs=1)

    script = Script(lambda: main(Armed()))
    while not any(tmp_path.rglob("*-batch=4.ckpt")) or (tmp_path / "armed").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    began = time.monotonic()
    os.kill(script.process_id, signal.SIGTERM)
    assert script.wait().exit_code == 143
    assert time.monotonic() - began < 5
    ended = run(main, seed=99)
    assert "Resumed exactly at the validation run after batch 5 of epoch 0" in ended.output
