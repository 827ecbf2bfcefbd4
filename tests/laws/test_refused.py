"""What a checkpoint can't carry is refused by name, with advice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import Metric

from tests.laws.cuts import Cut
from tests.laws.data_sets import NoisyDataset
from tests.laws.features.loaders_with_state import WARNS, Prefetching
from tests.laws.features.user_callbacks import Tables
from tests.laws.rows import Factor, Group, Net, Row
from tests.laws.runs import Training
from tests.messages import plain

CUT = Cut(at=(1, 3))


class Swaps(Factor):
    """Swaps two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def factor(self, loss: Tensor) -> Any:
        if self.global_step == 3:
            self.twins[0], self.twins[1] = self.twins[1], self.twins[0]
        return 1 + self.twins[0](torch.ones(4)).sum() + 2 * self.twins[1](torch.ones(4)).sum()


class AddsTensor(Net):
    """Adds a new tensor to its optimizer after the first epoch."""

    def on_train_epoch_end(self) -> None:
        [optimizer] = self.trainer.optimizers
        if self.current_epoch == 0:
            optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})


class ReplacesOptimizer(Net):
    """Continues with another optimizer in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [torch.optim.AdamW(self.parameters(), lr=0.01)]


class ReplacesScheduler(Net):
    """Continues with another scheduler in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            [config], [optimizer] = self.trainer.lr_scheduler_configs, self.trainer.optimizers
            config.scheduler = ExponentialLR(optimizer, 0.5)


class GetsScheduler(Net):
    """Gives its scheduler another one to hold, while it trains."""

    def on_train_epoch_end(self) -> None:
        self.trainer.lr_scheduler_configs[0].scheduler.more = [ExponentialLR(self.trainer.optimizers[0], 0.9)]


class Late(Metric):
    """Creates its states at its first batch."""

    def update(self, values: Tensor) -> None:
        if not hasattr(self, "total"):
            self.add_state("total", torch.zeros(values.shape[1:]), dist_reduce_fx="sum")
        self.total = self.total + values.sum(0)

    def compute(self) -> Tensor:
        return self.total.sum()


class LateMetric(Net):
    """Has a metric that creates its states at its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.late = Late()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.late.update(batch)
        return super().training_step(batch, batch_idx)


class LeavesOut(Net):
    """Leaves out a layer that is never used, and that differs in each process."""

    strict_loading = False

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 1).requires_grad_(False)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found = super().state_dict(*args, **kwargs)
        return {name: value for name, value in found.items() if not name.startswith("unused.")}


class BecomesDouble(Net):
    """Becomes double when its fit starts, after a checkpoint is loaded."""

    def on_fit_start(self) -> None:
        self.double()


class Holds(nn.Module):
    """A module that refers to another one."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.__dict__["other"] = other


class Wraps(Callback):
    """Creates a module that refers to a layer of the trained one."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.made = Holds(pl_module.layers[0])


class KeepsGraph(Net):
    """Lets the gradient of a batch flow back into the previous batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | None = None

    def loss(self, batch: Tensor) -> Tensor:
        before, self.last = self.last, self.layers[0](batch).mean()
        return super().loss(batch) + (before if before is not None and self.training else 0.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def told_where() -> Any:
    """Return a loader with a state that was loaded before fit."""
    other, loader = (StatefulDataLoader(NoisyDataset(), 4) for _ in range(2))
    next(iter(other))
    loader.load_state_dict(other.state_dict())
    return loader


class KeepsSet(Prefetching):
    """Has a state that a checkpoint can't contain."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1}}


class WorkerState(DataLoader[Any]):
    """A torch loader with workers, and a useless state that the user has added."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing."""


class Loads(Callback):
    """Loads a state into the loader in the middle of the fit."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.train_dataloader.load_state_dict({"_num_yielded": 3})


class ReturnsWeight(Callback):
    """Returns a weight of the module in its state."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.held = [pl_module.layers[0].weight]

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__


ONE_LOADER = Prefetching()
STATES: dict[str, Callable[[], Any]] = {
    "told before": told_where,
    "own state and workers": lambda: WorkerState(NoisyDataset(), num_workers=1),
    "not plain": KeepsSet,
    "ahead": lambda: Prefetching(ahead=1),
}
MODULES = [
    Swaps, AddsTensor, ReplacesOptimizer, ReplacesScheduler, GetsScheduler, LateMetric, LeavesOut,
    BecomesDouble, KeepsGraph,
]  # fmt: skip
ROWS = [
    *(Row(name=kind.__name__, module=kind) for kind in MODULES),
    *(Row(name=name, train=train, warns=WARNS) for name, train in STATES.items()),
    Row(name="told in the middle", train=lambda: StatefulDataLoader(NoisyDataset(), 4), callbacks=Loads, warns=WARNS),
    Row(name="in two places", train=lambda: ONE_LOADER, validation=lambda: ONE_LOADER),
    Row(name="Wraps", callbacks=Wraps),
    Row(name="ReturnsWeight", callbacks=ReturnsWeight),
    Row(name="untrusted", callbacks=Tables, options={"trust_autosaves": False}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_no_resume_can_restore_is_refused(row: Row, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """What a resume can't restore is refused, where it can be seen at once, or in the start that resumes."""
    training = Training(group=Group(rows=(row,)), root=tmp_path)
    start = training.start(CUT, run_id="run")
    if start.codes == [CUT.exit_code]:
        start = training.start(run_id="run")
    assert start.codes == [1]
    assert plain(start.output.rpartition("Error: ")[2], DIR=tmp_path) == snapshot


def _thinned(checkpoint: dict[str, Any]) -> None:
    for state in checkpoint["optimizer_states"]:
        state["state"] = {number: {"step": one["step"]} for number, one in state["state"].items() if number}


def _zeroed(checkpoint: dict[str, Any]) -> None:
    for state in checkpoint["optimizer_states"]:
        state["state"] = {n: {name: 0 * one for name, one in own.items()} for n, own in state["state"].items()}


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "without-optimizers": lambda checkpoint: checkpoint["optimizer_states"].clear(),
    "thinned": _thinned,
    "zeros": _zeroed,
    "empty-schedulers": lambda checkpoint: checkpoint.update(lr_schedulers=[{}]),
    "without-callbacks": lambda checkpoint: checkpoint.update(callbacks={}),
}
"""Changes of a hook, by the name of a checkpoint."""


class SavesOwn(Callback):
    """Saves a checkpoint of its own for each change, as `Changes` changes it."""

    change: Any = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.change is not None:
            self.change(checkpoint)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, self.change in CHANGES.items():
            trainer.save_checkpoint(f"{trainer.default_root_dir}/{name}.ckpt")
        self.change = None


def test_states_that_a_hook_changes_in_a_users_checkpoint_are_named(
    tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """A resume from a checkpoint of the user's whose states a hook has changed is refused."""
    group = Group(rows=(Row(name="own", callbacks=lambda: [SavesOwn(), EarlyStopping("val_loss", patience=9)]),))
    Training(group=group, root=tmp_path / "first").finished()
    messages = []
    for name in CHANGES:
        start = Training(group=group, root=tmp_path / name, ckpt_path=tmp_path / "first" / f"{name}.ckpt").start()
        assert start.codes == [1]
        messages.append(plain(start.output.rpartition("Error: ")[2], DIR=tmp_path))
    assert messages == snapshot
