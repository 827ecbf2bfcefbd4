"""Steps that go wrong: the state before one is written, and continues exactly; a batch can be left out."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from syrupy.assertion import SnapshotAssertion
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_faulttolerant import FaultTolerance, FlightRecorder, MeasuredStep
from tests.laws.cuts import Cut
from tests.laws.data_sets import NoisyDataset
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import QUIET, Training, assert_continues
from tests.laws.starts import Start, one, slow_half, told, whole
from tests.messages import plain

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step"),
    pytest.mark.filterwarnings("ignore:.*dataloader_iter.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:Using `DistributedSampler` with the dataloaders"),
    pytest.mark.filterwarnings("ignore:It is recommended to use .self.log"),
]
STEP = 8
"""The step of most incidents: batch 2 of the second epoch."""


def is_step(step: MeasuredStep) -> bool:
    """Call a step an incident in which nothing is wrong."""
    return step.step == STEP


class Spoilt(Net):
    """The loss of one step is NaN."""

    def loss(self, batch: Tensor) -> Tensor:
        is_spoilt = self.trainer.training and self.trainer.fit_loop.total_batch_idx == STEP
        return super().loss(batch) * (torch.nan if is_spoilt else 1)


class Overflows(Net):
    """The loss is finite and its gradients are not, as in an overflow, which a scaler of its own looks for."""

    is_scaled = True

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.scaler = torch.amp.GradScaler("cpu", enabled=self.is_scaled)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        output = self.layers(batch)
        is_spoilt = self.trainer.fit_loop.total_batch_idx == STEP
        loss = output.square().mean() + ((output * 0).square().sum().sqrt() if is_spoilt else 0)
        optimizer.zero_grad()
        self.manual_backward(self.scaler.scale(loss))
        self.scaler.step(optimizer)
        self.scaler.update()


class OverflowsUnscaled(Overflows):
    """Its scaler is off."""

    is_scaled = False


class Raises(Callback):
    """Raises an exception in a hook of one batch."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._raise)

    def _raise(self, trainer: Trainer, *_: Any) -> None:
        if trainer.fit_loop.total_batch_idx == STEP:
            raise ValueError("planted")


def recorded(rule: Any = "nan", *, stop: bool = False, every: int = 1, **more: Any) -> Start:
    """Return a start of a fit with a recorder, whatever the budget for captures."""
    options = {"every_n_train_steps": every, "overhead_budget": 1e-9}
    return one(companions=lambda: [FlightRecorder(rule, stop=stop)], options=options, **more)


def again(**more: Any) -> Start:
    """Return a start of another run, from the file of the only incident."""
    find = lambda root: next(root.rglob("incident-*.ckpt"))  # noqa: E731
    return one(ckpt=find, seed=99, options={"dirpath": "again"}, **more)


SCENARIOS: dict[str, list[Start]] = {
    "nothing is wrong": [recorded(is_step), again()],
    "accumulated": [recorded(is_step, accumulate_grad_batches=3), again(accumulate_grad_batches=3)],
    "exception": [recorded(callbacks=lambda: Raises("on_before_backward")), again()],
    "stop": [recorded(module=Spoilt, stop=True)] * 2,
    "exception after the optimizer, saved before": [recorded(every=3, callbacks=lambda: Raises("on_train_batch_end"))],
    "overflow that a scaler looks for": [recorded(module=Overflows)],
    "nan": [recorded(module=Spoilt)],
    "overflow": [recorded(module=OverflowsUnscaled)],
}


def reports(root: Path) -> str:
    """Return the files of incidents, with what the reports tell."""
    lines = []
    for path in sorted(root.rglob("incident-*")):
        found = json.loads(path.read_text()) if path.suffix == ".json" else {"what": "a state", "checkpoint": ""}
        lines.append(f"{path.parent.name}/{path.name}: {found['what']} {found['checkpoint']}")
    return plain("\n".join(lines), DIR=root)


@pytest.mark.parametrize("name", slow_half(SCENARIOS))
def test_incidents(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """The recorder changes no batch; an incident has a report, and the state before it, if nothing has moved since."""
    whole(SCENARIOS["nothing is wrong"])  # it is kept, as the whole run of those that raise, too
    text = f"{told(tmp_path, SCENARIOS[name])}\n{reports(tmp_path)}"
    assert re.sub(r"loss is \d.*?\d(?=[;.]? |\.?\n)", "loss is LOSS", text) == snapshot


class SpoiltOnOne(Net):
    """Only the second rank has a NaN, in one step; without noise of its own, so that it differs in nothing else."""

    def loss(self, batch: Tensor) -> Tensor:
        place = (self.trainer.global_rank, self.trainer.fit_loop.total_batch_idx)
        return super().loss(batch) * (torch.nan if self.trainer.training and place == (1, 3) else 1)


def test_two_ranks_write_the_state_of_both(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A NaN on one rank: its report names the loss, the other's the gradient that came from it. Both name the state."""
    arguments = {"max_epochs": 1, "limit_val_batches": 0}
    row = Row(name="two", module=SpoiltOnOne, train=rows_of(40), trainer=arguments, callbacks=lambda: FlightRecorder())
    training = Training(group=Group(rows=(row,)), root=tmp_path, num_ranks=2)
    assert training.start(every_n_train_steps=2).codes == [0, 0], training.starts[0].output
    assert reports(tmp_path) == snapshot


VARIABLE = "PL_FAULT_TOLERANT_SKIP_BATCHES"


class Exact(LightningModule):
    """Its weight is the sum of the batches that reached it, each a power of two: any mistake is visible."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return -self.weight * batch[0].sum()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        by_epoch = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_epoch, "interval": "epoch"}}


class Stream(IterableDataset[list[Tensor]]):
    """Six batches, each a power of two; nobody knows beforehand that they are six."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter([[torch.tensor(2.0**number, dtype=torch.float64)] for number in range(6)])


def known() -> DataLoader[Any]:
    """Return a loader of the same batches with a length."""
    return DataLoader(TensorDataset(2.0 ** torch.arange(6, dtype=torch.float64)), batch_size=1)


def streamed() -> DataLoader[Any]:
    """Return a loader of the stream."""
    return DataLoader(Stream(), batch_size=None)


WINDOWS: list[tuple[Any, int, list[int], int]] = [
    (known, 1, [5], 5), (known, 2, [0], 3), (known, 2, [2, 3], 2), (known, 3, [0, 2], 2), (known, 4, [4, 5], 1),
    (streamed, 4, [4, 5], 1), (streamed, 4, [5, 6, 7], 2), (streamed, 4, [0, 1, 2, 3], 1),
]  # fmt: skip


@pytest.mark.parametrize(("loader", "window", "skips", "num_steps"), WINDOWS)
def test_each_other_batch_is_trained_once(
    loader: Any, window: int, skips: list[int], num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any window of accumulated gradients, the gradients of all other batches reach the weight, each once."""
    monkeypatch.setenv(VARIABLE, ",".join(f"0:{batch}" for batch in skips))
    settings = {**QUIET, "max_epochs": 1, "logger": False, "enable_checkpointing": False, "default_root_dir": tmp_path}
    trainer = Trainer(callbacks=[FaultTolerance()], accumulate_grad_batches=window, **settings)
    trainer.fit(Exact(), loader())
    weight = trainer.lightning_module.weight.item() * window
    assert round(weight, 9) == sum(2**batch for batch in range(6) if batch not in skips)
    assert trainer.global_step == num_steps
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5  # the epoch is over, whichever batch was its last


class Broken(NoisyDataset):
    """One of its samples can't be loaded."""

    def __getitem__(self, index: int) -> Tensor:
        if index == 5:
            torch.randn(2)
            raise OSError("sample 5 is broken")
        return super().__getitem__(index)


def broken(num_workers: int = 0) -> Any:
    """Return what makes a loader whose batch 1 can't be loaded."""
    return lambda: DataLoader(Broken(24), batch_size=4, num_workers=num_workers)


OFTEN = {"options": {"every_n_train_steps": None, "train_time_interval": timedelta(microseconds=1)}}
WINDOW: dict[str, Any] = {"module": Exact, "train": streamed, "accumulate_grad_batches": 4, "validation": lambda: None}


def skips(text: str, cut: Any = None, **more: Any) -> Start:
    """Return a start that leaves batches out."""
    return one(cut, environment={VARIABLE: text}, **more)


SKIPS: dict[str, list[Start]] = {
    "later starts": [skips("0:1, 1:2, 9:9", (0, 3)), one()],
    "too late": [one((0, 4)), skips("0:1")],
    "too late in a window": [one((0, 3), **WINDOW, **OFTEN), skips("0:3", **WINDOW, **OFTEN)],
    "in time in a window": [skips("0:3", (0, 4), **WINDOW), one(**WINDOW)],
    "another batch is broken in a worker": [skips("0:0", train=broken(2))],
    "last of a stream": [skips("0:5", **WINDOW)],
    "no batch": [skips("3:17;4:2")],
}


@pytest.mark.parametrize("name", slow_half(SKIPS))
def test_skips(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A batch left out is never silent; a request that can't be met is refused, or a warning."""
    assert told(tmp_path, SKIPS[name]) == snapshot


WORKERS = {"accumulate_grad_batches": 3, "val_check_interval": 3}
EXACT: dict[str, tuple[str, dict[str, Any], list[Cut]]] = {
    "that can't be loaded": ("0:1,1:1", {"train": broken()}, [Cut(at=(0, 2)), Cut(at=(0, 5)), Cut(at=(1, 2))]),
    "in windows, with workers": (
        "0:2,0:3,0:5,1:4", {"train": rows_of(24, num_workers=2), "trainer": WORKERS},
        [Cut(at=(0, 4)), Cut(at=(1, 0)), Cut(at=(1, 5))],
    ),
    "that can't be loaded in a worker": ("0:1,1:1", {"train": broken(2)}, [Cut(at=(0, 2)), Cut(at=(1, 2))]),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_killed_around_it_equals_undisturbed(name: str, tmp_path: Path) -> None:
    """A run that is killed around a batch left out equals the undisturbed run that leaves it out."""
    text, row, cuts = EXACT[name]
    group = Group(rows=(Row(name="skips", repeats=3, **row),))
    asks = lambda: os.environ.update({VARIABLE: text})  # noqa: E731
    whole, cut = (Training(group=group, root=tmp_path / each, before=asks) for each in ("whole", "cut"))
    assert_continues(whole.finished().events, cut, cuts)
