"""State in attributes of a module that no ``state_dict`` contains: numbers, collections, tensors, networks."""

from __future__ import annotations

import copy
import functools
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


class Phase(Enum):
    WARM_UP = "warm-up"
    MAIN = "main"


@carried
class Values(Factor):
    """Immutable values: numbers, one of which is ``None`` at first, bytes, dates, a path, and a member of an enum."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls, self.turned, self.written = 0, 0j, b""
        self.running: float | None = None
        self.today, self.spent, self.where = datetime(2026, 1, 30), timedelta(), Path("a")
        self.phase = Phase.WARM_UP

    def factor(self, loss: Tensor) -> float:
        self.num_calls += 1
        self.turned += 1j
        self.written += bytes([self.num_calls])
        self.running = loss.item() if self.running is None else 0.9 * self.running + 0.1 * loss.item()
        self.today += timedelta(days=1)
        self.spent += timedelta(hours=5)
        self.where = self.where / f"{self.today:%d}"
        self.phase = Phase.WARM_UP if self.num_calls % 3 else Phase.MAIN
        numbers = self.num_calls + self.running + self.turned.imag + sum(self.written) / 9
        return numbers / 20 + self.days() / 30 + (self.phase is Phase.MAIN)

    def days(self) -> float:
        return self.today.day + self.spent / timedelta(days=1) + len(self.where.parts)


@functools.partial(carried, takes="copies")
class Collections(Factor):
    """Collections and a queue of the standard library; the order of a dict matters, its keys are tuples and members."""

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[float] = deque(maxlen=3)
        self.seen: set[int] = set()
        self.sums: defaultdict[int, float] = defaultdict(float)
        self.counts: Counter[int] = Counter()
        self.visits: dict[tuple[int, bool], int] = {}
        self.per_phase: OrderedDict[Phase, float] = OrderedDict()
        self.waiting: Queue[float] = Queue()

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
        self.waiting.put(value)
        waited = self.waiting.get() / (value + 0.1) if self.waiting.qsize() > 2 else 0.0
        total = waited + len(self.seen) / 10 + next(iter(self.per_phase.values())) + max(self.visits.values()) / 9
        return statistics.median(self.recent) / (value + 0.1) + rarest + total + self.sums[7]


@carried
class ValidationLosses(Factor):
    """Keeps its validation losses, and slows down with the best; the first step, of the sanity check, draws a table."""

    def __init__(self) -> None:
        super().__init__()
        self.validation_losses: list[tuple[float, int]] = []
        self.last, self.table = (1.0, 0), None

    def factor(self, loss: Tensor) -> float:
        drawn = self.last[0] + (0.0 if self.table is None else float(self.table[0]))
        return min(self.validation_losses, default=self.last)[0] + len(self.validation_losses) / 10 + drawn

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> Any:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.table = torch.rand(4096) if self.table is None else self.table
        self.last = (float(self.layers(batch).square().mean()), batch_idx)
        self.validation_losses.append(self.last)


@row("module", part="objects", shows="factor of HiddenTeacher", takes="layers")
class HiddenTeacher(Factor):
    """Keeps its teacher in a list, so that it is not trained; the teacher follows by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [copy.deepcopy(self.layers).eval()]

    @torch.no_grad()
    def factor(self, loss: Tensor) -> Tensor:
        for slow, fast in zip(self.teacher[0].parameters(), self.layers.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
        return 1 + self.teacher[0](torch.ones(2, 4)).sum().tanh()


class Transition(NamedTuple):
    """An entry of a replay buffer."""

    state: Tensor
    value: Tensor


@carried
class Replay(Factor):
    """Draws from a replay buffer of named tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions: deque[Transition] = deque(maxlen=24)

    def factor(self, loss: Tensor) -> Tensor:
        self.transitions.append(Transition(loss.detach(), loss.detach().tanh()))
        states, values = map(torch.stack, zip(*random.choices(self.transitions, k=4), strict=True))
        return 1 + states.mean().tanh() + values.sum() + len(self.transitions) / 10


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


@row("module", part="objects", shows="factor of RefersToWeights", takes=("layers", "optimizer"), ranks=False)
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


@row("module", part="objects", shows=("epoch_mean", "epoch_count"), takes="copies")
class Outputs(Net):
    """Keeps outputs with their graphs and clears them, as Lightning's migration guide says."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step_outputs: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.training_step_outputs.append(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("epoch_mean", torch.stack(self.training_step_outputs).mean())
        self.log("epoch_count", float(len(self.training_step_outputs)))
        self.training_step_outputs.clear()


@row("module", part="held", shows=("own", "drawn"))
class Holding(Net):
    """Draws in its step from its own generators, one of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.python = random.Random(0)
        self.others = {"numpy": np.random.default_rng(0), "legacy": [np.random.RandomState(0)]}
        self.torch = torch.Generator().manual_seed(0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        own = self.python.gauss(0, 1) + self.others["numpy"].normal() + self.others["legacy"][0].randn()
        drawn = torch.randn((), generator=self.torch)
        self.log_dict({"own": float(own), "drawn": drawn})
        return super().training_step(batch + float(own) + drawn, batch_idx)
