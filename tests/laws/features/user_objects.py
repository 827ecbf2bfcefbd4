"""Objects of a user's own classes in a module, and attributes that training creates, deletes, shares, and replaces."""

from __future__ import annotations

import functools
import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from tests.laws.rows import Factor, Net, carried, row


@dataclass
class Progress:
    num_steps: int = 0
    best: float = math.inf
    losses: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    """State that is replaced, as in JAX."""

    num_steps: int = 0
    total: float = 0.0


class AttributeDict(dict[str, Any]):
    """A dict with attributes, as in many scripts: an unknown attribute raises a ``KeyError``."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


@functools.partial(carried, takes="copies")
class Records(Factor):
    """A dataclass that changes, a frozen one that is replaced, a namespace, and a dict with attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.progress, self.frozen = Progress(), Frozen()
        self.arguments, self.config = SimpleNamespace(power=1.0), AttributeDict(nested=AttributeDict(offset=0.0))

    def factor(self, loss: Tensor) -> float:
        value = loss.tanh().item()
        self.progress.num_steps += 1
        self.progress.best = min(self.progress.best, value)
        self.progress.losses.append(value)
        self.frozen = Frozen(num_steps=self.frozen.num_steps + 1, total=self.frozen.total + value)
        self.arguments.power += 0.01
        self.config.nested.offset += 0.01
        mean = statistics.fmean(self.progress.losses) + self.frozen.total / self.frozen.num_steps
        return (
            self.progress.best + self.progress.num_steps / 10 + mean + self.config.nested.offset * self.arguments.power
        )


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
    """Has a slot, which is filled late, in addition to the ``__dict__`` of its base."""

    __slots__ = ("largest",)

    def update(self, value: float) -> None:
        super().update(value)
        self.largest = max(getattr(self, "largest", 0.0), value)


@carried
class Meters(Factor):
    """Objects with and without slots; one is reset at each epoch's end, one replaced, and its former one kept."""

    def __init__(self) -> None:
        super().__init__()
        self.meters = {"epoch": Meter(), "all": SlottedMeter()}
        self.meter = self.former = Meter()

    def factor(self, loss: Tensor) -> float:
        if self.meter.count == 4:
            self.former, self.meter = self.meter, Meter()
        for meter in (*self.meters.values(), self.meter):
            meter.update(loss.tanh().item())
        averages = [meter.average for meter in (*self.meters.values(), self.meter, self.former)]
        return sum(averages) + self.meters["all"].largest

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


@carried
class MadeLate(Factor):
    """Attributes from hooks, of which a process that resumes calls some again, and one that the first access draws."""

    @cached_property
    def offset(self) -> float:
        return random.random()

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
        counts = (self.from_train_start + self.from_epoch_start) / 9
        return self.offset + self.set_up + statistics.fmean(self.from_fit_start) + counts


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
    """Attributes that become another function, another method, and ``None``, a number, a list, and a text in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = torch.relu
        self.weigh = self.easy
        self.of_any_type: Any = None

    def easy(self) -> float:
        return 1.0

    def hard(self) -> float:
        return 1.5

    def factor(self, loss: Tensor) -> Tensor:
        value = {type(None): 0.5, int: 1.0, list: 1.5, str: 2.0}[type(self.of_any_type)]
        self.of_any_type = ["1", 1, [1], "1", 1, [1], None][self.global_step % 7]
        if self.global_step == 2:
            self.activation, self.weigh = torch.tanh, self.hard
        return value * self.weigh() * self.activation(torch.tensor(2.0))


@carried
class OnTheTrainer(Factor):
    """Keeps a number on the Trainer."""

    def factor(self, loss: Tensor) -> float:
        self.trainer.smoothed_loss = getattr(self.trainer, "smoothed_loss", 0.0) / 2 + loss.tanh().item()
        return 1 + float(self.trainer.smoothed_loss)


@functools.partial(carried, takes="copies")
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


@row("module", part="objects", shows=("rate_of_dropout", "momentum_of_norm"), takes="layers")
class ChangesLayers(Net):
    """Lowers the rate of its dropout with each batch, and changes the momentum of its norm after two."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.layers[2].p *= 0.8
        if self.global_step == 2:
            self.layers[1].momentum = 0.5
        self.log_dict({"rate_of_dropout": self.layers[2].p, "momentum_of_norm": self.layers[1].momentum})
        return super().training_step(batch, batch_idx)


@row("module", part="flags", shows="frozen", takes="layers", ranks=False)
class Freezes(Net):
    """Freezes a layer and switches its batch norm to evaluation mode, permanently, after two batches."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step == 2:
            self.layers[0].requires_grad_(False)
            self.layers[1].eval()
        self.log("frozen", float(not self.layers[0].weight.requires_grad) + float(not self.layers[1].training))
        return super().training_step(batch, batch_idx)
