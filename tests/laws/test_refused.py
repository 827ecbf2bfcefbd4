"""What a checkpoint can't carry is refused by name, with advice; and who follows the advice resumes exactly."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_faulttolerant import FaultTolerance, NotExactError
from tests.laws.cuts import Cut
from tests.laws.rows import Factor, Group, Net, Row
from tests.laws.runs import Training
from tests.laws.test_resume import resumes
from tests.messages import plain

CUT = Cut(at=(1, 3))


class Iterators(Factor):
    """Counts, and alternates, with iterators of the standard library."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.alternating, self.left = count(1), cycle([1.0, 2.0]), iter(range(10, 90))

    def factor(self, loss: Tensor) -> float:
        return next(self.numbers) * next(self.alternating) + next(self.left)


class Grows(Factor):
    """Creates a teacher after some training."""

    def factor(self, loss: Tensor) -> Any:
        if self.global_step == 3:
            self.teacher = nn.Linear(4, 1)
        return 1 + self.teacher(torch.ones(4)).sum() if hasattr(self, "teacher") else 1.0


class Swaps(Factor):
    """Swaps two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.twins = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])

    def factor(self, loss: Tensor) -> Any:
        if self.global_step == 3:
            self.twins[0], self.twins[1] = self.twins[1], self.twins[0]
        return 1 + self.twins[0](torch.ones(4)).sum() + 2 * self.twins[1](torch.ones(4)).sum()


class Opens(Net):
    """Opens a file in a hook that a resume in the middle of an epoch does not call."""

    def on_train_epoch_start(self) -> None:
        self.handle = open(__file__)  # noqa: SIM115 - closed at the end of the epoch

    def on_train_epoch_end(self) -> None:
        self.handle.close()


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
            config.scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


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

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return super().on_before_batch_transfer(batch, dataloader_idx).double()


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


MODULES = [
    Iterators, Grows, Swaps, Opens, AddsTensor, ReplacesOptimizer, ReplacesScheduler, LateMetric, LeavesOut,
    BecomesDouble,
]  # fmt: skip
ROWS = [*(Row(name=kind.__name__, module=kind) for kind in MODULES), Row(name="Wraps", callbacks=Wraps)]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_no_resume_can_restore_is_refused(row: Row, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A resume without what training has created, moved, replaced, or opened is refused, and says what to do."""
    training = Training(group=Group(rows=(row,)), root=tmp_path)
    assert training.start(CUT, run_id="run").codes == [CUT.exit_code]
    refused = training.start(run_id="run")
    assert refused.codes == [1]
    assert not refused.events[0]
    assert plain(refused.output.rpartition("NotExactError: ")[2], DIR=tmp_path) == snapshot


def test_graph_of_the_batch_before(tmp_path: Path) -> None:
    """A kept tensor has no graph after a resume: going back through it is an error, not a silent loss."""
    training = Training(group=Group(rows=(Row(name="graph", module=KeepsGraph),)), root=tmp_path)
    assert training.start(CUT, run_id="run").codes == [CUT.exit_code]
    failed = training.start(run_id="run")
    assert failed.codes == [1]
    assert "from before the interruption" in failed.output


class GrowsFirst(Factor):
    """Follows the advice: the teacher is there from the start."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(4, 1)

    def factor(self, loss: Tensor) -> Any:
        return 1.0 if self.global_step < 4 else 1 + self.teacher(torch.ones(4)).sum()


class ChoosesLayer(Factor):
    """Follows the advice: it swaps the order of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.twins, self.first = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)]), 0

    def factor(self, loss: Tensor) -> Any:
        self.first = 1 if self.global_step >= 3 else 0
        return 1 + self.twins[self.first](torch.ones(4)).sum() + 2 * self.twins[1 - self.first](torch.ones(4)).sum()


class OpensAtTheStart(Factor):
    """Follows the advice: it opens its file in a hook that each start calls."""

    def on_train_start(self) -> None:
        self.handle = open(__file__)  # noqa: SIM115 - closed at the end of the fit

    def factor(self, loss: Tensor) -> float:
        return float(self.handle.readable())

    def on_train_end(self) -> None:
        self.handle.close()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_who_follows_the_advice_resumes() -> None:
    """What was refused resumes exactly, once it is written as the message says."""
    for kind in (GrowsFirst, ChoosesLayer, OpensAtTheStart):
        resumes(Group(rows=(Row(name=kind.__name__, module=kind),)))


class ReturnsWeight(Callback):
    """Returns a weight of the module in its state."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.held = [pl_module.layers[0].weight]

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__


class SavesNothing(Net):
    """Has a hook that always fails."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raise KeyError("wrong")


def fit(root: Path, *callbacks: Callback, module: Callable[[], Net] = Net, ckpt_path: Path | None = None) -> None:
    """Fit in this process."""
    group = Group(rows=())
    ours = FaultTolerance(root / "autosaves", every_n_train_steps=1)
    arguments = {**group.trainer(), "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    Trainer(callbacks=[*callbacks, ours], default_root_dir=root, accelerator="cpu", **arguments).fit(
        module(), **group.data(), ckpt_path=ckpt_path
    )


def test_a_callback_that_returns_a_weight_is_refused(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A resume would give it a copy of the weight; a hook that can't save anything ends the fit with its own error."""
    with pytest.raises(NotExactError) as refused:
        fit(tmp_path / "returns", ReturnsWeight())
    assert plain(str(refused.value), DIR=tmp_path) == snapshot
    with pytest.raises(KeyError, match="wrong"):
        fit(tmp_path / "wrong", module=SavesNothing)


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
    stopping = lambda: EarlyStopping("val_loss", patience=9)  # noqa: E731
    fit(tmp_path / "first", SavesOwn(), stopping())
    messages = []
    for name in CHANGES:
        with pytest.raises(NotExactError) as refused:
            fit(tmp_path / name, SavesOwn(), stopping(), ckpt_path=tmp_path / "first" / f"{name}.ckpt")
        messages.append(plain(str(refused.value), DIR=tmp_path))
    assert messages == snapshot
