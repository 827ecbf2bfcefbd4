"""The law for attributes of callbacks, optimizers, globals, and loggers that training changes."""

from __future__ import annotations

import itertools
import math
import random
import signal
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from lightning_faulttolerant.testing.exactness import NotTheSame, Runs
from tests.faults import EVERY_STEP
from tests.object_states import (
    EDGE,
    FIRST_EPOCH,
    LATER_EPOCH,
    RAISED,
    STOPPED,
    Own,
    assert_carried,
    each_cut,
)
from tests.runs import Net, fit_net

# Callbacks without a ``state_dict``.


# Optimizers and schedules.


# Globals of modules, and attributes of classes.

RNG = np.random.default_rng(0)
PYTHON_RNG = random.Random(0)
TORCH_RNG = torch.Generator().manual_seed(0)
LOSSES: list[float] = []
CONFIG = {"scale": 1.0}
num_steps = 0


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
