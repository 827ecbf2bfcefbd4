"""The law for attributes of a module that training changes, and that no ``state_dict`` contains."""

from __future__ import annotations

import math
import signal
import statistics
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.faults import EVERY_STEP, RaiseIn
from tests.object_states import (
    EDGE,
    FIRST_EPOCH,
    IN_VALIDATION,
    LATER_EPOCH,
    RAISED_AT_EDGE,
    STOPPED,
    assert_carried,
    assert_carried_and_needed,
    each_cut,
    each_fault,
    slowly,
)
from tests.runs import Net, fit_net
from tests.stateful_objects import (
    ATTRIBUTES_THAT_CHANGE,
    OBJECTS_OF_A_MODULE,
    TENSORS_OF_A_MODULE,
    VALUES_OF_A_MODULE,
    Deletes,
    HasMeters,
    InPlaceAverage,
    MadeInTrainStart,
    MemoryBank,
    Outputs,
    SharesLater,
    Together,
    Tree,
    WarmUp,
)


@each_fault
def test_outputs_of_an_epoch(fault: Callback) -> None:
    """All outputs of an epoch's steps exist at its end."""
    assert_carried(fault, module=Outputs)


class NewOutputs(Net):
    """Starts each epoch with a new list."""

    def on_train_epoch_start(self) -> None:
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_mean", torch.stack(self.outputs).mean())


@pytest.mark.parametrize("fault", [slowly(FIRST_EPOCH), LATER_EPOCH, slowly(EDGE), slowly(IN_VALIDATION)])
def test_new_list_in_each_epoch(fault: Callback) -> None:
    """An attribute that is only created at an epoch's start exists in the middle of one."""
    assert_carried(fault, module=NewOutputs)


class ValidationOutputs(Net):
    """Keeps its validation losses over the epochs, and slows down with the best."""

    def __init__(self) -> None:
        super().__init__()
        self.validation_losses: list[float] = []
        self.current: list[Tensor] = []
        self.best = math.inf

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if math.isinf(self.best) else loss * self.best

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.current.append(self.layers(batch).square().mean())

    def on_validation_epoch_end(self) -> None:
        self.validation_losses.append(float(torch.stack(self.current).mean()))
        self.current.clear()
        self.best = min(self.validation_losses)
        self.log("num_validated", float(len(self.validation_losses)))


@pytest.mark.parametrize("fault", [slowly(FIRST_EPOCH), LATER_EPOCH, slowly(EDGE), slowly(IN_VALIDATION)])
def test_validation_losses(fault: Callback) -> None:
    """Losses of validation runs, including the sanity check's, are kept; none is counted twice."""
    assert_carried(fault, module=ValidationOutputs)


class Appends(Net):
    """Appends to a list that was passed to it."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = losses

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss


class LogsMean(Callback):
    """Logs the mean of a list that was passed to it, and clears it."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("mean_of_losses", statistics.fmean(self.losses))
        self.losses.clear()


@pytest.mark.parametrize("fault", [slowly(FIRST_EPOCH), LATER_EPOCH, slowly(EDGE), slowly(IN_VALIDATION)])
def test_list_of_module_and_callback(fault: Callback) -> None:
    """A list that a module and a callback share keeps its elements, and stays one list."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        losses: list[float] = []
        return fit_net([LogsMean(losses), *callbacks], directory, module=Appends(losses))

    assert_resumes_exactly(fit, [fault], options=EVERY_STEP)


# Modules: numbers, and counters of the standard library.


@pytest.mark.parametrize("module", [slowly(kind) for kind in VALUES_OF_A_MODULE])
def test_values_of_a_module(module: type[LightningModule]) -> None:
    """Numbers, tensors, and collections that a module changes in its step continue."""
    assert_carried_and_needed(module)


# Modules: tensors and networks that Lightning does not know.


@pytest.mark.parametrize("module", [slowly(kind) for kind in TENSORS_OF_A_MODULE])
def test_tensors_of_a_module(module: type[LightningModule]) -> None:
    """Tensors, arrays, and networks that are neither parameters nor buffers continue."""
    assert_carried_and_needed(module)


# Modules: objects of user classes.


@pytest.mark.parametrize("module", [slowly(kind) for kind in OBJECTS_OF_A_MODULE])
def test_objects_of_a_module(module: type[LightningModule]) -> None:
    """Objects of user classes continue, with the objects that they refer to."""
    assert_carried_and_needed(module)


# Modules: attributes that appear, disappear, and change their type.


class KeepsGradients(Net):
    """Keeps gradients for two batches, and lets them decay, instead of setting them to zero."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if batch_idx % 3 == 0:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        else:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)


class LogsGradients(Net):
    """Logs the gradient of the previous step where it is set to zero, and weights the loss by it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = 0.0

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = self.layers[0].weight.grad
        self.norm = 0.0 if gradient is None else float(gradient.norm())
        self.log("norm", self.norm)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + self.norm)


class ReadsOldGradients(torch.optim.SGD):
    """Takes shorter steps if the gradient of the previous step was large."""

    def step(self, closure: Any = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        before = sum(float(parameter.grad.norm()) for parameter in parameters if parameter.grad is not None)
        loss = closure()
        for parameter in parameters:
            parameter.data.sub_(parameter.grad, alpha=0.01 / (1 + before))
        return loss


class StepsByOldGradients(Net):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ReadsOldGradients(self.parameters(), lr=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("module", [KeepsGradients, LogsGradients, StepsByOldGradients])
def test_gradients_that_are_left(module: type[LightningModule]) -> None:
    """Gradients of the previous step are restored if user code reads them, even without accumulation."""
    assert_carried(KillAt(8), module=module)


@pytest.mark.parametrize("module", [slowly(kind) for kind in ATTRIBUTES_THAT_CHANGE])
def test_attributes_that_change(module: type[LightningModule]) -> None:
    """Attributes that training creates, deletes, replaces, and shares continue."""
    assert_carried_and_needed(module)


class Uncopied(WarmUp):
    """Holds objects that can't be copied, next to its counter."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.file = open(__file__)  # noqa: SIM115 - it stays open
        self.numbers = (number for number in range(3))
        self.weak = weakref.ref(self.lock)
        self.function = lambda value: value + 1
        self.mixed: dict[str, Any] = {"lock": self.lock, "count": 0}

    def factor(self, loss: Tensor) -> float:
        with self.lock:
            self.mixed["count"] += 1
        return super().factor(loss) + self.function(self.mixed["count"])


@each_cut
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_beside_what_cannot_be_copied(fault: Callback) -> None:
    """A lock, an open file, a generator, and a function are left alone; attributes next to them continue."""
    assert_carried(fault, module=Uncopied)


# Several interruptions, and saves that are not at every step.

various = pytest.mark.parametrize(
    "module",
    [
        Outputs,
        *map(slowly, (NewOutputs, InPlaceAverage, MemoryBank, HasMeters, Tree, Deletes, SharesLater, MadeInTrainStart)),
    ],
)


@various
def test_interrupted_again_and_again(module: type[LightningModule]) -> None:
    """A process that resumed saves its restored state, and its changes."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=module())

    faults = [KillAt(2), KillAt(1), KillAt(1, signum=signal.SIGTERM), RaiseIn("on_train_batch_end", 2)]
    assert_resumes_exactly(fit, faults, options=EVERY_STEP)


@various
@pytest.mark.parametrize("kill", [4, 8])
def test_saved_at_every_third_step(kill: int, module: type[LightningModule]) -> None:
    """A save contains the state at its time, not the state at the kill."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=module())

    assert_resumes_exactly(fit, [KillAt(kill)], options={"every_n_train_steps": 3})


@various
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(RaiseIn("on_after_backward", 3), id="first-epoch"),
        pytest.param(RaiseIn("on_after_backward", 8), id="later-epoch"),
    ],
)
def test_captured_and_saved_later(fault: Callback, module: type[LightningModule]) -> None:
    """A capture that an error saves is from before the failed batch, though that batch has changed the state."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=module())

    assert_resumes_exactly(fit, [fault], options={"overhead_budget": 1.0, "every_n_train_steps": 100})


# All together.


@pytest.mark.parametrize("fault", [slowly(FIRST_EPOCH), LATER_EPOCH, slowly(EDGE), STOPPED, slowly(RAISED_AT_EDGE)])
def test_all_at_once(fault: Callback) -> None:
    """The state of these modules continues when all of them are parts of one module."""
    assert_carried(fault, module=Together)
