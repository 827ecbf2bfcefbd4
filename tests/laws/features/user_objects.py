"""Objects of a user's own classes in a module, and attributes that training creates, deletes, shares, and replaces."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tests.laws.rows import Factor, Net, carried, row


@dataclass
class Progress:
    """The progress of a training."""

    num_steps: int = 0
    best: float = math.inf
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    """State that is replaced, as in JAX."""

    num_steps: int = 0
    total: float = 0.0


@carried
class Dataclasses(Factor):
    """A dataclass that changes, and a frozen one with slots that is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.progress, self.frozen = Progress(), Frozen()

    def factor(self, loss: Tensor) -> float:
        value = loss.tanh().item()
        self.progress.num_steps += 1
        self.progress.best = min(self.progress.best, value)
        self.progress.losses.append(value)
        self.frozen = Frozen(num_steps=self.frozen.num_steps + 1, total=self.frozen.total + value)
        mean = self.frozen.total / self.frozen.num_steps
        return self.progress.best + self.progress.num_steps / 10 + statistics.fmean(self.progress.losses) + mean


class Meter:
    """Computes an average, as in many scripts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        self.total += value
        self.count += 1

    @property
    def average(self) -> float:
        return self.total / max(self.count, 1)


class SlottedMeter(Meter):
    """Has slots in addition to the ``__dict__`` of its base."""

    __slots__ = ("largest",)

    def update(self, value: float) -> None:
        super().update(value)
        self.largest = max(getattr(self, "largest", 0.0), value)


class Slotted:
    """Has only slots, one of which is filled late."""

    __slots__ = ("first", "total")

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, value: float) -> None:
        if not hasattr(self, "first"):
            self.first = value
        self.total += value


@carried
class Meters(Factor):
    """Objects with and without slots; one is reset at each epoch's end, one replaced, and its former one kept."""

    def __init__(self) -> None:
        super().__init__()
        self.meters = {"epoch": Meter(), "all": SlottedMeter()}
        self.slotted = Slotted()
        self.meter = self.former = Meter()

    def factor(self, loss: Tensor) -> float:
        if self.meter.count == 4:
            self.former, self.meter = self.meter, Meter()
        for meter in (*self.meters.values(), self.slotted, self.meter):
            meter.update(loss.tanh().item())
        now = self.meters["epoch"].average + self.meters["all"].average + self.meters["all"].largest
        return now / 3 + self.slotted.first + self.slotted.total / 10 + self.meter.average + self.former.average

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.meters["epoch"].reset()


class Node:
    """Knows its parent, which knows it."""

    def __init__(self, parent: Node | None = None) -> None:
        self.parent = parent
        self.children: list[Node] = []


@carried
class Tree(Factor):
    """Grows a tree with nodes that refer to each other, and keeps a reference to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.root = self.node = Node()

    def factor(self, loss: Tensor) -> float:
        if not self.node.children:
            self.node.children.append(Node(self.node))
        self.node = self.node.children[0]
        if loss.item() > 1 and self.node.parent is not None:
            self.node = self.node.parent
        depth, node = 1, self.root
        while node.children and node is not self.node:
            depth, node = depth + 1, node.children[0]
        return depth / 10 + 1.0 * (node is self.node)


class Period(Enum):
    """The period of a training."""

    WARM_UP = "warm-up"
    MAIN = "main"
    COOL_DOWN = "cool-down"


class Level(IntEnum):
    """A level of difficulty."""

    EASY = 1
    HARD = 2


@carried
class Periods(Factor):
    """Members of enums, which are compared by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.period, self.difficulty = Period.WARM_UP, Level.EASY

    def factor(self, loss: Tensor) -> float:
        return {Period.WARM_UP: 0.1, Period.MAIN: 1.0, Period.COOL_DOWN: 0.5}[self.period] * self.difficulty

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        if self.period is Period.WARM_UP and arguments[-1] == 1:
            self.period, self.difficulty = Period.MAIN, Level.HARD

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        if self.period is Period.MAIN:
            self.period = Period.COOL_DOWN


class AttributeDict(dict[str, Any]):
    """A dict with attributes, as in many scripts: an unknown attribute raises a ``KeyError``."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


@carried
class Namespaces(Factor):
    """Values in namespaces, and in a dict with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.config = AttributeDict(scale=1.0, nested=AttributeDict(offset=0.0))
        self.arguments = SimpleNamespace(power=1.0)

    def factor(self, loss: Tensor) -> float:
        self.config.scale *= 1.05
        self.config.nested.offset += 0.01
        self.arguments.power += 0.01
        return self.config.scale**self.arguments.power + self.config.nested.offset


@row("module", part="objects", shows="hyperparameter", takes="hyperparameters")
class Hyperparameters(Net):
    """Changes one of its hyperparameters."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"scale": 1.0})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.hparams.scale *= 0.9
        self.log("hyperparameter", self.hparams.scale)
        return super().training_step(batch, batch_idx) * self.hparams.scale


@row("module", part="objects", shows="rate_of_dropout", takes="layers")
class FadingDropout(Net):
    """Lowers the rate of its dropout layer with each batch."""

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        self.layers[2].p *= 0.8
        self.log("rate_of_dropout", self.layers[2].p)


@carried
class MadeInHooks(Factor):
    """Attributes from hooks: those that a process that resumes calls again, and one that it does not."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.set_up = 1.0

    def on_fit_start(self) -> None:
        super().on_fit_start()
        self.from_fit_start: list[float] = []

    def on_train_start(self) -> None:
        super().on_train_start()
        self.from_train_start = 0

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.from_epoch_start = 0

    def factor(self, loss: Tensor) -> float:
        self.set_up *= 0.9
        self.from_fit_start.append(loss.tanh().item())
        self.from_train_start += 1
        self.from_epoch_start = getattr(self, "from_epoch_start", 0) + 1
        return self.set_up + statistics.fmean(self.from_fit_start) + (self.from_train_start + self.from_epoch_start) / 9


@carried
class MadeWhenUsed(Factor):
    """Draws a number on first access."""

    @cached_property
    def offset(self) -> float:
        return 1 + random.random()

    def factor(self, loss: Tensor) -> float:
        return self.offset


@carried
class Removes(Factor):
    """Deletes an attribute, keys of a dict, and elements of a list, all of which are there at first."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = 0.1
        self.stages = {f"stage-{number}": number for number in range(40)}
        self.scales = [1 + number / 10 for number in range(40)]

    def factor(self, loss: Tensor) -> float:
        if self.global_step == 2 and hasattr(self, "temporary"):
            del self.temporary
        _, number = self.stages.popitem()
        return (self.scales.pop(0) + number / 9) * getattr(self, "temporary", 1.0) / 5


@carried
class Shares(Factor):
    """Two lists become one after the second batch, and one becomes two."""

    def __init__(self) -> None:
        super().__init__()
        self.joins_one, self.joins_other = [1.0], [2.0, 3.0]
        self.parts_one = self.parts_other = [1.0]

    def factor(self, loss: Tensor) -> float:
        self.joins_other.append(loss.tanh().item())
        self.parts_other.append(loss.tanh().item())
        if self.global_step == 2:
            self.joins_one = self.joins_other
            self.parts_one = [*self.parts_other]
        return statistics.fmean(self.joins_one) + statistics.fmean(self.parts_one)


@carried
class ChangesType(Factor):
    """An attribute that is ``None``, a number, a list, and a text in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.of_any_type: Any = None

    def factor(self, loss: Tensor) -> float:
        value = {type(None): 0.5, int: 1.0, list: 1.5, str: 2.0}[type(self.of_any_type)]
        self.of_any_type = ["1", 1, None, [1]][self.global_step % 4]
        return value


@carried
class ChangesFunction(Factor):
    """Calls another function, and another of its methods, after the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = torch.relu
        self.weigh = self.easy

    def easy(self) -> float:
        return 1.0

    def hard(self) -> float:
        return 1.5

    def factor(self, loss: Tensor) -> Tensor:
        if self.global_step == 2:
            self.activation, self.weigh = torch.tanh, self.hard
        return self.weigh() * self.activation(torch.tensor(2.0))


@carried
class OnTheTrainer(Factor):
    """Keeps a number on the Trainer."""

    def factor(self, loss: Tensor) -> float:
        self.trainer.smoothed_loss = getattr(self.trainer, "smoothed_loss", 0.0) / 2 + loss.tanh().item()
        return 1 + float(self.trainer.smoothed_loss)


@carried
class ShowsProgress(Factor):
    """Creates a bar of tqdm at the start of each epoch, and advances it."""

    def __init__(self) -> None:
        super().__init__()
        self.bar = tqdm(total=5)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self.bar = tqdm(total=5)

    def factor(self, loss: Tensor) -> float:
        self.bar.update(1)
        return 1 + self.bar.n / 10


@row("module", part="flags", shows="frozen", takes="layers")
class Freezes(Net):
    """Freezes a layer and switches its batch norm to evaluation mode, permanently, after two batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 2:
            self.layers[0].requires_grad_(False)
            self.layers[1].eval()
        self.log("frozen", float(not self.layers[0].weight.requires_grad) + float(not self.layers[1].training))
        return super().training_step(batch, batch_idx)


@row("module", part="objects", shows="momentum_of_norm", takes="layers")
class ChangesMomentum(Net):
    """Changes the momentum of its batch norm after some batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 2:
            self.layers[1].momentum = 0.5
        self.log("momentum_of_norm", self.layers[1].momentum)
        return super().training_step(batch, batch_idx)
