"""Modules, data sets, and a callback that keep state in attributes that no ``state_dict`` contains."""

from __future__ import annotations

import copy
import math
import random
import statistics
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import Enum, IntEnum
from functools import cached_property
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from tests.data_sets import NoisyDataset
from tests.object_states import Own
from tests.runs import Net

# Modules: numbers, and counters of the standard library.


class WarmUp(Own):
    """Warms up with a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0
        self.warm_up = 0.1

    def factor(self, loss: Tensor) -> float:
        self.num_steps += 1
        self.warm_up = min(1.0, self.num_steps / 20)
        return self.warm_up


class FloatAverage(Own):
    """Divides by a running average of its losses that is ``None`` at first."""

    def __init__(self) -> None:
        super().__init__()
        self.average: float | None = None

    def factor(self, loss: Tensor) -> float:
        self.average = loss.item() if self.average is None else 0.9 * self.average + 0.1 * loss.item()
        return 1 / self.average


class TensorAverage(Own):
    """Its running average is a tensor outside the buffers, and a new one each time."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.ones(())

    def factor(self, loss: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * loss.detach()
        return 1 / self.average


class InPlaceAverage(TensorAverage):
    """Its running average is one tensor that changes in place."""

    def factor(self, loss: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return 1 / self.average


class Spikes(Own):
    """Compares a loss with the median of the previous ones."""

    def __init__(self) -> None:
        super().__init__()
        self.last: deque[float] = deque(maxlen=3)

    def factor(self, loss: Tensor) -> float:
        self.last.append(loss.item())
        return statistics.median(self.last) / loss.item()


class ClassSums(Net):
    """Sums its outputs per class in a ``defaultdict``, and counts them in a ``Counter``."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: defaultdict[int, float] = defaultdict(float)
        self.counts: Counter[int] = Counter()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for row in batch:
            label = int(row.sum() > 0)
            self.sums[label] += float(row.sum())
            self.counts[label] += 1
        rarest = min(self.counts.values()) / self.counts.total()
        self.log("rarest", rarest)
        return super().training_step(batch, batch_idx) * (1 + rarest)

    def on_train_epoch_end(self) -> None:
        for label, total in sorted(self.sums.items()):
            self.log(f"class_{label}", total / max(self.counts[label], 1))
        self.log("never_seen", self.sums[7])  # a default, created on first access


class Nested(Net):
    """Keeps lists of tensors in a dict of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics: dict[str, dict[str, list[Tensor]]] = {"train": {"loss": [], "norm": []}, "validation": {}}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.metrics["train"]["loss"].append(loss.detach())
        self.metrics["train"]["norm"].append(batch.norm())
        self.log("mean_norm", torch.stack(self.metrics["train"]["norm"]).mean())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.metrics["validation"].setdefault("norm", []).append(batch.norm())

    def on_validation_epoch_end(self) -> None:
        self.log("validation_norm", torch.stack(self.metrics["validation"]["norm"]).sum())

    def on_train_epoch_end(self) -> None:
        self.log("worst", torch.stack(self.metrics["train"]["loss"]).max())
        self.metrics["train"] = {name: [] for name in self.metrics["train"]}


class Seen(Own):
    """Gives samples that it has seen less weight."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[float] = set()

    def factor(self, loss: Tensor) -> float:
        self.seen.add(round(loss.item(), 1))
        return 1 / len(self.seen)


class Keyed(Own):
    """Has dicts with tuples, numbers, and enum members as keys; their order matters."""

    def __init__(self) -> None:
        super().__init__()
        self.visits: dict[tuple[int, bool], int] = {}
        self.per_phase: OrderedDict[Phase, float] = OrderedDict()
        self.per_level: dict[int, str] = {0: ""}

    def factor(self, loss: Tensor) -> float:
        key = (int(loss.item() * 10) % 3, loss.item() > 0.5)
        self.visits[key] = self.visits.get(key, 0) + 1
        phase = Phase.WARM_UP if len(self.visits) < 3 else Phase.MAIN
        self.per_phase[phase] = self.per_phase.get(phase, 0.0) + loss.item()
        self.per_phase.move_to_end(phase, last=False)
        self.per_level[len(self.per_level)] = "x" * len(self.per_level)
        first = next(iter(self.per_phase.values()))
        return self.visits[key] + first + len(self.per_level[len(self.per_level) - 1])


class DatesAndPaths(Own):
    """Keeps a date, a duration, and a path, all immutable."""

    def __init__(self) -> None:
        super().__init__()
        self.today = datetime(2026, 1, 30)
        self.spent = timedelta()
        self.path = Path("a")
        self.complex = 0j
        self.raw = b""

    def factor(self, loss: Tensor) -> float:
        self.today += timedelta(days=1)
        self.spent += timedelta(hours=5)
        self.path = self.path / f"{self.today:%d}"
        self.complex += 1j
        self.raw += bytes([len(self.raw)])
        length = len(PurePosixPath(self.path).parts) + sum(self.raw) + self.complex.imag
        return self.today.day + self.spent / timedelta(days=1) + length


VALUES_OF_A_MODULE = [
    WarmUp,
    FloatAverage,
    TensorAverage,
    InPlaceAverage,
    Spikes,
    ClassSums,
    Nested,
    Seen,
    Keyed,
    DatesAndPaths,
]


# Modules: tensors and networks that Lightning does not know.


class Truncated(Net):
    """Truncates backpropagation through time at each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)
        self.hidden: tuple[Tensor, Tensor] | None = None

    def on_train_epoch_start(self) -> None:
        self.hidden = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.cell(batch, self.hidden)
        self.hidden = tuple(part.detach() for part in hidden)
        return super().training_step(hidden[0], batch_idx)


class HiddenTeacher(Net):
    """Keeps its teacher in a list, so that it is not trained; the teacher follows by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.layers).eval()]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher[0](batch)
        return super().training_step(batch, batch_idx) + (self.layers(batch) - 1 - target).square().mean()

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.teacher[0].parameters(), self.layers.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


class Transition(NamedTuple):
    """An entry of a replay buffer."""

    state: Tensor
    value: Tensor


class Replay(Net):
    """Also trains on samples from a replay buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: deque[Transition] = deque(maxlen=24)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.buffer.extend(Transition(row, row.sum()) for row in batch)
        drawn = random.choices(self.buffer, k=4)
        states = torch.stack([transition.state for transition in drawn])
        values = torch.stack([transition.value for transition in drawn])
        return super().training_step(batch, batch_idx) + (self.layers(states).squeeze(1) - values).square().mean()


class MemoryBank(Net):
    """Writes its batches into a tensor outside the buffers, at a pointer."""

    def __init__(self) -> None:
        super().__init__()
        self.bank = torch.zeros(12, 4)
        self.pointer = 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.bank[self.pointer : self.pointer + len(batch)] = batch
        self.pointer = (self.pointer + len(batch)) % len(self.bank)
        return super().training_step(batch + self.bank.mean(), batch_idx)


class BankViews(MemoryBank):
    """Reads its bank through views."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = self.bank[:6], self.bank[6:]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch + self.halves[0].sum() - self.halves[1].sum(), batch_idx)


class ShuffledArray(Own):
    """Shuffles an array in place."""

    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(8)

    def factor(self, loss: Tensor) -> float:
        np.random.shuffle(self.order)
        return float(self.order @ np.arange(8)) / 100


class KeyedByParameter(Net):
    """Adds the last gradients to the current ones; they are in a dict with the parameters as keys."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[nn.Parameter, Tensor] = {}

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter in self.last:
                parameter.grad.add_(self.last[parameter], alpha=0.5)
            self.last[parameter] = parameter.grad.clone()


class WatchesWeights(Own):
    """Penalizes some of its weights, a list that grows; they stay the ones that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = [self.layers[0].weight]

    def factor(self, loss: Tensor) -> Tensor:
        self.watched.append(random.choice(list(self.layers.parameters())))
        return 1 + torch.stack([weight.square().mean() for weight in self.watched]).sum()


class SwapsLayers(Own):
    """Uses the next layer from a plain list that it rotates."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
        self.turns = list(self.heads)

    def factor(self, loss: Tensor) -> Tensor:
        self.turns.append(self.turns.pop(0))
        return 1 + self.turns[0](loss.detach().reshape(1)).square().sum()


TENSORS_OF_A_MODULE = [
    Truncated,
    HiddenTeacher,
    Replay,
    MemoryBank,
    BankViews,
    ShuffledArray,
    KeyedByParameter,
    WatchesWeights,
    SwapsLayers,
]


# Modules: objects of user classes.


class Phase(Enum):
    """The phase of a training."""

    WARM_UP = "warm-up"
    MAIN = "main"
    COOL_DOWN = "cool-down"


class Level(IntEnum):
    """A level of difficulty."""

    EASY = 1
    HARD = 5


@dataclass
class Progress:
    """The progress of a training."""

    num_steps: int = 0
    best: float = math.inf
    losses: list[float] = field(default_factory=list)


class HasProgress(Own):
    """Has a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.progress = Progress()

    def factor(self, loss: Tensor) -> float:
        self.progress.num_steps += 1
        self.progress.best = min(self.progress.best, loss.item())
        self.progress.losses.append(loss.item())
        return self.progress.best + self.progress.num_steps / 10 + statistics.fmean(self.progress.losses)


@dataclass(frozen=True, slots=True)
class Frozen:
    """State that is replaced, as in JAX."""

    num_steps: int = 0
    total: float = 0.0


class ReplacesFrozen(Own):
    """Has a frozen dataclass with slots, and replaces it."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Frozen()

    def factor(self, loss: Tensor) -> float:
        self.state = Frozen(num_steps=self.state.num_steps + 1, total=self.state.total + loss.item())
        return self.state.total / self.state.num_steps


class Meter:
    """Computes an average, as in many scripts."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset."""
        self.total = 0.0
        self.count = 0

    def update(self, value: float) -> None:
        """Add a value."""
        self.total += value
        self.count += 1

    @property
    def average(self) -> float:
        """Return the mean of all values."""
        return self.total / max(self.count, 1)


class SlottedMeter(Meter):
    """Has slots in addition to the ``__dict__`` of its base."""

    __slots__ = ("largest",)

    def reset(self) -> None:
        super().reset()
        self.largest = 0.0

    def update(self, value: float) -> None:
        super().update(value)
        self.largest = max(self.largest, value)


class Slotted:
    """Has only slots, one of which is filled late."""

    __slots__ = ("first", "total")

    def __init__(self) -> None:
        self.total = 0.0

    def update(self, value: float) -> None:
        """Add a value."""
        if not hasattr(self, "first"):
            self.first = value
        self.total += value


class HasMeters(Own):
    """Has objects of plain classes, and resets one at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.meters = {"epoch": Meter(), "all": SlottedMeter()}
        self.slotted = Slotted()

    def factor(self, loss: Tensor) -> float:
        for meter in (*self.meters.values(), self.slotted):
            meter.update(loss.item())
        meters = self.meters["epoch"].average + self.meters["all"].average + self.meters["all"].largest
        return meters + self.slotted.first + self.slotted.total

    def on_train_epoch_end(self) -> None:
        self.log("epoch_average", self.meters["epoch"].average)
        self.meters["epoch"].reset()


class ReplacesMeter(Own):
    """Creates a new instance every six steps, and keeps the previous one."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = self.former = Meter()

    def factor(self, loss: Tensor) -> float:
        if self.meter.count == 6:
            self.former, self.meter = self.meter, Meter()
        self.meter.update(loss.item())
        return self.meter.average + self.meter.count + self.former.average


class Cycle:
    """Knows its parent, which knows it."""

    def __init__(self, parent: Cycle | None = None) -> None:
        self.parent = parent
        self.children: list[Cycle] = []

    def grow(self) -> Cycle:
        """Return a new child."""
        self.children.append(Cycle(self))
        return self.children[-1]


class Tree(Own):
    """Grows a tree with nodes that refer to each other, and keeps a reference to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Cycle()
        self.node = self.root

    def factor(self, loss: Tensor) -> float:
        self.node = self.node.grow() if len(self.node.children) < 1 else self.node.children[0]
        if loss.item() > 1 and self.node.parent is not None:
            self.node = self.node.parent
        depth, node = 1, self.root
        while node.children and node is not self.node:
            depth, node = depth + 1, node.children[0]
        return depth + 10.0 * (node is self.node)


class Phases(Own):
    """Changes its phase, and compares it by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = Phase.WARM_UP
        self.level = Level.EASY

    def factor(self, loss: Tensor) -> float:
        return {Phase.WARM_UP: 0.1, Phase.MAIN: 1.0, Phase.COOL_DOWN: 0.5}[self.phase] * self.level

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if self.phase is Phase.WARM_UP and batch_idx == 1:
            self.phase, self.level = Phase.MAIN, Level.HARD

    def on_train_epoch_end(self) -> None:
        if self.phase is Phase.MAIN:
            self.phase = Phase.COOL_DOWN


class AttributeDict(dict[str, Any]):
    """A dict with attributes, as in many scripts: an unknown attribute raises a ``KeyError``."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__  # type: ignore[assignment]


class Namespaces(Own):
    """Changes values in namespaces."""

    def __init__(self) -> None:
        super().__init__()
        self.config = AttributeDict(scale=1.0, nested=AttributeDict(offset=0.0))
        self.arguments = SimpleNamespace(power=1.0)

    def factor(self, loss: Tensor) -> float:
        self.config.scale *= 1.2
        self.config.nested.offset += 0.1
        self.arguments.power += 0.1
        return self.config.scale**self.arguments.power + self.config.nested.offset


class Hyperparameters(Own):
    """Changes one of its hyperparameters."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def factor(self, loss: Tensor) -> float:
        self.hparams.scale *= 0.9
        return self.hparams.scale


OBJECTS_OF_A_MODULE = [
    HasProgress, ReplacesFrozen, HasMeters, ReplacesMeter, Tree, Phases, Namespaces, Hyperparameters,
]  # fmt: skip


# Modules: attributes that appear, disappear, and change their type.


class FadingDropout(Net):
    """Lowers the rate of its dropout layer with each batch."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.layers[2].p *= 0.8


class Temperature(Own):
    """Cools down with each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 4.0

    def factor(self, loss: Tensor) -> float:
        return self.temperature

    def on_train_epoch_end(self) -> None:
        self.temperature *= 0.5
        self.log("temperature", self.temperature)


class MadeInEpochStart(Own):
    """Has its counter from the start of the epoch."""

    def on_train_epoch_start(self) -> None:
        self.count = 0

    def factor(self, loss: Tensor) -> float:
        self.count += 1
        return self.count / 5


class MadeInSetup(Own):
    """Starts with an object from `setup`, which a process that continues calls, too."""

    def setup(self, stage: str) -> None:
        self.scale = 1.0
        self.losses: list[float] = []

    def factor(self, loss: Tensor) -> float:
        self.scale *= 0.9
        self.losses.append(loss.item())
        return self.scale + sum(self.losses)


class MadeInFitStart(Own):
    """Starts a list when a fit starts; a process that continues calls the same hook."""

    def on_fit_start(self) -> None:
        self.losses: list[float] = []

    def factor(self, loss: Tensor) -> float:
        self.losses.append(loss.item())
        return sum(self.losses)


class MadeInTrainStart(Own):
    """Starts to count when training starts."""

    def on_train_start(self) -> None:
        self.count = 0

    def factor(self, loss: Tensor) -> float:
        self.count += 1
        return self.count / 10


class MadeWhenUsed(Own):
    """Draws a number on first access."""

    @cached_property
    def offset(self) -> float:
        """Return the number."""
        return 1 + random.random()

    def factor(self, loss: Tensor) -> float:
        return self.offset if self.global_step > 0 else 1.0


class Deletes(Own):
    """Warms up while it has an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.warm_up = 0.1

    def factor(self, loss: Tensor) -> float:
        return self.warm_up if hasattr(self, "warm_up") else 1.0

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            del self.warm_up


class PopsKeys(Own):
    """Removes stages from a dict and from a list that are full at first."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = {f"stage-{number}": number for number in range(12)}
        self.factors = [1 + number / 10 for number in range(12)]

    def factor(self, loss: Tensor) -> float:
        _, number = self.stages.popitem()
        return self.factors.pop(0) * (1 + number)


class SharesLater(Own):
    """Has two lists that become one after the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.best = [1.0]
        self.current = [2.0, 3.0]

    def factor(self, loss: Tensor) -> float:
        self.current.append(loss.item())
        return sum(self.best) / 10

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.best = self.current


class PartsLater(Own):
    """Has two lists that stop being one after the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.best = self.current = [1.0]

    def factor(self, loss: Tensor) -> float:
        self.current.append(loss.item())
        return sum(self.best) / 10

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.best = [*self.current]


class ChangesType(Own):
    """Has an attribute that is ``None``, a number, a list, and a string in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Any = None

    def factor(self, loss: Tensor) -> float:
        return {type(None): 1.0, int: 2.0, list: 3.0, str: 4.0}[type(self.current)]

    def on_train_batch_end(self, *_: Any) -> None:
        self.current = ["1", 1, None, [1]][self.trainer.global_step % 4]


class ChangesFunction(Own):
    """Calls another function, and another of its methods, after the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = torch.relu
        self.weigh = self.easy

    def easy(self) -> float:
        """Return the first weight."""
        return 1.0

    def hard(self) -> float:
        """Return the later weight."""
        return 3.0

    def factor(self, loss: Tensor) -> Tensor:
        return self.weigh() * self.activation(loss)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.activation = torch.tanh
            self.weigh = self.hard


class Freezes(Net):
    """Freezes a layer after some batches, and keeps its batch norm in evaluation mode."""

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.layers[0].requires_grad_(False)
            self.layers[1].momentum = 0.5


ATTRIBUTES_THAT_CHANGE = [
    FadingDropout,
    Temperature,
    MadeInEpochStart,
    MadeInSetup,
    MadeInFitStart,
    MadeInTrainStart,
    MadeWhenUsed,
    Deletes,
    PopsKeys,
    SharesLater,
    PartsLater,
    ChangesType,
    ChangesFunction,
    Freezes,
]


# All together.


class Together(Own):
    """Combines those of these modules that log nothing, and logs each one's factor of the loss under its name."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [*VALUES_OF_A_MODULE, *TENSORS_OF_A_MODULE, *OBJECTS_OF_A_MODULE, *ATTRIBUTES_THAT_CHANGE]
        logging = (HasMeters, Temperature)
        self.parts = nn.ModuleList(kind() for kind in kinds if "factor" in vars(kind) and kind not in logging)

    def factor(self, loss: Tensor) -> Tensor:
        factors = {type(part).__name__: torch.as_tensor(part.factor(loss)).double() for part in self.parts}
        self.log_dict({name: float(value.detach()) for name, value in factors.items()})
        return torch.stack([value.tanh() for value in factors.values()]).sum().float()


def passed_on(hook: str) -> Callable[..., None]:
    """Return a hook that calls the same hook of each part."""

    def call(self: Together, *arguments: Any, **named: Any) -> None:
        for part in self.parts:
            part.trainer = self.trainer
            getattr(part, hook)(*arguments, **named)

    return call


for name in (
    "setup",
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_end",
):
    setattr(Together, name, passed_on(name))


# A callback, and data sets.


class Curriculum(NoisyDataset):
    """Its samples are as hard as its level, which other code sets."""

    def __init__(self) -> None:
        super().__init__(20)
        self.level = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the level for an epoch."""
        self.level = epoch + 1

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) * (1 + self.level)


class SetsEpoch(Net):
    """Sets the epoch of its data set."""

    def on_train_epoch_start(self) -> None:
        self.trainer.train_dataloader.dataset.set_epoch(self.current_epoch)


class CountingDataset(NoisyDataset):
    """Counts the samples that it has returned, and caches some."""

    def __init__(self) -> None:
        super().__init__(20)
        self.num_given = 0
        self.cache: dict[int, Tensor] = {}

    def __getitem__(self, index: int) -> Tensor:
        self.num_given += 1
        if index % 2 == 0 and index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache.get(index, self.rows[index]) + self.num_given / 10
