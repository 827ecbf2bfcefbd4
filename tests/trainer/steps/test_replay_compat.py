"""The contract with Lightning's loggers and ModelCheckpoint: each private name that a replay uses exists."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_faulttolerant.trainer.steps import compat

SEAMS = {**compat.LOGGER_SEAMS, **compat.MODEL_CHECKPOINT_SEAMS}


@pytest.mark.parametrize("name", compat.LOGGER_SEAMS)
def test_each_logger_has_the_names(name: str) -> None:
    """The name exists on both loggers of files; the failure names the feature that breaks."""
    for kind in (CSVLogger, TensorBoardLogger):
        assert hasattr(kind("."), name), f"{name} is gone; what breaks: {SEAMS[name]}"


@pytest.mark.parametrize("name", compat.MODEL_CHECKPOINT_SEAMS)
def test_model_checkpoint_has_the_names(name: str) -> None:
    """The name exists; if a new Lightning drops it, the failure names the feature that breaks."""
    assert hasattr(ModelCheckpoint, name), f"{name} is gone; what breaks: {SEAMS[name]}"
