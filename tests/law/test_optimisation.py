"""The law for optimization: schedulers, precision, teachers, limits, several optimizers, and parameter groups."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.runs import Cut, Net, assert_continues, each_short_cut, eight_batches, fit_eight, fit_net

EVERY_STEP = {"every_n_train_steps": 1}
ALWAYS = {"overhead_budget": 1.0}


class ScheduledNet(Net):
    """Gets its optimizer and scheduler from `make`."""

    def __init__(self, make: Callable[[LightningModule, Any], Any]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": self.make(self, optimizer)}


def cosine(module: LightningModule, optimizer: Any) -> Any:
    """Return a scheduler that steps per epoch."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)


def one_cycle(module: LightningModule, optimizer: Any) -> Any:
    """Return a scheduler that steps per step; the trainer gives the number of steps."""
    steps = int(module.trainer.estimated_stepping_batches)
    return {"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=steps), "interval": "step"}


def chained(module: LightningModule, optimizer: Any) -> Any:
    """Return two schedulers in sequence that step every second step."""
    kinds = torch.optim.lr_scheduler
    warmup = kinds.LinearLR(optimizer, 0.1, total_iters=4)
    decay = kinds.LambdaLR(optimizer, lambda step: 0.9**step)
    return {"scheduler": kinds.SequentialLR(optimizer, [warmup, decay], [4]), "interval": "step", "frequency": 2}


def plateau(interval: str, frequency: int) -> Callable[[LightningModule, Any], Any]:
    """Return a function that creates a scheduler that depends on a validation result."""

    def make(module: LightningModule, optimizer: Any) -> Any:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {"scheduler": scheduler, "monitor": "val_loss", "interval": interval, "frequency": frequency}

    return make


@each_short_cut
@pytest.mark.parametrize("make", [cosine, one_cycle, chained])
def test_schedulers(make: Any, cut: Cut) -> None:
    """Schedulers that step per epoch, per step, or every second step, and one sized by the trainer, continue."""
    assert_continues(cut, module=lambda: ScheduledNet(make), max_epochs=3)


@pytest.mark.parametrize("kill", [3, 4, 12])
@pytest.mark.parametrize(("interval", "frequency"), [("epoch", 1), ("epoch", 2), ("step", 4), ("step", 8)])
def test_plateau_schedulers(interval: str, frequency: int, kill: int) -> None:
    """A scheduler that depends on a validation result, per epoch or by steps, steps as often and on the same values."""
    assert_continues(
        Cut(kill=kill, every=1, continues_at=divmod(kill, 8)),
        train=eight_batches,
        module=lambda: ScheduledNet(plateau(interval, frequency)),
        val_check_interval=4,
        max_epochs=3,
    )


@pytest.mark.parametrize("kill", [3, 7])
def test_plateau_scheduler_after_a_validation_run_that_was_cut(kill: int) -> None:
    """Killed in the validation run that a plateau scheduler waits for, the restart steps it once, after that run."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        module = ScheduledNet(plateau("step", 4))
        return fit_eight(callbacks, directory, module=module, val_check_interval=4)

    for fault in (KillAt(kill, hook="validation"), KillAt(kill, hook="validation", signum=15)):
        [cost] = assert_resumes_exactly(fit, [fault], options=EVERY_STEP)
        assert (cost.epoch, cost.batch) == (0, kill + (fault._signum == 15))


@each_short_cut
def test_one_cycle_under_accumulation(cut: Cut) -> None:
    """A one-cycle scheduler sized by the trainer continues under accumulation, with half a window at the end."""
    cuts = {3: Cut(kill=3, every=1, continues_at=(0, 3)), 9: Cut(kill=8, every=1, continues_at=(1, 3))}
    assert_continues(cuts[cut.kill], module=lambda: ScheduledNet(one_cycle), accumulate_grad_batches=3)


@each_short_cut
def test_bfloat16(cut: Cut) -> None:
    """Training in mixed precision continues in it."""
    assert_continues(cut, precision="bf16-mixed", gradient_clip_val=0.5, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("kill", [3, 7])
def test_max_steps(kill: int) -> None:
    """A run limited by steps ends at the same step, in the middle of an epoch."""
    assert_continues(
        Cut(kill=kill, every=1, continues_at=divmod(kill, 5)), module=lambda: ScheduledNet(cosine), max_steps=8
    )


@pytest.mark.parametrize("kill", [3, 6])
def test_max_steps_under_accumulation(kill: int) -> None:
    """A run limited by steps that accumulates also ends at the same step."""
    assert_continues(
        Cut(kill=kill, every=1, continues_at=divmod(kill - 1, 5)), max_steps=4, max_epochs=-1, accumulate_grad_batches=2
    )


class GroupedNet(Net):
    """Has three parameter groups, each with its own arguments; one is frozen and has no gradients."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.layers[0].parameters(), "lr": 0.1, "weight_decay": 0.1},
            {"params": self.layers[1].parameters(), "lr": 0.02, "betas": (0.8, 0.9), "name": "norm"},
            {"params": self.layers[3].parameters()},
        ]
        self.layers[3].bias.requires_grad_(False)
        optimizer = torch.optim.AdamW(groups, lr=0.01, amsgrad=True)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda e: 0.5**e] * 3)]


@each_short_cut
def test_groups_of_parameters(cut: Cut) -> None:
    """Each group keeps its arguments, and each parameter its moments."""
    assert_continues(cut, module=GroupedNet)


class SecondOrderNet(Net):
    """Has an optimizer that evaluates the step repeatedly, and keeps lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3, history_size=4)


@each_short_cut
def test_optimizer_that_calls_its_closure_again(cut: Cut) -> None:
    """LBFGS continues with its history."""
    assert_continues(cut, module=SecondOrderNet)


# A teacher that follows its student.


def fail_once(trainer: Trainer, *, step: int) -> None:
    """Raise after optimizer step `step`, once, in a run that is armed."""
    armed = Path(trainer.default_root_dir) / "armed"
    if armed.exists() and trainer.global_step == step:
        armed.unlink()
        raise ZeroDivisionError("half a step")


class Teacher(Net):
    """Has a teacher without gradients as in BYOL, updated in ``training_step``; raises once at the place `fails`."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.fails = fails
        self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.strike("before")
        with torch.no_grad():
            for student, teacher in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
                teacher.data.mul_(0.9).add_(student.data, alpha=0.1)
        self.strike("after")
        loss = (self.layers(batch) - self.teacher(batch)).square().mean() + self.layers(batch).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.strike("before the step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.strike("at the end")

    def strike(self, place: str) -> None:
        if place == self.fails:
            fail_once(self.trainer, step=4)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.layers.parameters(), lr=0.01)


class Arm(Callback):
    """Arms a run, which then fails once."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        (Path(trainer.default_root_dir) / "armed").touch()


@each_short_cut
def test_teacher(cut: Cut) -> None:
    """A teacher that the module updates continues, including its running statistics and its masks."""
    assert_continues(cut, module=Teacher)


@pytest.mark.parametrize(
    ("fails", "continues_at", "accumulate"),
    [
        ("before", (0, 4), 1),
        ("after", (0, 3), 1),
        ("before the step", (0, 3), 1),
        ("at the end", (0, 3), 1),
        ("before", (1, 2), 2),
        ("after", (1, 0), 2),
    ],
)
def test_exception_around_a_teacher_that_moves(fails: str, continues_at: tuple[int, int], accumulate: int) -> None:
    """An exception before the update saves the boundary; after it the last autosave stays: never half a step."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=Teacher(fails), accumulate_grad_batches=accumulate)

    [cost] = assert_resumes_exactly(fit, [Arm()], options={**ALWAYS, "every_n_train_steps": 3})
    assert (cost.exit_code, cost.epoch, cost.batch) == (1, *continues_at)


# Two optimizers in manual optimization.


class Gan(LightningModule):
    """A generator and a discriminator, each with its own optimizer and scheduler."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.fails = fails
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        generator, discriminator = self.optimizers()
        noise = torch.randn(len(batch), 2)
        self.toggle_optimizer(generator)
        loss = -self.discriminator(self.generator(noise)).mean()
        self.manual_backward(loss)
        generator.step()
        generator.zero_grad()
        self.untoggle_optimizer(generator)
        if self.fails:
            fail_once(self.trainer, step=5)
        self.toggle_optimizer(discriminator)
        fake = self.discriminator(self.generator(noise).detach()).mean() - self.discriminator(batch).mean()
        self.manual_backward(fake)
        self.clip_gradients(discriminator, gradient_clip_val=0.1, gradient_clip_algorithm="value")
        discriminator.step()
        discriminator.zero_grad()
        self.untoggle_optimizer(discriminator)
        self.log_dict({"generator": loss, "discriminator": fake}, on_step=True, on_epoch=True, prog_bar=True)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.discriminator(batch).mean())

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam(net.parameters(), lr=0.01) for net in (self.generator, self.discriminator)]
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95) for optimizer in optimizers]


@pytest.mark.parametrize(("kill", "continues_at"), [(3, (0, 3)), (8, (1, 3))])
def test_two_optimizers_by_hand(kill: int, continues_at: tuple[int, int]) -> None:
    """Generator and discriminator continue, each with its optimizer and scheduler."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=Gan())

    [cost] = assert_resumes_exactly(fit, [KillAt(kill)], options=ALWAYS)
    assert (cost.epoch, cost.batch) == continues_at


def test_exception_between_the_steps_of_two_optimizers() -> None:
    """After a step of only one of two optimizers nothing can be saved: the last autosave stays."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, module=Gan(fails=True))

    [cost] = assert_resumes_exactly(fit, [Arm()], options={**ALWAYS, "every_n_train_steps": 4})
    assert (cost.exit_code, cost.epoch, cost.batch) == (1, 0, 2)
