"""Objects that libraries and hooks put into the checkpoint continue unchanged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import SpikeDetection
from sklearn.preprocessing import LabelEncoder, StandardScaler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.rank_runs import assert_ranks_continue, for_ranks
from tests.runs import FIRST_EPOCH, Cut, Net, assert_continues, each_short_cut, fit_net, make_trainer
from tests.sharded import ShardedNet, fsdp2

pytestmark = for_ranks


@dataclass
class Settings:
    """Settings with which a script may describe its data."""

    folder: Path
    seen: list[float] = field(default_factory=list)


class WithTable(Net):
    """Saves a table of losses, its settings, and fitted encoders, as pytorch-forecasting and darts do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = pd.DataFrame({"loss": [0.0], "name": ["none"]})
        self.settings = Settings(Path("/data"))
        self.fitted: dict[str, Any] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("sum of losses", float(self.table["loss"].sum()))
        self.log("seen", float(len(self.settings.seen)))
        self.log("mean", float(self.fitted["scaler"].mean_[0]) if self.fitted else -1.0)
        self.table = pd.concat([self.table, pd.DataFrame({"loss": [loss.item()], "name": [f"batch {batch_idx}"]})])
        self.settings.seen.append(loss.item())
        self.fitted["scaler"] = StandardScaler().fit(np.array(self.settings.seen)[:, None])
        self.fitted["encoder"] = LabelEncoder().fit(self.table["name"])
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["table"] = self.table
        checkpoint["described"] = {"settings": self.settings, "fitted": self.fitted}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.table = checkpoint["table"]
        self.settings = checkpoint["described"]["settings"]
        self.fitted = checkpoint["described"]["fitted"]


class Keeps(Callback):
    """Has a metric and a module as objects in its state."""

    def __init__(self) -> None:
        self.metric = MeanMetric()
        self.slow = nn.Linear(1, 1)
        with torch.no_grad():
            self.slow.weight.zero_()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.metric.update(outputs["loss"])
        with torch.no_grad():
            self.slow.weight.add_(outputs["loss"].item())
        pl_module.log("mean so far", self.metric.compute(), batch_size=4)
        pl_module.log("slow", self.slow.weight.sum(), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "slow": self.slow, "where": Path("/data")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["where"] == Path("/data")
        self.metric, self.slow = state_dict["metric"], state_dict["slow"]


@each_short_cut
def test_objects_of_a_module(cut: Cut) -> None:
    """A DataFrame, encoders, and a dataclass that the module's hooks save continue unchanged."""
    assert_continues(cut, module=WithTable)


@each_short_cut
def test_objects_of_a_callback(cut: Cut) -> None:
    """A metric, a module, and a path in a callback's state continue unchanged."""
    assert_continues(cut, users=lambda: [Keeps()])


class Encoded(LightningDataModule):
    """Fits its encoder once, and takes it from the checkpoint afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder: Any = None

    def setup(self, stage: str) -> None:
        self.encoder = self.encoder or LabelEncoder().fit([f"class {number}" for number in torch.randperm(9)[:3]])

    def train_dataloader(self) -> Any:
        offset = sum(int(name[-1]) for name in self.encoder.classes_)
        return DataLoader(NoisyDataset(20 + 4 * (offset % 2)), batch_size=4, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(4), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"encoder": self.encoder}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.encoder = state_dict["encoder"]


def test_encoder_of_a_data_module() -> None:
    """A data module's state_dict may contain an encoder."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory, max_epochs=1)
        trainer.fit(Net(), datamodule=Encoded())
        return trainer

    [cost] = assert_resumes_exactly(fit, [KillAt(3)], options={"every_n_train_steps": 1})
    assert cost.batch == 3


@pytest.mark.parametrize("as_path", [str, Path])
def test_spike_detection_with_a_path(as_path: Callable[[str], Any]) -> None:
    """Lightning's callback saves its path object."""

    def users() -> list[Callback]:
        return [SpikeDetection(window=4, warmup=2, atol=1e6, rtol=None, exclude_batches_path=as_path("unused.json"))]

    assert_continues(Cut(kill=3, every=1, continues_at=(0, 3)), users=users)


def test_objects_after_an_exception() -> None:
    """A capture keeps the state of a callback, including objects, as it was."""

    class Fails(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("once")

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net([Keeps(), *callbacks], directory, module=WithTable())

    [cost] = assert_resumes_exactly(fit, [Fails()], options={"overhead_budget": 1.0, "every_n_train_steps": None})
    assert (cost.epoch, cost.batch) == (0, 3)


def test_written_in_background() -> None:
    """With async_save the objects are those at the time of the save."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net([Keeps(), *callbacks], directory, module=WithTable())

    [cost] = assert_resumes_exactly(fit, [KillAt(4)], options={"every_n_train_steps": 1, "async_save": True})
    assert cost.batch > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_each_rank_has_its_own(strategy: str) -> None:
    """Each rank continues with its callback's objects, in one file and beside shards."""
    more: dict[str, Any] = {} if strategy == "ddp" else {"module": ShardedNet, "strategy": fsdp2()}
    assert_ranks_continue(FIRST_EPOCH, users=lambda: [Keeps()], **more)


SCRIPT = """
import os, signal, sys
from dataclasses import dataclass

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Setup:
    seen: int


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.setting = Setup(0)

    def training_step(self, batch, batch_idx):
        self.setting.seen += 1
        return self.layer(batch[0]).square().mean()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["setting"] = self.setting

    def on_load_checkpoint(self, checkpoint):
        self.setting = checkpoint["setting"]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Killed(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 3 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.manual_seed(1)
    model = Model()
    loader = DataLoader(TensorDataset(torch.rand(24, 2)), batch_size=4, shuffle=True)
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, callbacks=[Killed()])
    trainer.fit(model, loader)
    print("seen", model.setting.seen, type(model.setting) is Setup)
"""


@pytest.mark.slow
def test_a_class_of_the_script_itself(tmp_path: Path) -> None:
    """A script that runs by its name finds its own classes when it restarts, with only the variable set."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PL_FAULT_TOLERANT_TRAINING": "1", "PYTHONPATH": os.getcwd()}

    def start() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(script)]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False
        )

    first, second = start(), start()
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert second.returncode == 0, second.stderr
    assert "Resumed exactly" in second.stderr
    assert "seen 6 True" in second.stdout
