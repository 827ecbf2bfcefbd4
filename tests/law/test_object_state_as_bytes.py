"""Objects that only their library can read are carried as bytes in a trusted autosave, and named in others."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.tree import DecisionTreeRegressor
from torch import nn

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.state.packing import pack_blobs, unpack_blobs
from lightning_faulttolerant.testing import KillAt
from tests.damage import Payload
from tests.processes import run
from tests.runs import Cut, assert_continues, each_short_cut, fit_net
from tests.scripts import autosaves


class Tables(Callback):
    """Records the losses in two tables: one that is new each time, and one that changes in place."""

    def __init__(self) -> None:
        self.changed = pd.DataFrame({"loss": [0.0] * 10})
        self.replaced: Any = None
        self.same: Any = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs["loss"].item()
        self.changed.loc[batch_idx, "loss"] += loss
        before = [] if self.replaced is None else self.replaced["loss"].tolist()
        self.replaced = pd.DataFrame({"loss": [*before, loss], "name": "a batch"})
        self.same = self.replaced
        pl_module.log("changed", float(self.changed["loss"].sum()), batch_size=4)
        pl_module.log("replaced", float(self.replaced["loss"].sum()), batch_size=4)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        pl_module.log("is the same", float(self.same is self.replaced), batch_size=4)


class Fits(Callback):
    """Fits a tree to the losses, and keeps a copy of the layers as a teacher."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tree: Any = None
        self.teacher: Any = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(outputs["loss"].item())
        if batch_idx % 2 == 0:
            numbers = np.arange(len(self.losses))[:, None]
            self.tree = DecisionTreeRegressor(random_state=1).fit(numbers, self.losses)
            self.teacher = copy.deepcopy(pl_module.layers[0]).requires_grad_(requires_grad=False)
        pl_module.log("expected", float(self.tree.predict([[len(self.losses) / 2]])[0]), batch_size=4)
        pl_module.log("taught", self.teacher(torch.ones(1, 4)).sum().item(), batch_size=4)


@each_short_cut
def test_tables(cut: Cut) -> None:
    """A table that training replaces continues for all its holders, and so does one that changes in place."""
    assert_continues(cut, users=lambda: [Tables()])


@each_short_cut
def test_a_fitted_tree_and_a_module(cut: Cut) -> None:
    """A library's internal memory continues, and so does a module that training created."""
    assert_continues(cut, users=lambda: [Fits()])


class Holds(nn.Module):
    """A module that refers to another one."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.__dict__["other"] = other


class Wraps(Callback):
    """Creates a module that refers to a layer of the trained one."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.made = Holds(pl_module.layers[0])


def fit(directory: Path, *callbacks: Callback, **options: Any) -> Any:
    """Run a fit that saves to a directory at each step."""

    def main() -> None:
        fit_net([FaultTolerance(directory, every_n_train_steps=1, **options), *callbacks], directory, max_epochs=1)

    return run(main)


def test_what_refers_to_live_objects_is_named(tmp_path: Path) -> None:
    """The object is named and not copied, since a copy of the module's layer would not be trained."""
    ended = fit(tmp_path, Wraps(), KillAt(3))
    assert ended.exit_code == -signal.SIGKILL
    assert (
        "training has changed something that a checkpoint can't carry.\n  - callbacks['Wraps#0'].made" in ended.output
    )
    assert "which refers to a Linear, which other objects also use" in ended.output


def test_named_where_it_is_not_trusted(tmp_path: Path) -> None:
    """Without trust there is a warning at the save, and an error at the resume."""
    ended = fit(tmp_path, Tables(), KillAt(3), trust_autosaves=False)
    assert ended.exit_code == -signal.SIGKILL
    assert "a pandas.DataFrame, which only its library can read" in ended.output
    ended = fit(tmp_path, Tables(), trust_autosaves=False)
    assert ended.exit_code == 1
    assert "can't be resumed exactly: training has changed something that a checkpoint can't carry" in ended.output


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """Return a directory that other users can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def plant(path: Path, payload: Path) -> None:
    """Make the object state of an autosave run code when it is unpickled."""
    checkpoint = load_file(path)
    part = checkpoint["lightning_faulttolerant"]
    state = unpack_blobs(part["ranks"][0])
    rows = [row for row in state["objects"]["table"] if isinstance(row, list) and row[0] == "pickled"]
    assert rows
    rows[0][2] = pickle.dumps(Payload(payload))
    part["ranks"] = [pack_blobs(state)]
    torch.save(checkpoint, path)


@pytest.mark.parametrize("is_trusted", [False, True])
def test_what_others_have_planted_is_never_run(is_trusted: bool, elsewhere: Path) -> None:
    """Planted code does not run if the autosave is not trusted; in a trusted one it would."""
    assert fit(elsewhere, Tables(), KillAt(3)).exit_code == -signal.SIGKILL
    path, payload = autosaves(elsewhere)[-1], elsewhere / "run by the payload"
    plant(path, payload)
    if not is_trusted:
        os.chmod(path, 0o666)
    ended = fit(elsewhere, Tables())
    assert payload.exists() == is_trusted
    assert is_trusted or f"{path} is not trusted" in ended.output
