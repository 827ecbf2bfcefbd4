"""Fits with ModelCheckpoints, and what these know and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.runs import fit_eight

_KNOWN = (
    "best_model_path",
    "best_model_score",
    "best_k_models",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
    "current_score",
    "_last_global_step_saved",
    "_last_checkpoint_saved",
    "_defer_save_until_validation",
)


def known(callback: ModelCheckpoint, directory: Path) -> dict[str, Any]:
    """Return a ModelCheckpoint's attributes, with paths relative to the directory of the run."""
    values = {name: getattr(callback, name) for name in _KNOWN}
    values["best_k_models"] = [[path, float(score)] for path, score in values["best_k_models"].items()]
    plain = {name: float(value) if isinstance(value, Tensor) else value for name, value in values.items()}
    return json.loads(json.dumps(plain).replace(str(directory), ""))


def fit_saving(
    callbacks: list[Callback], directory: Path, saving: list[ModelCheckpoint], *, logger: Any = False, **arguments: Any
) -> None:
    """Fit, and record the ModelCheckpoints' attributes at the end."""
    arguments = {"enable_checkpointing": True, "logger": logger, **arguments}
    trainer = fit_eight([*saving, *callbacks], directory, **arguments)
    found = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    (directory / "known.json").write_text(json.dumps([known(callback, directory) for callback in found], indent=1))


def assert_equal_weights(one: Path, other: Path) -> None:
    """Check that two checkpoints have the same step and weights, and that both load safely."""
    first, second = (torch.load(path, map_location="cpu", weights_only=True) for path in (one, other))
    assert first["global_step"] == second["global_step"], one
    assert all(torch.equal(value, second["state_dict"][name]) for name, value in first["state_dict"].items()), one


def at(directory: Path, *, name: str = "checkpoints", **arguments: Any) -> ModelCheckpoint:
    """Return a ModelCheckpoint with its own directory."""
    return ModelCheckpoint(dirpath=directory / name, **arguments)
