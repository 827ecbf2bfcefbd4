"""WandbLogger and MLFlowLogger continue in their run, with the rows of the uninterrupted one."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from syrupy.assertion import SnapshotAssertion

from tests.laws.cuts import Cut
from tests.laws.files import Late
from tests.laws.starts import Script, Start, one, slow_half, told

pytestmark = pytest.mark.filterwarnings("ignore:MLFlow only allows:RuntimeWarning")
AT = (0, 3)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Lightning's loggers import the stand-ins; tests/libraries/test_trackers.py has the real libraries."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "stand_ins"))
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", True)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("wandb", "mlflow")]:
        monkeypatch.delitem(sys.modules, name)


def wandb(**arguments: Any) -> Callable[[], WandbLogger]:
    """Return what makes a logger whose server is the working directory."""

    def make() -> WandbLogger:
        os.environ["STAND_IN_WANDB"] = os.getcwd()
        return WandbLogger(project="p", save_dir=".", **arguments)

    return make


def mlflow() -> MLFlowLogger:
    """Return a logger whose store is a file in the working directory."""
    return MLFlowLogger(tracking_uri="file:mlflow.json")


def emptied() -> MLFlowLogger:
    """Return one whose store has lost its runs."""
    Path("mlflow.json").unlink(missing_ok=True)
    return mlflow()


def begun() -> WandbLogger:
    """Return a logger that starts its run before the fit, as ``logger.watch(model)`` does."""
    logger = wandb()()
    logger.experiment.config.update({"a": 1})
    return logger


def start(logger: Callable[[], Any], cut: Any = None, **more: Any) -> Start:
    """Return a start of a fit with a logger, which saves at each second step."""
    options = {"every_n_train_steps": 2}
    return one(cut, **{"module": Late, "logger": logger, "log_every_n_steps": 1, "options": options, **more})


def contents(root: Path) -> Any:
    """Return the rows of each W&B run, and the runs of MLflow, without their names."""
    files = sorted(path for path in root.glob("*.jsonl") if not path.name.startswith("start-"))
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in files]
    store = root / "mlflow.json"
    return rows + (list(json.loads(store.read_text()).values()) if store.exists() else [])


CUTS = [(0, 3), (0, 5), Cut(at=(1, 1), by=signal.SIGTERM)]


@pytest.mark.parametrize(("logger", "late"), [(wandb(), 0), (wandb(), 2), (wandb(), 4), (mlflow, 0)])
def test_one_run_has_the_rows_of_the_uninterrupted_one(
    logger: Any, late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row comes once, even if W&B had not sent rows from before the autosave, or had sent later ones."""
    monkeypatch.setenv("STAND_IN_WANDB_LATE", str(late))
    whole, cut = Script(tmp_path / "whole", is_plain=True), Script(tmp_path / "cut")
    assert whole.start(start(logger)) == 0, whole.output()
    for each in [*CUTS, None]:
        code = cut.start(start(logger, each))
    assert code == 0, cut.output()
    assert contents(cut.root) == contents(whole.root)
    assert len(str(contents(cut.root))) > 500
    assert "note " not in cut.output()


SCENARIOS: dict[str, list[Start]] = {
    "run of MLflow that is gone": [start(mlflow, AT), start(emptied)],
    "other id": [start(wandb(), AT), start(wandb(id="mine"))],
    "began before the fit": [start(begun, AT), start(begun)],
    "offline": [start(wandb(offline=True), AT), start(wandb(offline=True))],
}


@pytest.mark.parametrize("name", slow_half(SCENARIOS))
def test_what_is_said(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """Each start tells what does not continue as it would in an uninterrupted run."""
    text, runs = told(tmp_path, SCENARIOS[name]), []
    for run in contents(tmp_path):
        if isinstance(run, dict):
            runs.append(f"a run is {run['status']}, with the parameters {run['params']}")
        else:
            steps = [row["trainer/global_step"] for row in run if "loss_step" in row]
            runs.append(f"a run has the rows of steps {steps}")
    assert re.sub(r"\b(?<!autosave-)([0-9a-f]{8}){1,2}\b", "ID", "\n".join([text, *sorted(runs)])) == snapshot
