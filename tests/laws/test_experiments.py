"""WandbLogger and MLFlowLogger continue in their run, with the rows of the uninterrupted one."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from syrupy.assertion import SnapshotAssertion
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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


def logged(epochs: int) -> Callable[[], MLFlowLogger]:
    """Return what makes one that has logged a parameter before the fit."""

    def make() -> MLFlowLogger:
        logger = mlflow()
        logger.log_hyperparams({"epochs": epochs})
        return logger

    return make


def begun() -> WandbLogger:
    """Return a logger that starts its run before the fit, as ``logger.watch(model)`` does."""
    logger = wandb()()
    logger.experiment.config.update({"a": 1})
    return logger


def without_its_method() -> WandbLogger:
    """Return a logger of a version of W&B that logs in another way."""
    logger = wandb()()
    kind = importlib.import_module("wandb.wandb_run").Run
    if hasattr(kind, "_log"):
        kind.log = kind._log
        del kind._log
    return logger


class LogsParam(Callback):
    """Logs a parameter when a fit starts."""

    def __init__(self, value: int) -> None:
        self.value = value

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        trainer.logger.log_hyperparams({"epochs": self.value})


class Other(Logger):
    """A logger that the package does not know."""

    name, version = "other", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        return

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return


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


CUTS = {"often": [(0, 3), (0, 5), Cut(at=(1, 1), by=signal.SIGTERM)], "once": [(0, 3)]}


@pytest.mark.parametrize("cuts", slow_half(CUTS))
@pytest.mark.parametrize(("logger", "late"), [(wandb(), 0), (wandb(), 2), (wandb(), 4), (mlflow, 0)])
def test_one_run_has_the_rows_of_the_uninterrupted_one(
    cuts: str, logger: Any, late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row comes once, even if W&B had not sent rows from before the autosave, or had sent later ones."""
    monkeypatch.setenv("STAND_IN_WANDB_LATE", str(late))
    whole, cut = Script(tmp_path / "whole", is_plain=True), Script(tmp_path / "cut")
    assert whole.start(start(logger)) == 0, whole.output()
    for each in [*CUTS[cuts], None]:
        code = cut.start(start(logger, each))
    assert code == 0, cut.output()
    assert contents(cut.root) == contents(whole.root)
    assert len(str(contents(cut.root))) > 500
    assert "note " not in cut.output()


SCENARIOS: dict[str, list[Start]] = {
    "stopped run of MLflow": [start(mlflow, Cut(at=AT, by=signal.SIGTERM))],
    "parameter before the fit": [start(logged(2), AT), start(logged(3))],
    "other parameter": [
        start(mlflow, AT, callbacks=lambda: LogsParam(2)), start(mlflow, callbacks=lambda: LogsParam(3)),
    ],
    "run of MLflow that is gone": [start(mlflow, AT), start(emptied)],
    "other id": [start(wandb(), AT), start(wandb(id="mine"))],
    "began before the fit": [start(begun, AT), start(begun)],
    "offline": [start(wandb(offline=True), AT), start(wandb(offline=True))],
    "W&B that logs in another way": [start(without_its_method, AT), start(without_its_method)],
    "unknown logger": [Start(fits=[{"logger": Other, "max_epochs": 1, "name": name} for name in ("one", "two")])],
}  # fmt: skip


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


def test_hp_metric_is_written_once(tmp_path: Path) -> None:
    """A restart does not write the first start's hyperparameters again."""
    script = Script(tmp_path)
    for cut in (AT, (0, 5), None):
        script.start(start(lambda: TensorBoardLogger("."), cut))
    found = EventAccumulator(str(tmp_path / "lightning_logs/version_0"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("hp_metric")] == [(0, -1.0)]
    assert len(found.Scalars("loss_step")) == 12
