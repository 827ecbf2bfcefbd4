"""The contract with Lightning's loggers and ModelCheckpoint: each private name that we use exists."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter

from lightning_faulttolerant.trainer.files import compat

OWNERS: dict[str, Any] = {
    "TRAINER_SEAMS": lambda: Trainer,
    "TRAINER_OBJECT_SEAMS": lambda: Trainer(logger=False),
    "EPOCH_LOOP_SEAMS": lambda: Trainer(logger=False).fit_loop.epoch_loop,
    "MODEL_CHECKPOINT_SEAMS": ModelCheckpoint,
    "LOGGER_SEAMS": lambda: CSVLogger("."),
    "CSV_SEAMS": lambda: CSVLogger("."),
    "TENSORBOARD_SEAMS": lambda: TensorBoardLogger("."),
    "CSV_WRITER_SEAMS": lambda: ExperimentWriter,
    "STRATEGY_SEAMS": lambda: Trainer(logger=False).strategy,
}
SEAMS = [(table, name) for table in OWNERS for name in getattr(compat, table)]


@pytest.mark.parametrize(("table", "name"), SEAMS)
def test_each_seam_exists(table: str, name: str) -> None:
    """The name exists; if a new Lightning drops it, the failure names the feature that breaks."""
    feature = getattr(compat, table)[name]
    assert hasattr(OWNERS[table](), name), f"{name} is gone; what breaks: {feature}"


@pytest.mark.parametrize("name", compat.LOGGER_SEAMS)
def test_both_loggers_have_the_same_names(name: str) -> None:
    """Both loggers have the same names, so the same code handles both."""
    assert hasattr(TensorBoardLogger("."), name)


def test_no_name_escapes_the_contract() -> None:
    """Each private name that the source uses is in one of the tables, whose other tests are in this folder."""
    tree = ast.parse(Path(compat.__file__).read_text(encoding="utf-8"))
    touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    touched |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    private = {name for name in touched | strings if name.startswith("_") and not name.startswith("__")}
    of_experiments = {*compat.WANDB_SEAMS, *compat.MLFLOW_SEAMS, *compat.WANDB_RUN_SEAMS}
    assert private - {name for _, name in SEAMS} - of_experiments == {"_experiment_of"}  # the file's own


def test_version_that_somebody_named_is_told(tmp_path: Path) -> None:
    """Only a version that Lightning has chosen, or will choose, counts as the next one."""
    for version in (0, 1):
        (tmp_path / f"lightning_logs/version_{version}").mkdir(parents=True)
    for kind in (CSVLogger, TensorBoardLogger):
        logger = kind(tmp_path)
        assert compat.takes_next_version(logger)
        assert logger.version == 2
        assert compat.takes_next_version(logger)
        assert not compat.takes_next_version(kind(tmp_path, version=1))
        assert not compat.takes_next_version(kind(tmp_path, version="2"))
    begun = CSVLogger(tmp_path)
    _ = begun.experiment
    assert compat.has_begun(begun)
    assert compat.takes_next_version(begun)
