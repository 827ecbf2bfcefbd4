"""The law of the proof: a restore that is broken on purpose is refused by name, and never called exact."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MeanMetric

from tests.laws.cuts import Cut
from tests.laws.rows import Group, Net, Row, all_rows
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


CLOCK = [0.0]
"""What a process sees outside of the run: a file of the data, the clock, a new version of a function."""


class Outside(Dataset[Tensor]):
    """Samples that depend on something outside of the run."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), float(index)) + (CLOCK[0] if "data" in PLACES else 0.0)


class Order(Sampler[int]):
    """An order that depends on something outside of the run, from the seventeenth index on."""

    def __len__(self) -> int:
        return 24

    def __iter__(self) -> Iterator[int]:
        return iter([*range(16), *(reversed(range(16, 24)) if "order" in PLACES else range(16, 24))])


class Edited(Net):
    """Has a loss that depends on something outside of the run."""

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + (CLOCK[0] if "loss" in PLACES else 0.0)


PLACES: set[str] = set()
SHUFFLED = Row(name="outside", module=Edited, train=lambda: DataLoader(Outside(), 4, sampler=Order()))
KILLED = Cut(at=(1, 1), every=4)


def killed(root: Path) -> Training:
    """Return a training that was killed three batches after an autosave."""
    training = Training(group=Group(rows=(SHUFFLED,)), root=root)
    assert training.start(KILLED, run_id="run").codes == [KILLED.exit_code]
    return training


def test_repeated_batches_are_compared(tmp_path: Path) -> None:
    """The start after a kill says how many batches it repeats, and that they were identical; the next one has none."""
    training = killed(tmp_path)
    stopped = training.start(Cut(at=(1, 3), by=signal.SIGTERM), run_id="run")
    assert re.search(r"\.ckpt \(\d+ s old\): .*; proving on 3 batches", stopped.output), stopped.output
    assert "3 repeated batches were identical to those of process 1" in stopped.output
    assert "; no batch to repeat" in training.start(run_id="run").output


@pytest.mark.parametrize(("place", "kind"), [("order", "order"), ("data", "content"), ("loss", "output")])
def test_other_batch_stops_the_run(place: str, kind: str, tmp_path: Path) -> None:
    """A batch or a loss that is another one than before the kill ends the run with 77, until that is accepted."""
    training = killed(tmp_path)

    def changes() -> None:
        PLACES.add(place)
        CLOCK[0] = 1.0

    training.before = changes
    for _ in range(2):  # it has saved nothing, and compares again
        stopped = training.start(run_id="run")
        assert stopped.codes == [77], stopped.output
        assert re.search(
            rf"repeated\.{kind}: batch 4 of epoch 0 .* than in process 1: \w+ then, \w+ now", stopped.output
        )
        assert f"--accept repeated.{kind} -- " in stopped.output
    training.before = lambda: (changes(), os.environ.update(PL_FAULT_TOLERANT_ACCEPT="repeated"))
    accepted = training.start(Cut(at=(1, 3), by=signal.SIGTERM), run_id="run")
    assert "NOT EXACT since the resume: repeated" in accepted.output, accepted.output
    assert "NOT EXACT since it resumed before batch 4 of epoch 0: repeated" in training.start(run_id="run").output


def test_other_result_of_other_threads_is_a_warning(tmp_path: Path) -> None:
    """With another number of threads, sums may differ in their last bits: that is named, and the run continues."""
    training = killed(tmp_path)

    def changes() -> None:
        torch.set_num_threads(torch.get_num_threads() + 1)
        PLACES.add("loss")
        CLOCK[0] = 1.0

    training.before = changes
    start = training.start(run_id="run")
    assert start.codes == [0], start.output
    assert re.search(r"repeated.output: batch 4 .* The arithmetic of this run may differ: threads: ", start.output)


RANKS = Row(name="ranks", warns=("Using `DistributedSampler` with", "It is recommended to use `self.log"))


@pytest.mark.parametrize("names", [("Renames", "PersistentTracker"), ("WrappedByParts", "wrapped_workers", "nested")])
def test_no_false_alarm_on_ranks(names: tuple[str, ...], tmp_path: Path) -> None:
    """Renamed buffers that differ by rank, and a loader whose iterator is not there yet, are no alarm."""
    group = Group(rows=(RANKS, *(all_rows()[name] for name in names)))
    training = Training(group=group, root=tmp_path, num_ranks=2)
    training.start(Cut(at=(0, 3)))
    assert training.start().codes == [0, 0], training.starts[-1].output
