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
from sklearn.preprocessing import LabelEncoder, StandardScaler
from torch import Tensor

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
