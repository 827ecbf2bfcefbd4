"""The law for attributes of callbacks, optimizers, globals, and loggers that training changes."""

from __future__ import annotations

import itertools
import math
import random
import signal
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from lightning_faulttolerant.testing.exactness import NotTheSame, Runs
from tests.data_sets import NoisyDataset
from tests.faults import EVERY_STEP
from tests.object_states import (
    EDGE,
    FIRST_EPOCH,
    LATER_EPOCH,
    RAISED,
    RAISED_AT_EDGE,
    RAISED_BEHIND,
    STOPPED,
    Own,
    assert_carried,
    each_cut,
    each_fault,
)
from tests.runs import Net, each_num_workers, fit_net
from tests.stateful_objects import AveragedWeights

# Callbacks without a ``state_dict``.


@each_fault
def test_averaged_weights(fault: Callback) -> None:
    """A moving average in a callback continues."""
    assert_carried(fault, users=lambda: [AveragedWeights()])


class SlowsDown(Callback):
    """Lowers the learning rate with its own count of batches."""

    def __init__(self) -> None:
        self.num_batches = 0

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.num_batches += 1
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.05 / self.num_batches


class Clips(Callback):
    """Changes an attribute of the Trainer after some batches."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.gradient_clip_val = 0.01


class Dims(Callback):
    """Changes the module's dropout from outside."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.layers[2].p = max(0.0, pl_module.layers[2].p - 0.03)


class Patience(Callback):
    """Keeps the best loss, and reacts if there is none for a while."""

    def __init__(self) -> None:
        self.best = math.inf
        self.waited = 0
        self.history: dict[int, float] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        loss = float(outputs["loss"])
        self.history[trainer.global_step] = loss
        self.best, self.waited = (loss, 0) if loss < self.best else (self.best, self.waited + 1)
        if self.waited >= 2:
            self.waited = 0
            trainer.optimizers[0].param_groups[0]["weight_decay"] += 0.1
        pl_module.log("best", self.best)
        pl_module.log("waited", float(self.waited))
        pl_module.log("mean_so_far", statistics.fmean(self.history.values()))


@pytest.mark.parametrize("user", [SlowsDown, Clips, Dims, Patience])
@each_cut
def test_callback_without_a_state(fault: Callback, user: type[Callback]) -> None:
    """A callback's counts, and its changes to other objects, continue."""
    clip = {"gradient_clip_val": 5.0} if user is Clips else {}
    assert_carried(fault, users=lambda: [user()], **clip)


class EndsEarlier(Callback):
    """Lowers the number of epochs once it has seen one of them."""

    def on_train_epoch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.fit_loop.max_epochs = 2


@each_cut
def test_callback_that_lowers_the_number_of_epochs(fault: Callback) -> None:
    """A training that a callback has shortened stays as short when it continues."""
    assert_carried(fault, users=lambda: [EndsEarlier()], max_epochs=3)


class HasHistory(Net):
    """Has a list that a callback appends to, and reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = [1.0]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * statistics.fmean(self.history)


class Watches(Callback):
    """Refers to a module, and to a list in it."""

    def __init__(self, module: HasHistory) -> None:
        self.module = module
        self.history = module.history

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.history.append(float(outputs["loss"]))
        pl_module.log("is_the_module", float(self.module is pl_module))
        pl_module.log("is_the_list", float(self.history is self.module.history))
        pl_module.log("weight", self.module.layers[0].weight.sum())


@each_cut
def test_callback_that_refers_to_the_module(fault: Callback) -> None:
    """A callback's module is the trained one, and its list is the module's."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        module = HasHistory()
        return fit_net([Watches(module), *callbacks], directory, module=module)

    assert_resumes_exactly(fit, [fault], options=EVERY_STEP)


def test_two_callbacks_of_one_class() -> None:
    """Two callbacks of one class each have their own state."""

    class Scales(Callback):
        def __init__(self, factor: float) -> None:
            self.factor = factor
            self.value = 1.0

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            self.value *= self.factor
            pl_module.log(f"value_{self.factor}", self.value)
            with torch.no_grad():
                pl_module.layers[3].bias.add_(self.value / 100)

    assert_carried(KillAt(3), users=lambda: [Scales(0.9), Scales(1.1)])


# Optimizers and schedules.


class SAM(torch.optim.Optimizer):
    """Does sharpness-aware minimization around another optimizer, like its best-known implementation."""

    def __init__(self, params: Any, base_optimizer: type[torch.optim.Optimizer], rho: float = 0.05, **kwargs: Any):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self) -> None:
        """Climb to where the loss is high."""
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["old_p"] = p.data.clone()
                    p.add_(p.grad * (group["rho"] / (norm + 1e-12)))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Step from the original weights."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do both steps, with a closure that computes the gradients again."""
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss

    def load_state_dict(self, state_dict: Any) -> None:
        """Load, and let the other optimizer share the groups."""
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Sharpness(Net):
    """Trains with SAM around SGD with momentum."""

    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)


class ManualSharpness(Sharpness):
    """Does the same by manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.layers(batch).square().mean()
            self.manual_backward(loss)
            return loss

        self.log("loss", optimizer.step(closure=closure))


class Lookahead(torch.optim.SGD):
    """Keeps slow weights and a count outside its ``state``, and returns to the slow weights every sixth step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.counter = 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    def step(self, closure: Any = None) -> Any:
        """Step, and look ahead."""
        loss = super().step(closure)
        self.counter += 1
        if self.counter % 6 == 0:
            with torch.no_grad():
                for group, slow in zip(self.param_groups, self.slow, strict=True):
                    for fast, weight in zip(group["params"], slow, strict=True):
                        weight.lerp_(fast, 0.5)
                        fast.copy_(weight)
        return loss


class LooksAhead(Net):
    """Trains with Lookahead."""

    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters())


class Schedule:
    """A warm-up and a cosine, with manual calls."""

    def __init__(self, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
        self.optimizer = optimizer
        self.num_steps = num_steps
        self.current = 0
        self.rates: list[float] = []

    def step(self) -> float:
        """Set the next rate, and return it."""
        self.current += 1
        rate = 0.1 * min(1.0, self.current / 4) * (1 + math.cos(math.pi * self.current / self.num_steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.rates.append(rate)
        return rate


class OwnSchedule(Net):
    """Calls its schedule itself."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        self.schedule = Schedule(optimizer, 10)
        return optimizer

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("rate", self.schedule.step())
        self.log("sum_of_rates", sum(self.schedule.rates))
        return super().training_step(batch, batch_idx)


class Alternates(Net):
    """Alternates manually between two optimizers by a counter, and averages the losses of both."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.turn = 0
        self.averages = [1.0, 1.0]

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.layers[0].parameters(), lr=0.01)
        return [first, torch.optim.SGD(self.layers[3].parameters(), lr=0.05, momentum=0.9)]

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()[self.turn % 2]
        loss = self.layers(batch).square().mean() / self.averages[self.turn % 2]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.averages[self.turn % 2] = 0.8 * self.averages[self.turn % 2] + 0.2 * loss.item()
        self.turn += 1 + (loss.item() > 1)
        self.log("loss", loss)


@pytest.mark.parametrize("module", [Sharpness, ManualSharpness, LooksAhead, OwnSchedule, Alternates])
@each_cut
def test_optimizer_with_its_own_state(fault: Callback, module: type[LightningModule]) -> None:
    """State of an optimizer or a schedule outside its state dict continues."""
    assert_carried(fault, module=module)


@pytest.mark.parametrize("fault", [STOPPED, RAISED, RAISED_AT_EDGE])
def test_optimizer_with_its_own_state_after_other_faults(fault: Callback) -> None:
    """The same holds after a stop and after an error."""
    assert_carried(fault, module=LooksAhead)


# Globals of modules, and attributes of classes.

RNG = np.random.default_rng(0)
PYTHON_RNG = random.Random(0)
TORCH_RNG = torch.Generator().manual_seed(0)
LOSSES: list[float] = []
CONFIG = {"scale": 1.0}
num_steps = 0


class DrawsFromModule(NoisyDataset):
    """Draws from generators at the top of this module."""

    def __getitem__(self, index: int) -> Tensor:
        drawn = float(RNG.normal()) + PYTHON_RNG.gauss(0, 1) + float(torch.randn((), generator=TORCH_RNG))
        return super().__getitem__(index) + 0.1 * drawn


@each_num_workers
@each_cut
def test_generators_of_a_module_in_the_data_set(fault: Callback, num_workers: int) -> None:
    """Generators at the top of a module that a data set draws from continue."""
    assert_carried(
        fault, train=lambda: DataLoader(DrawsFromModule(20), batch_size=4, shuffle=True, num_workers=num_workers)
    )


class DrawsInStep(Own):
    """Draws in its step from generators at the top of this module."""

    def factor(self, loss: Tensor) -> float:
        return 1 + float(RNG.random()) + PYTHON_RNG.random() + float(torch.rand((), generator=TORCH_RNG))


class ClassGenerator(Own):
    """Its generators are class attributes."""

    python: ClassVar[random.Random] = random.Random(0)
    others: ClassVar[dict[str, Any]] = {"numpy": np.random.default_rng(0)}

    def factor(self, loss: Tensor) -> float:
        return 1 + self.python.random() + float(self.others["numpy"].random())


class ClassCounter(Own):
    """Counts in a class attribute."""

    steps = 0

    def factor(self, loss: Tensor) -> float:
        ClassCounter.steps += 1
        return self.steps / 10


class ClassHistory(Own):
    """All instances share a list."""

    history: ClassVar[list[float]] = []

    def factor(self, loss: Tensor) -> float:
        self.history.append(loss.item())
        return statistics.fmean(self.history)


class GlobalHistory(Own):
    """Keeps its losses, a setting, and a count at the top of this module."""

    def factor(self, loss: Tensor) -> float:
        global num_steps
        num_steps += 1
        LOSSES.append(loss.item())
        CONFIG["scale"] *= 0.9
        return statistics.fmean(LOSSES) * CONFIG["scale"] + num_steps / 10


def counted(function: Callable[..., float]) -> Callable[..., float]:
    """Count the calls of a function in a closure and on the function."""
    count = 0

    def wrapper(*arguments: Any) -> float:
        nonlocal count
        count += 1
        wrapper.calls = getattr(wrapper, "calls", 0) + 1  # type: ignore[attr-defined]
        return function(*arguments) * (count + wrapper.calls)  # type: ignore[attr-defined]

    return wrapper


class ClosureCounter(Own):
    """Counts in the closure of a function that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.weigh = counted(lambda value: value / 10)

    def factor(self, loss: Tensor) -> float:
        return self.weigh(loss.item())


@pytest.mark.parametrize("module", [DrawsInStep, ClassGenerator, ClassCounter, ClassHistory, GlobalHistory])
@each_cut
def test_globals_and_class_attributes(fault: Callback, module: type[LightningModule]) -> None:
    """State at the top of a module or on a class continues."""
    assert_carried(fault, module=module)


class Iterators(Own):
    """Counts, and alternates, with iterators of the standard library."""

    def __init__(self) -> None:
        super().__init__()
        self.count = itertools.count(1)
        self.turns = itertools.cycle([1.0, 2.0, 3.0, 4.0])
        self.left = iter(range(10, 30))

    def factor(self, loss: Tensor) -> float:
        return next(self.count) * next(self.turns) + next(self.left)


@each_cut
def test_iterators(fault: Callback) -> None:
    """Iterators in a module are named, since they can't be copied."""
    with pytest.raises(NotTheSame) as raised:
        assert_carried(fault, module=Iterators)
    for name in ("count", "turns", "left"):
        assert f"module.{name}: an iterator" in str(raised.value)


@each_cut
def test_closure_that_counts(fault: Callback) -> None:
    """State in a function's closure continues."""
    assert_carried(fault, module=ClosureCounter)


@pytest.mark.parametrize("fault", [STOPPED, RAISED, RAISED_BEHIND])
def test_globals_after_other_faults(fault: Callback) -> None:
    """The same holds after a stop and after an error."""
    assert_carried(fault, module=GlobalHistory)


class Keeper:
    """Holds a metric at a depth that a module does not see."""

    def __init__(self) -> None:
        self.metrics = {"train": {"mean": MeanMetric()}}


class KeepsMetric(Own):
    """Weights its loss by a mean in a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()

    def factor(self, loss: Tensor) -> Any:
        metric = self.keeper.metrics["train"]["mean"]
        metric.update(loss.detach())
        return 1 + metric.compute()


@each_cut
def test_metric_that_an_object_keeps(fault: Callback) -> None:
    """A metric in a plain object continues."""
    assert_carried(fault, module=KeepsMetric)


# Loggers.


class MemoryLogger(Logger):
    """Keeps everything that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[tuple[int | None, dict[str, float]]] = []
        self.best: dict[str, float] = {}

    @property
    def name(self) -> str:
        """Return its name."""
        return "memory"

    @property
    def version(self) -> int:
        """Return its version."""
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Ignore them."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep them."""
        self.history.append((step, dict(metrics)))
        for name, value in metrics.items():
            self.best[name] = min(value, self.best.get(name, math.inf))


class LooksBack(Own):
    """Reads the values in its logger."""

    def factor(self, loss: Tensor) -> float:
        history = self.logger.history
        losses = [metrics["loss"] for _, metrics in history if "loss" in metrics]
        self.log("num_logged", float(len(history)))
        self.log("best_so_far", self.logger.best.get("loss", 0.0))
        return 1 + statistics.fmean(losses or [0.0])


@pytest.mark.parametrize("fault", [FIRST_EPOCH, LATER_EPOCH, EDGE, STOPPED, RAISED])
def test_logger_in_memory(fault: Callback) -> None:
    """A logger's values in memory continue."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=LooksBack(), logger=MemoryLogger())

    assert_resumes_exactly(fit, [fault], options=EVERY_STEP)


# Values that the user changes between two starts.


@dataclass
class Settings:
    """Settings beside a count."""

    scale: float
    names: list[str]
    count: int = 0


class Configured(Net):
    """Reads its settings from a file, and records those that it was trained with."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.scale = float((directory / "scale").read_text())
        self.settings = Settings(scale=self.scale, names=[f"scale {self.scale}"])
        self.count = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.count += 1
        self.settings.count += 1
        with (self.directory / "seen").open("a") as file:
            seen = self.scale, self.settings.scale, self.settings.names[0], self.count, self.settings.count
            print(*seen, sep=",", file=file)
        return super().training_step(batch, batch_idx) * self.scale


@pytest.mark.parametrize("kill", [3, 5, 8])
def test_new_constants_stand(tmp_path: Path, kill: int) -> None:
    """A constant that was edited between two starts has its new value, and counts of training continue."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=Configured(tmp_path))

    runs = Runs(fit, tmp_path, dict(EVERY_STEP), 120.0)
    (tmp_path / "scale").write_text("1.0")
    assert runs.start("run", [KillAt(kill)], seed=1, with_callback=True).exit_code == -signal.SIGKILL
    before = (tmp_path / "seen").read_text().splitlines()
    (tmp_path / "scale").write_text("2.0")
    outcome = runs.start("run", [], seed=2, with_callback=True)
    assert outcome.exit_code == 0, outcome.output
    after = (tmp_path / "seen").read_text().splitlines()[len(before) :]
    assert [line.rsplit(",", 2)[0] for line in before] == ["1.0,1.0,scale 1.0"] * kill
    assert [line.rsplit(",", 2)[0] for line in after] == ["2.0,2.0,scale 2.0"] * (10 - kill)
    assert [line.split(",")[3:] for line in before + after] == [[f"{n}", f"{n}"] for n in range(1, 11)]
