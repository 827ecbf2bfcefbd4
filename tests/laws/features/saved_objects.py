"""Objects that hooks and ``state_dict`` put into a checkpoint: tables, encoders, dataclasses, metrics, modules."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from sklearn.preprocessing import LabelEncoder, StandardScaler
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from tests.laws.data_sets import NoisyDataset
from tests.laws.features.data_modules import Data
from tests.laws.rows import Net, add, row

# A start from a file of the user's refuses objects in it, and so does a finder of Lightning.
IN_FILES = "objects in files"


@dataclass
class Settings:
    """Settings with which a script may describe its data."""

    folder: Path
    seen: list[float] = field(default_factory=list)


@row("module", takes=("layers", IN_FILES), ranks=False)
class SavesTable(Net):
    """Saves a table of losses, its settings, and fitted encoders, as pytorch-forecasting and darts do."""

    def __init__(self) -> None:
        super().__init__()
        self.saved_table = pd.DataFrame({"loss": [0.0], "name": ["none"]})
        self.saved_settings = Settings(Path("/data"))
        self.saved_fits: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        mean = float(self.saved_fits["scaler"].mean_[0]) if self.saved_fits else -1.0
        self.log("sum of the table", float(self.saved_table["loss"].sum()) + len(self.saved_settings.seen) + mean)
        more = pd.DataFrame({"loss": [loss.item()], "name": [f"batch {batch_idx}"]})
        self.saved_table = pd.concat([self.saved_table, more], ignore_index=True)
        self.saved_settings.seen.append(loss.item())
        self.saved_fits["scaler"] = StandardScaler().fit(np.array(self.saved_settings.seen)[:, None])
        self.saved_fits["encoder"] = LabelEncoder().fit(self.saved_table["name"])
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["table"] = self.saved_table
        checkpoint["described"] = {"settings": self.saved_settings, "fits": self.saved_fits}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.saved_table = checkpoint["table"]
        self.saved_settings, self.saved_fits = checkpoint["described"]["settings"], checkpoint["described"]["fits"]


@row("callbacks", takes=("layers", IN_FILES))
class SavesModules(Callback):
    """Has a metric, a module, and a path as objects in its state."""

    def __init__(self) -> None:
        self.metric, self.slow = MeanMetric(), nn.Linear(1, 1)
        nn.init.zeros_(self.slow.weight)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        self.metric.update(outputs["loss"])
        with torch.no_grad():
            self.slow.weight.add_(outputs["loss"].item())
        pl_module.log("saved metric", self.metric.compute() + self.slow.weight.sum(), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        return {"metric": self.metric, "slow": self.slow, "where": Path("/data")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict["where"] == Path("/data")
        self.metric, self.slow = state_dict["metric"], state_dict["slow"]


@row("data", takes=IN_FILES, ranks=False)
class SavesEncoder(Data):
    """Fits its encoder once, and takes it from the checkpoint afterwards."""

    encoder: Any = None

    def setup(self, stage: str) -> None:
        self.encoder = self.encoder or LabelEncoder().fit([f"class {number}" for number in torch.randperm(9)[:3]])

    def train_dataloader(self) -> Any:
        data = NoisyDataset(24)
        data.rows = data.rows + sum(int(name[-1]) for name in self.encoder.classes_) / 10
        return DataLoader(data, batch_size=4, shuffle=True)

    def state_dict(self) -> dict[str, Any]:
        return {"encoder": self.encoder}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.encoder = state_dict["encoder"]


class Uncopied(torch.Tensor):
    """A tensor that ``torch.save`` writes, but that can't be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("no copies of this one")


class SavesUncopied(Net):
    """Saves a tensor that can't be copied and changes in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.uncopied = torch.zeros(2).as_subclass(Uncopied)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.uncopied += loss.detach()
        return loss + 0.01 * self.uncopied.as_subclass(torch.Tensor).sum()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["uncopied"] = self.uncopied

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.uncopied = checkpoint["uncopied"]


# Such a save is not written in the background: a kill repeats no more than without `async_save`.
add("SavesUncopied", module=SavesUncopied, options={"async_save": True}, takes=(IN_FILES, "copies"), ranks=False)


@row("module", takes=("hyperparameters", IN_FILES))
class OddHyperparameters(Net):
    """Has hyperparameters of kinds that no safe file holds."""

    def __init__(self) -> None:
        super().__init__()
        odd = {"space": argparse.Namespace(a=1), "kind": dict, "function": os.getcwd}
        self.save_hyperparameters({"path": Path("/data"), "plain": 3, **odd})
