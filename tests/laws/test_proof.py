"""The law of the proof: a restore that is broken on purpose is refused by name, and never called exact."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchmetrics import MeanMetric

from tests.laws.cuts import Cut
from tests.laws.rows import Group, Net, Row
from tests.laws.runs import Training

CUT = Cut(at=(1, 3))
Break = Callable[[], object]


class Table:
    """Has a state."""

    def __init__(self) -> None:
        self.num_losses = 0

    def state_dict(self) -> dict[str, int]:
        """Return the number."""
        return {"num_losses": self.num_losses}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Restore the number."""
        self.num_losses = state_dict["num_losses"]


class Full(Net):
    """Has a metric, an object with a state, a generator, two schedulers, and an open accumulation window."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()
        self.table = Table()
        self.rng = random.Random(3)

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch) * self.rng.uniform(0.9, 1.1)
        self.mean.update(loss.detach())
        self.table.num_losses += 1
        return loss

    def configure_optimizers(self) -> Any:
        found = super().configure_optimizers()
        plateau = ReduceLROnPlateau(found["optimizer"], patience=0)
        return [found["optimizer"]], [found["lr_scheduler"], {"scheduler": plateau, "monitor": "loss"}]


class Keeps(Callback):
    """Counts batches, and the seconds of this process, in its state."""

    def __init__(self) -> None:
        self.num_batches, self.began = 0, time.monotonic()

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches, "seconds": time.monotonic() - self.began, "pid": str(os.getpid())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]


ROW = Row(
    name="full",
    module=Full,
    callbacks=lambda: [EarlyStopping("loss", patience=9), Keeps()],
    trainer={"accumulate_grad_batches": 2},
)


def lost(owner: Any, name: str) -> Break:
    """Return what makes a method of a library's do nothing."""
    return lambda: setattr(owner, name, lambda *_, **__: None)


def after(owner: Any, name: str, change: Callable[..., object]) -> Break:
    """Return what lets `change` come after a method, with the method's arguments."""

    def break_it() -> None:
        original = getattr(owner, name)

        def changed(*args: Any, **kwargs: Any) -> Any:
            returned = original(*args, **kwargs)
            change(*args)
            return returned

        setattr(owner, name, changed)

    return break_it


def zero_first(module: nn.Module, *_: Any) -> None:
    """Zero the first weight."""
    next(module.parameters()).data.zero_()


def of_optimizer(change: Callable[[torch.optim.Optimizer, dict[str, Tensor]], object]) -> Break:
    """Return what lets `change` come after each load of an optimizer, with the states of its first parameter."""
    return after(torch.optim.Optimizer, "load_state_dict", lambda one, _: change(one, next(iter(one.state.values()))))


def lose_mean(metric: MeanMetric, *_: Any) -> None:
    """Let a metric have another mean."""
    vars(metric).update(mean_value=torch.tensor(7.0))


BREAKS: dict[str, tuple[Break, str]] = {
    "a weight": (after(LightningModule, "load_state_dict", zero_first), r"weights.layers.0.weight: .*, a float32 "),
    "optimizer": (lost(torch.optim.Optimizer, "load_state_dict"), r"optimizers.0.state.0.exp_avg: .*, nothing now"),
    "a state of an optimizer": (of_optimizer(lambda _, own: own["exp_avg"].zero_()), r"optimizers.0.state.0.exp_avg: "),
    "an order": (of_optimizer(lambda _, own: own["exp_avg"].copy_(own["exp_avg"].roll(4, 0))), r"exp_avg: .* another "),
    "a rate": (of_optimizer(lambda one, _: one.param_groups[0].update(lr=0.1)), r"lr: 0.0\d+ when it was .*, 0.1 now"),
    "scheduler": (lost(LRScheduler, "load_state_dict"), r"schedulers.0.last_epoch: \d when it was saved, 0 now"),
    "plateau": (lost(ReduceLROnPlateau, "load_state_dict"), r"schedulers.1.best: [\d.]+ when it was saved, inf now"),
    "callback": (lost(EarlyStopping, "load_state_dict"), r"callbacks.EarlyStopping.*.best_score: "),
    "Python's generator": (lost(random, "setstate"), r"rng.python: 2509 bytes when it was saved"),
    "NumPy's generator": (lost(np.random, "set_state"), r"rng.numpy: \d+ bytes when it was saved"),
    "a generator": (lost(random.Random, "setstate"), r"held.objects.module.rng: "),
    "a metric": (after(MeanMetric, "__setattr__", lose_mean), r"metrics.mean"),
    "an object": (lost(Table, "load_state_dict"), r"objects.module.table"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_broken_restore_is_refused(name: str, tmp_path: Path) -> None:
    """The start that resumes names the first value that is not as it was saved; not strict, its report does."""
    break_it, expected = BREAKS[name]
    training = Training(group=Group(rows=(ROW,)), root=tmp_path)
    assert training.start(CUT, run_id="run").codes == [CUT.exit_code]
    training.before = break_it
    refused = training.start(run_id="run")
    assert refused.codes == [1], refused.output
    assert re.search(expected, refused.output), refused.output
    accepted = training.start(run_id="run", strict=False).output
    assert "Resumed NOT EXACTLY" in accepted, accepted
    assert re.search(expected, accepted), accepted
