"""Files that ModelCheckpoints and loggers write beside a run, and what ModelCheckpoints know of them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from tests.laws.rows import Net

_OURS = ("fault_tolerance", "registry", "start-")
_KNOWN = (
    "best_model_path", "best_model_score", "best_k_models", "kth_best_model_path", "kth_value", "last_model_path",
    "current_score", "_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation",
)  # fmt: skip


class Late(Net):
    """Has hyperparameters, and logs one more value from its fourth batch on."""

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 8})

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.global_step >= 3:
            self.log("a late, one", batch.mean())
        return super().training_step(batch, batch_idx)


class Knows(Callback):
    """Writes at the end of a fit what each ModelCheckpoint knows, with paths relative to the working directory."""

    def teardown(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        found = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        text = json.dumps([known(callback) for callback in found], indent=1).replace(os.getcwd(), "")
        Path("known.json").write_text(text)


def known(callback: ModelCheckpoint) -> dict[str, Any]:
    """Return a ModelCheckpoint's attributes as plain values."""
    values = {name: getattr(callback, name) for name in _KNOWN}
    values["best_k_models"] = [[path, float(score)] for path, score in values["best_k_models"].items()]
    return {name: float(value) if isinstance(value, Tensor) else value for name, value in values.items()}


def contents(root: Path) -> dict[str, Any]:
    """Return the files of a run that are not ours: for each its content, weights, or the target of a link."""
    paths = sorted(path for path in root.rglob("*") if path.is_symlink() or not path.is_dir())
    named = {str(path.relative_to(root)): path for path in paths}
    return {
        re.sub(r"(events\.out\.tfevents)\..*", r"\1", name): content(path)
        for name, path in named.items()
        if not name.startswith(_OURS)
    }


def content(path: Path) -> Any:
    """Return what has to be the same in a file of another run."""
    if path.is_symlink():
        return os.readlink(path)
    if "tfevents" in path.name:
        return scalars(path.parent)
    if path.suffix != ".ckpt":
        return path.read_text()
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    return checkpoint["global_step"], {name: value.tolist() for name, value in checkpoint["state_dict"].items()}


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the scalars that TensorBoard shows of a run, except the marker of hyperparameters, which has no step."""
    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if tag != "hp_metric"]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}
