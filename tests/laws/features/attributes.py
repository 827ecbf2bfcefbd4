"""State in attributes of a module that no ``state_dict`` contains: numbers, collections, tensors, networks."""

from __future__ import annotations

import copy
import random
import statistics
import threading
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.laws.rows import Factor, Net, carried, row


@carried
class Numbers(Factor):
    """A counter, a running average that is ``None`` at first, a complex number, and bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.turned, self.written = 0, 0j, b""
        self.running: float | None = None

    def factor(self, loss: Tensor) -> float:
        self.num_calls += 1
        self.turned += 1j
        self.written += bytes([self.num_calls])
        self.running = loss.item() if self.running is None else 0.9 * self.running + 0.1 * loss.item()
        return min(1.0, self.num_calls / 20) + self.running / 10 + self.turned.imag / 9 + sum(self.written) / 100


@carried
class Dates(Factor):
    """A date, a duration, and a path, all immutable."""

    def __init__(self) -> None:
        super().__init__()
        self.today, self.spent, self.where = datetime(2026, 1, 30), timedelta(), Path("a")

    def factor(self, loss: Tensor) -> float:
        self.today += timedelta(days=1)
        self.spent += timedelta(hours=5)
        self.where = self.where / f"{self.today:%d}"
        return (self.today.day + self.spent / timedelta(days=1) + len(self.where.parts)) / 30


@carried
class TensorAverages(Factor):
    """Two running averages outside the buffers: a new tensor each time, and one that changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.new_average, self.same_average = torch.ones(()), torch.ones(())

    def factor(self, loss: Tensor) -> Tensor:
        self.new_average = 0.9 * self.new_average + 0.1 * loss.detach().tanh()
        self.same_average.mul_(0.8).add_(loss.detach().tanh(), alpha=0.1)
        return self.new_average + self.same_average


class Phase(Enum):
    """The phase of a training."""

    WARM_UP = "warm-up"
    MAIN = "main"
    COOL_DOWN = "cool-down"


@carried
class Collections(Factor):
    """The collections of the standard library; the order of a dict matters, and its keys are tuples and members."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[float] = deque(maxlen=3)
        self.seen: set[int] = set()
        self.sums: defaultdict[int, float] = defaultdict(float)
        self.counts: Counter[int] = Counter()
        self.visits: dict[tuple[int, bool], int] = {}
        self.per_phase: OrderedDict[Phase, float] = OrderedDict()

    def factor(self, loss: Tensor) -> float:
        value = float(torch.nan_to_num(loss.detach(), posinf=1e6).clamp(max=1e6))  # other rows may let it diverge
        self.recent.append(value)
        self.seen.add(int(value * 10) % 5)
        label = int(value * 10) % 3
        self.sums[label] += value
        self.counts[label] += 1
        self.visits[label, value > 0.5] = self.visits.get((label, value > 0.5), 0) + 1
        phase = Phase.WARM_UP if len(self.visits) < 3 else Phase.MAIN
        self.per_phase[phase] = self.per_phase.get(phase, 0.0) + 0.1
        self.per_phase.move_to_end(phase, last=False)
        rarest = min(self.counts.values()) / self.counts.total()
        total = len(self.seen) / 10 + next(iter(self.per_phase.values())) + max(self.visits.values()) / 9
        return statistics.median(self.recent) / (value + 0.1) + rarest + total + self.sums[7]


@row("module", part="objects", shows=("mean_norm", "worst", "validation_norm"))
class Nested(Net):
    """Lists of tensors in a dict of dicts, of training and of validation, which its epochs replace."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, dict[str, list[Tensor]]] = {"train": {"loss": [], "norm": []}, "validation": {}}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept["train"]["loss"].append(loss.detach())
        self.kept["train"]["norm"].append(batch.norm())
        self.log("mean_norm", torch.stack(self.kept["train"]["norm"]).mean())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.kept["validation"].setdefault("norm", []).append(batch.norm())

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.log("validation_norm", torch.stack(self.kept["validation"]["norm"]).sum())

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("worst", torch.stack(self.kept["train"]["loss"]).max())
        self.kept["train"] = {name: [] for name in self.kept["train"]}


@row("module", part="objects", shows="num_validated")
class ValidationLosses(Net):
    """Keeps its validation losses, the sanity check's included, and slows down with the best."""

    def __init__(self) -> None:
        super().__init__()
        self.validation_losses: list[float] = []
        self.current: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.log("num_validated", float(len(self.validation_losses)))
        return super().training_step(batch, batch_idx) * min(self.validation_losses, default=1.0)

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.current.append(self.layers(batch).square().mean())

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.validation_losses.append(float(torch.stack(self.current).mean()))
        self.current.clear()


@row("module", part="objects", shows="taught", takes="layers")
class HiddenTeacher(Net):
    """Keeps its teacher in a list, so that it is not trained; the teacher follows by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.layers).eval()]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher[0](batch)
            self.log("taught", self.teacher[0](torch.ones(2, 4)).sum())
        return super().training_step(batch, batch_idx) + (self.layers(batch) - 1 - target).square().mean()

    def on_train_batch_end(self, *arguments: Any) -> None:
        super().on_train_batch_end(*arguments)
        with torch.no_grad():
            for slow, fast in zip(self.teacher[0].parameters(), self.layers.parameters(), strict=True):
                slow.lerp_(fast, 0.1)


class Transition(NamedTuple):
    """An entry of a replay buffer."""

    state: Tensor
    value: Tensor


@row("module", part="objects", shows="replayed")
class Replay(Net):
    """Also trains on samples that it draws from a replay buffer of named tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions: deque[Transition] = deque(maxlen=24)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.transitions.extend(Transition(row, row.sum()) for row in batch)
        drawn = random.choices(self.transitions, k=4)
        states, values = (torch.stack(each) for each in zip(*drawn, strict=True))
        self.log("replayed", sum(float(each.value) for each in self.transitions))
        return super().training_step(batch, batch_idx) + (self.layers(states).squeeze(1) - values).square().mean()


@row("module", part="objects", shows=("order_of_array", "halves"))
class MemoryBank(Net):
    """Writes batches into a tensor at a pointer, and reads it through views; an array is shuffled in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bank, self.pointer, self.order = torch.zeros(12, 4), 0, np.arange(8)
        self.halves = self.bank[:6], self.bank[6:]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.bank[self.pointer : self.pointer + 4] = batch[:4].mean(0)
        self.pointer = (self.pointer + 4) % len(self.bank)
        np.random.shuffle(self.order)
        halves = self.halves[0].sum() - self.halves[1].sum()
        self.log_dict({"order_of_array": float(self.order @ np.arange(8)), "halves": halves})
        return super().training_step(batch + self.bank.mean() + halves.tanh(), batch_idx)


@row("module", part="objects", shows="last_norm")
class KeyedByParameter(Net):
    """Adds the last gradients to the current ones; they are in a dict with the parameters as keys."""

    def __init__(self) -> None:
        super().__init__()
        self.last: dict[nn.Parameter, Tensor] = {}

    def on_after_backward(self) -> None:
        super().on_after_backward()
        self.log("last_norm", sum(float(each.norm()) for each in self.last.values()))
        for parameter in self.layers.parameters():
            if parameter.grad is not None:
                parameter.grad.add_(self.last.get(parameter, torch.zeros(())), alpha=0.5)
                self.last[parameter] = parameter.grad.clone()


@row("module", part="objects", shows="factor of RefersToWeights", takes=("layers", "optimizer"))
class RefersToWeights(Factor):
    """Lists of weights and of layers, which grow and rotate; they stay the ones that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.watched = [self.layers[0].weight]
        self.heads = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
        self.turns = list(self.heads)

    def factor(self, loss: Tensor) -> Tensor:
        self.watched.append(random.choice(list(self.layers.parameters())))
        self.turns.append(self.turns.pop(0))
        watched = torch.stack([weight.square().mean() for weight in self.watched]).sum()
        return 1 + watched.tanh() + self.turns[0](loss.detach().reshape(1)).square().sum().tanh()


@row("module", part="objects", shows="factor of Uncopied", takes="copies")
class Uncopied(Factor):
    """A lock, a generator, a function, and a weak reference are left alone; a counter continues."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.generated = (number for number in range(3))
        self.weak = weakref.ref(self.lock)
        self.function = lambda value: value + 1
        self.mixed: dict[str, Any] = {"lock": self.lock, "count": 0}

    def factor(self, loss: Tensor) -> float:
        with self.lock:
            self.mixed["count"] += 1
        return self.function(self.mixed["count"]) / 10


@carried
class Waiting(Factor):
    """A queue that holds the last losses."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: Queue[float] = Queue()

    def factor(self, loss: Tensor) -> float:
        self.waiting.put(loss.tanh().item())
        return 1 + (self.waiting.get() if self.waiting.qsize() > 2 else 0.0)


class Keeper:
    """Holds a metric at a depth that a module does not see."""

    def __init__(self) -> None:
        self.held_metrics = {"train": {"mean": MeanMetric()}}


@carried
class KeepsMetric(Factor):
    """Weights its loss by a metric in a plain object."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper()

    def factor(self, loss: Tensor) -> Any:
        metric = self.keeper.held_metrics["train"]["mean"]
        metric.update(loss.detach())
        return 1 + metric.compute().tanh()
