"""The contract with WandbLogger and MLFlowLogger: each private name that we use is one of Lightning's."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

from lightning_faulttolerant.trainer.files import compat

SEAMS = [(table, name) for table in ("WANDB_SEAMS", "MLFLOW_SEAMS") for name in getattr(compat, table)]
OWNERS: dict[str, Any] = {"WANDB_SEAMS": WandbLogger, "MLFLOW_SEAMS": MLFlowLogger}


@pytest.mark.parametrize(("table", "name"), SEAMS)
def test_each_seam_exists(table: str, name: str) -> None:
    """The logger sets the attribute when it is created; without the library it can't be created here."""
    feature = getattr(compat, table)[name]
    assert f"self.{name}" in inspect.getsource(OWNERS[table].__init__), f"{name} is gone; what breaks: {feature}"


def test_loggers_read_what_is_set() -> None:
    """The id is read when the run begins, not before."""
    assert "**self._wandb_init" in inspect.getsource(WandbLogger.experiment.fget)
    assert "self._run_id is not None" in inspect.getsource(MLFlowLogger.experiment.fget)


def test_no_entry_outlives_its_use() -> None:
    """The source still uses each private name of the tables."""
    tree = ast.parse(Path(compat.__file__).read_text(encoding="utf-8"))
    touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for _, name in SEAMS} <= touched
