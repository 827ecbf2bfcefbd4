"""The law under every kind of fault, each followed by the same command again."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import Interruption, assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.faults import ALWAYS, EVERY_STEP, RaiseIn
from tests.processes import Script
from tests.runs import Net, fit_eight, fit_net

CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


def fit_with(num_workers: int, **arguments: Any) -> Any:
    """Return a fit whose training loader has `num_workers` workers."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        loader = DataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=num_workers)
        return fit_net(callbacks, directory, train=loader, **arguments)

    return fit


def costs(fit: Any, *faults: Any, **arguments: Any) -> list[Interruption]:
    """Compare the runs, and return the cost of each fault."""
    return assert_resumes_exactly(fit, faults, **arguments)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_stop_signal_costs_no_batch(signum: int, to_group: bool, num_workers: int) -> None:
    """A stop finishes and saves the current batch; no batch runs twice, and the exit code names the signal."""
    [cost] = costs(
        fit_with(num_workers),
        KillAt(4, signum=signum, to_group=to_group),
        options={"train_time_interval": timedelta(hours=1)},
    )
    assert cost == Interruption(exit_code=CODES[signum], epoch=0, batch=5, num_batches_twice=0, num_batches_kept=5)


def test_stop_signal_inside_an_accumulation_window_costs_no_batch() -> None:
    """Gradients of the open accumulation window are part of the state."""
    [cost] = costs(fit_with(0, accumulate_grad_batches=3), KillAt(3, signum=signal.SIGTERM), options=EVERY_STEP)
    assert (cost.exit_code, cost.batch, cost.num_batches_twice) == (143, 4, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_stop_signal_in_validation_costs_no_batch(num_workers: int) -> None:
    """A validation run that is stopped is run whole by the restart, and has the same results."""
    fit = fit_with(num_workers, val_check_interval=4)
    [cost] = costs(fit, KillAt(3, signum=signal.SIGTERM, hook="validation"), options=EVERY_STEP)
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (143, 0, 4, 0)


def test_stop_signal_in_validation_at_the_end_of_an_epoch_costs_no_batch() -> None:
    """The same holds for a validation run at the end of an epoch."""
    [cost] = costs(fit_with(2), KillAt(7, signum=signal.SIGTERM, hook="validation"), options=EVERY_STEP)
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (143, 0, 8, 0)


@pytest.mark.parametrize(
    ("hook", "batch", "twice"),
    [
        ("on_train_batch_start", 5, 1),
        ("on_before_backward", 5, 1),
        ("on_after_backward", 5, 1),
        ("on_before_optimizer_step", 5, 1),
        ("on_train_batch_end", 5, 1),
        ("on_validation_batch_end", 7, 0),
        ("on_train_epoch_end", 7, 0),
    ],
)
def test_exception_in_a_hook_costs_no_finished_batch(hook: str, batch: int, twice: int) -> None:
    """Before the optimizer step a capture saves the finished batches; after it the last autosave serves."""
    [cost] = costs(fit_with(0), RaiseIn(hook, batch), options=ALWAYS)
    assert cost.exit_code == 1
    assert cost.num_batches_twice == twice


def test_capture_saves_what_lies_between_autosaves() -> None:
    """With captures at every step, an exception costs no finished batch, even long after the last autosave."""
    options = {**ALWAYS, "every_n_train_steps": 100}
    [cost] = costs(fit_with(2), RaiseIn("on_after_backward", 6), options=options)
    assert (cost.batch, cost.num_batches_twice) == (6, 1)


def test_without_a_capture_the_last_autosave_stays() -> None:
    """An exception after the optimizer step saves nothing: the restart repeats the batches since the autosave."""
    options = {**ALWAYS, "every_n_train_steps": 3}
    [cost] = costs(fit_with(2), RaiseIn("on_train_batch_end", 5), options=options)
    assert (cost.batch, cost.num_batches_twice) == (3, 3)


class FailingNet(Net):
    """Raises at `where`, once, in the process that starts with the file `armed`."""

    def __init__(self, where: str, armed: Path) -> None:
        super().__init__()
        self.where = where
        self.armed = armed

    def strike(self, where: str) -> None:
        if where == self.where and self.armed.exists() and self.trainer.global_step >= 4:
            self.armed.unlink()
            raise ZeroDivisionError(f"in {where}")

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.strike("training_step")
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.strike("optimizer_step")
        super().optimizer_step(*args, **kwargs)
        self.strike("after optimizer_step")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.strike("validation_step")


class Arm(Callback):
    """Arms a run's module or data set, which then fails."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        (Path(trainer.default_root_dir) / "armed").touch()


@pytest.mark.parametrize("where", ["training_step", "optimizer_step", "after optimizer_step", "validation_step"])
def test_exception_in_the_module(where: str) -> None:
    """Wherever in a step the module raises, the restart continues exactly."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        module = FailingNet(where, directory / "armed")
        return fit_eight(callbacks, directory, module=module, val_check_interval=4)

    [cost] = costs(fit, Arm(), options=ALWAYS)
    assert cost.num_batches_twice <= 1


class FailingDataset(NoisyDataset):
    """Fails in a worker once, if the run is armed: raises, kills its process, or hangs."""

    def __init__(self, how: str, armed: Path) -> None:
        super().__init__()
        self.how = how
        self.armed = armed
        self.fetched = 0

    def __getitem__(self, index: int) -> Tensor:
        self.fetched += 1
        worker = get_worker_info()
        if worker is not None and worker.id == 1 and self.fetched == 13 and self.armed.exists():
            self.armed.unlink()
            self.fail()
        return super().__getitem__(index)

    def fail(self) -> None:
        if self.how == "raises":
            raise ZeroDivisionError("in a worker")
        if self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "sleeps":
            time.sleep(1000)
        while True:
            torch.rand(1)


def fit_failing(how: str) -> Any:
    """Return a fit whose data set fails in worker 1."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        data = FailingDataset(how, directory / "armed")
        return fit_net(callbacks, directory, train=DataLoader(data, batch_size=4, shuffle=True, num_workers=2))

    return fit


@pytest.mark.parametrize("how", ["raises", "dies"])
def test_failing_worker(how: str) -> None:
    """An exception in a worker, or its death, ends the run; the restart continues exactly."""
    [cost] = costs(fit_failing(how), Arm(), options=ALWAYS)
    assert cost.exit_code == 1


@pytest.mark.parametrize("how", ["sleeps", "spins"])
def test_stop_signal_while_a_worker_is_stuck(how: str) -> None:
    """The state of the boundary is saved though the next batch never comes, and the process ends in time."""

    class StopLater(Arm):
        """Stops when the main process has waited for some time for the batch that never comes."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 7:
                threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    began = time.monotonic()
    [cost] = costs(fit_failing(how), StopLater(), options={"every_n_train_steps": 100}, timeout_seconds=40)
    assert cost.exit_code == 143
    assert (cost.batch, cost.num_batches_twice) == (7, 0)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("how", ["sleeps", "spins"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_process_with_a_stuck_worker_is_gone_in_time(signum: int, how: str, tmp_path: Path) -> None:
    """A process group that gets the signal while a worker hangs ends within 5 seconds."""
    script = Script(lambda: fit_failing(how)([FaultTolerance(**EVERY_STEP), Arm()], tmp_path))
    while (tmp_path / "armed").exists() or not any(tmp_path.rglob("*-batch=7.ckpt")):
        time.sleep(0.01)
    began = time.monotonic()
    os.killpg(script.process_id, signum)
    ended = script.wait()
    assert time.monotonic() - began < 5
    assert ended.exit_code == CODES[signum]
