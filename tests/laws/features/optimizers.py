"""Optimizers, their groups, and schedulers, also those that keep state elsewhere or wrap others, and arguments."""

from __future__ import annotations

import random
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from tests.laws.rows import Net, add, row


class Scheduled(Net):
    """Has SGD, and a scheduler from `schedule`; logs the rate and the momentum that its step uses."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": self.schedule(optimizer)}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        groups = [group for one in self.trainer.optimizers for group in one.param_groups]
        self.log("sum_of_rates", sum(float(group["lr"]) * (1 + group.get("weight_decay", 0)) for group in groups))
        return super().training_step(batch, batch_idx)


def scheduled(name: str, schedule: Callable[[Any, Any], Any], **values: Any) -> None:
    """Add a row with a scheduler."""
    made = type(name, (Scheduled,), {"schedule": schedule, "__module__": __name__, "__doc__": name})
    add(name, module=made, takes=("optimizer", *values.pop("takes", ())), **values)


def plateau(interval: str, frequency: int) -> Callable[[Any, Any], Any]:
    """Return what makes a scheduler that depends on a validation result."""
    return lambda module, optimizer: {
        "scheduler": ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0),
        "monitor": "val_loss", "interval": interval, "frequency": frequency,
    }  # fmt: skip


def one_cycle(module: Any, optimizer: Any) -> Any:
    """Return a scheduler per step that the trainer sizes, if the loaders have lengths."""
    steps = int(module.trainer.estimated_stepping_batches)
    return {"scheduler": OneCycleLR(optimizer, 0.02, total_steps=steps if steps > 0 else 24), "interval": "step"}


def drawn(module: Any, optimizer: Any) -> Any:
    """Return a scheduler with functions that draw from a generator, and that count in a closure."""
    rng, asked = random.Random(0), []
    return {"scheduler": LambdaLR(optimizer, lambda step: asked.append(step) or rng.random() / len(asked)),
            "interval": "step"}  # fmt: skip


scheduled("one cycle", one_cycle, takes=("early loaders",))
for interval, frequency in (("epoch", 2), ("step", 6)):
    halves = {"val_check_interval": 3, "max_epochs": 3}
    scheduled(f"plateau at each {frequency}. {interval}", plateau(interval, frequency), trainer=halves)
scheduled("drawn rates", drawn, part="objects", shows="sum_of_rates")
add("bf16-mixed", trainer={"precision": "bf16-mixed", "gradient_clip_val": 0.5}, takes="precision")
add("accumulation", part="gradients", shows="weights", trainer={"accumulate_grad_batches": 3}, repeats=3)
add("clipping", trainer={"gradient_clip_val": 0.1})
add("async_save", options={"async_save": True}, repeats=12)
add("max_steps in windows", trainer={"max_steps": 7, "max_epochs": -1, "accumulate_grad_batches": 2}, repeats=2)


@row("module", takes="layers")
class ScriptedNorm(Net):
    """Has a scripted batch norm, whose flags are constants."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has deprecated it
            norm = torch.jit.script(nn.BatchNorm1d(8))
        self.layers = nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 1))


@row("module", takes=("optimizer", "layers"), ranks=False)
class ManyClosures(Net):
    """LBFGS evaluates its closure again and again, and keeps lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.05, max_iter=3, history_size=4)


@row("module", takes="optimizer", trainer={"max_epochs": 4})
class MovesParameters(Scheduled):
    """Moves a layer from its only group to another in the second epoch, and all back into one in the third."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        [optimizer] = self.trainer.optimizers
        if self.current_epoch == 1:
            moved = optimizer.param_groups[0]["params"][:2]
            del optimizer.param_groups[0]["params"][:2]
            optimizer.add_param_group({"params": moved, "lr": 0.002})
        if self.current_epoch == 2:
            optimizer.param_groups[0]["params"] += optimizer.param_groups.pop()["params"]


class Lookahead(torch.optim.SGD):
    """Keeps slow weights and a count outside its ``state``; its steps are noisy by a generator of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, momentum=0.9)
        self.counter, self.rng = 0, torch.Generator().manual_seed(0)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.counter += 1
        for fast, weight in zip(self.param_groups[0]["params"], self.slow, strict=True):
            fast.add_(0.01 * torch.randn(fast.shape, generator=self.rng))
            if self.counter % 5 == 0:
                fast.copy_(weight.lerp_(fast, 0.5))
        return loss


@row("module", takes="optimizer")
class LooksAhead(Net):
    """An optimizer with slow weights, a count, and a generator outside its state."""

    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters())


class Warmup(LRScheduler):
    """Raises the rate, and then steps another scheduler, with the state_dict of torch."""

    def __init__(self, optimizer: Any, after: Any) -> None:
        self.after, self.groups, self.shape = after, optimizer.param_groups, self.factor
        super().__init__(optimizer)

    def factor(self) -> float:
        return self.last_epoch / 3

    def get_lr(self) -> list[Any]:
        return [rate * max(self.shape(), 0.5) for rate in self.base_lrs]

    def step(self, epoch: int | None = None) -> None:
        if self.last_epoch < 3:
            super().step()
            return
        self.last_epoch += 1
        self.after.step()
        self.groups[0]["momentum"] *= 0.99
        self._last_lr = self.after.get_last_lr()


@dataclass
class Part:
    """A part of a schedule, which counts its steps."""

    scheduler: Any
    num_steps: int = 0


class Parts(LRScheduler):
    """Steps those of its schedulers in turn that lists, dicts, tuples, sets, and other objects hold."""

    def __init__(self, optimizer: Any) -> None:
        self.current = None
        chained = ChainedScheduler([ExponentialLR(optimizer, 0.9), CosineAnnealingLR(optimizer, 20)])
        warm_up = Warmup(optimizer, CosineAnnealingLR(optimizer, 20))
        in_sequence = SequentialLR(optimizer, [warm_up, ExponentialLR(optimizer, 0.9)], [2])
        lambdas = LambdaLR(optimizer, lambda step: 0.95**step)
        self.held = [{"first": (Part(chained), Part(in_sequence))}, {"last": (Part(lambdas),)}]
        self.in_a_set = {StepLR(optimizer, 3, 0.9)}
        self.optimizers = frozenset({optimizer})
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        parts = [part for one in self.held for parts in one.values() for part in parts]
        if self.last_epoch:
            self.current = parts[self.last_epoch % 3]
            self.current.scheduler.step()
            self.current.num_steps += 1
            for scheduler in self.in_a_set:
                scheduler.step()
            for optimizer in self.optimizers:
                optimizer.param_groups[0]["weight_decay"] += 0.001


class Wraps(torch.optim.Optimizer):
    """Shares the state and the groups of an optimizer, and sets neither in a load."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([{**group} for group in inner.param_groups], inner.defaults)
        self.inner = inner
        self.state, self.param_groups = inner.state, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class WrapsWithState(Wraps):
    """Has slow weights in a state of its own; a load sets the state that it holds of the other optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.state, self.fast_state, self.num_steps = defaultdict(dict), inner.state, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.num_steps += 1
        for weight in self.param_groups[0]["params"] if self.num_steps % 3 == 0 else ():
            slow = self.state[weight].setdefault("slow", weight.detach().clone())
            weight.copy_(slow.lerp_(weight, 0.5))
            self.fast_state[weight].get("momentum_buffer", slow.new_zeros(())).zero_()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fast_state": self.inner.state_dict()["state"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        groups = state_dict["param_groups"]
        super().load_state_dict({"state": state_dict["state"], "param_groups": groups})
        self.inner.load_state_dict({"state": state_dict["fast_state"], "param_groups": groups})
        self.fast_state = self.inner.state


class Wrapped(Scheduled):
    """Has an optimizer that wraps another one; the module holds one of its groups, and changes it."""

    wrap: Any = Wraps

    def configure_optimizers(self) -> Any:
        optimizer = self.wrap(torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9))
        self.held_group = optimizer.param_groups[0]
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.schedule(optimizer), "interval": "step"}}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.held_group["weight_decay"] += 0.001
        return super().training_step(batch, batch_idx)


@row("module", takes="optimizer")
class WrappedByParts(Wrapped):
    """An optimizer wraps another one, and a scheduler steps many that it holds in other objects."""

    def schedule(self, optimizer: Any) -> Any:
        return Parts(optimizer)


@row("module", takes="optimizer")
class WrappedByWarmup(Wrapped):
    """An optimizer with a state of its own wraps another one, and a scheduler of the user's steps another one."""

    wrap = WrapsWithState

    def schedule(self, optimizer: Any) -> Any:
        return Warmup(
            optimizer, SequentialLR(optimizer, [CosineAnnealingLR(optimizer, 20), ExponentialLR(optimizer, 0.9)], [2])
        )


@row("module", part="gradients", shows="weights", takes="optimizer", repeats=4)
class KeepsGradients(Net):
    """Keeps gradients for two batches and lets them decay, and logs them where they are set to zero."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if batch_idx % 3 == 0:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


MANUAL = ("argument accumulate_grad_batches", "argument gradient_clip_val")
"""What Lightning refuses in manual optimization."""


class ByHand(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@row("module", part="gradients", shows="weights", takes=("optimizer", *MANUAL), repeats=4, trainer={"max_epochs": 2})
class TwoOptimizers(ByHand):
    """Steps one optimizer after each batch, and one after every fourth, which keeps its gradients in between."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        first, second = self.optimizers()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        if batch_idx % 4 == 0:
            self.clip_gradients(second, gradient_clip_val=0.5)
            second.step()
            second.zero_grad()
        self.lr_schedulers().step()
        return loss

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.layers[:2].parameters(), lr=0.01)
        second = torch.optim.SGD(self.layers[-1].parameters(), lr=0.01, momentum=0.9)
        return [first, second], [ExponentialLR(first, 0.9)]


@row("module", takes=("optimizer", *MANUAL), repeats=1)
class StepsBehindLightning(ByHand):
    """Steps a raw optimizer, so that Lightning counts no step: saves count batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers(use_pl_optimizer=False)
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss
