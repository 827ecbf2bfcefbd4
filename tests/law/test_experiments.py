"""WandbLogger and MLFlowLogger continue in their run, with the rows of the uninterrupted one."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.kills import run_whole_and_killed
from tests.loggers import LateNet
from tests.processes import Ended, run
from tests.runs import fit_net

pytestmark = pytest.mark.filterwarnings("ignore:MLFlow only allows:RuntimeWarning")

Make = Callable[[Path], Logger]


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Lightning's loggers import the stand-ins; tests/libraries/test_trackers.py has the real libraries."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "stand_ins"))
    monkeypatch.setattr("lightning.pytorch.loggers.wandb._WANDB_AVAILABLE", True)
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", True)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("wandb", "mlflow")]:
        monkeypatch.delitem(sys.modules, name)


def wandb(directory: Path, **arguments: Any) -> WandbLogger:
    """Return a logger whose server is the directory."""
    os.environ["STAND_IN_WANDB"] = str(directory)
    return WandbLogger(project="p", save_dir=directory, **arguments)


def mlflow(directory: Path, **arguments: Any) -> MLFlowLogger:
    """Return a logger whose store is a file in the directory."""
    return MLFlowLogger(tracking_uri=f"file:{directory / 'mlflow.json'}", **arguments)


def fit(callbacks: list[Callback], directory: Path, make: Make = wandb, width: int = 8, **arguments: Any) -> Any:
    """Fit a model that has hyperparameters, and logs one more value from its fourth batch on."""
    return fit_net(callbacks, directory, logger=make(directory), module=LateNet(width), **arguments)


def rows(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each W&B run."""
    return {
        path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in directory.glob("*.jsonl")
    }


def runs_of(directory: Path) -> dict[str, Any]:
    """Return the runs of MLflow."""
    found: dict[str, Any] = json.loads((directory / "mlflow.json").read_text())
    return found


@pytest.mark.parametrize("late", [0, 2, 4])
@pytest.mark.parametrize("kills", [[3], [3, 3, KillAt(1, signum=signal.SIGTERM)]], ids=["once", "often"])
def test_wandb_has_one_run_with_the_rows_of_the_uninterrupted_one(
    kills: list[Any], late: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row comes once, even if W&B had not sent rows from before the autosave, or had sent later ones."""
    monkeypatch.setenv("STAND_IN_WANDB_LATE", str(late))
    runs = run_whole_and_killed(fit, tmp_path, kills, every_n_train_steps=2)
    [whole], [killed] = rows(runs.whole).values(), rows(runs.killed).values()
    assert killed == whole
    assert len(whole) > 10
    assert not any("note " in output for output in runs.outputs)


@pytest.mark.parametrize("kills", [[3], [3, 3, KillAt(1, signum=signal.SIGTERM)]], ids=["once", "often"])
def test_mlflow_has_one_run_with_the_points_of_the_uninterrupted_one(kills: list[Any], tmp_path: Path) -> None:
    """Each point comes once, and the run is finished in the end."""
    runs = run_whole_and_killed(lambda *args: fit(*args, mlflow), tmp_path, kills, every_n_train_steps=2)
    [whole], [killed] = runs_of(runs.whole).values(), runs_of(runs.killed).values()
    assert killed == whole
    assert killed["status"] == "FINISHED"
    assert killed["params"] == {"width": "8"}
    assert "a late one" in killed["metrics"]
    assert not any("note " in output for output in runs.outputs)


def interrupted(tmp_path: Path, make: Make, then: Make | None = None, kill: Any = 3, **arguments: Any) -> Ended:
    """Run, kill, and run again; return how the second run ended."""
    options = {"every_n_train_steps": 2}
    kill = KillAt(kill) if isinstance(kill, int) else kill
    run(lambda: fit([FaultTolerance(**options), kill], tmp_path, make))
    ended = run(lambda: fit([FaultTolerance(**options)], tmp_path, then or make, **arguments), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly" in ended.output
    return ended


def test_mlflow_is_killed_while_a_stop_lasts_and_running_again(tmp_path: Path) -> None:
    """MLflow shows the run as killed between a stop and the next start, and then as running."""

    class Look(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            assert [run["status"] for run in runs_of(tmp_path).values()] == ["RUNNING"]

    stop = KillAt(3, signum=signal.SIGTERM)
    ended = run(lambda: fit([FaultTolerance(), Look(), stop], tmp_path, mlflow))
    assert ended.exit_code == 143, ended.output
    assert [run["status"] for run in runs_of(tmp_path).values()] == ["KILLED"]
    ended = run(lambda: fit([FaultTolerance(), Look()], tmp_path, mlflow), seed=99)
    assert ended.exit_code == 0, ended.output
    assert [run["status"] for run in runs_of(tmp_path).values()] == ["FINISHED"]


@pytest.mark.usefixtures("whole_reports")
def test_mlflow_keeps_the_first_value_of_a_parameter(tmp_path: Path) -> None:
    """A hyperparameter that may differ is left out and named, since MLflow refuses another value of a parameter."""

    def log_width(width: int) -> Make:
        def make(directory: Path) -> Logger:
            logger = mlflow(directory)
            logger.log_hyperparams({"epochs": width})
            return logger

        return make

    # Logging before the fit starts a separate run, which is ended.
    ended = interrupted(tmp_path, log_width(2), log_width(3))
    assert "before the fit; it continues in the run" in ended.output
    assert sorted(run["status"] for run in runs_of(tmp_path).values()) == ["FINISHED", "KILLED"]
    [finished] = [run for run in runs_of(tmp_path).values() if run["status"] == "FINISHED"]
    assert finished["params"]["epochs"] == "2"


class LogsParam(Callback):
    """Logs a parameter when a fit starts."""

    def __init__(self, value: int) -> None:
        self.value = value

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        trainer.logger.log_hyperparams({"epochs": self.value})


def test_other_parameters_of_a_restart_are_reported(tmp_path: Path) -> None:
    """A parameter that has another value at the restart keeps its first one, and the report names it."""
    options = {"every_n_train_steps": 2}
    run(lambda: fit([FaultTolerance(**options), LogsParam(2), KillAt(3)], tmp_path, mlflow))
    ended = run(lambda: fit([FaultTolerance(**options), LogsParam(3)], tmp_path, mlflow), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "MLflow keeps the earlier values of epochs, which differ now" in ended.output
    [only] = runs_of(tmp_path).values()
    assert only["params"]["epochs"] == "2"


def test_run_of_mlflow_that_is_gone_is_reported(tmp_path: Path) -> None:
    """If the store no longer has the run, a new one starts, and the report says so."""

    def emptied(directory: Path) -> Logger:
        (directory / "mlflow.json").unlink()
        return mlflow(directory)

    ended = interrupted(tmp_path, mlflow, emptied)
    assert "MLFlowLogger#0 begins a new run: the run " in ended.output
    assert len(runs_of(tmp_path)) == 1


def test_id_of_the_user_stays(tmp_path: Path) -> None:
    """If the user names another run, it is used, and the report says where the earlier rows are."""
    ended = interrupted(tmp_path, wandb, lambda directory: wandb(directory, id="mine"))
    assert "WandbLogger#0 was given the run mine; what was logged so far is in the run" in ended.output
    assert "mine" in rows(tmp_path)
    assert len(rows(tmp_path)) == 2


def test_own_id_of_the_user_continues(tmp_path: Path) -> None:
    """A run with a name from the user also has each row once."""
    interrupted(tmp_path, lambda directory: wandb(directory, id="mine"))
    assert [row["_step"] for row in rows(tmp_path)["mine"]] == list(range(len(rows(tmp_path)["mine"])))
    losses = [row["trainer/global_step"] for row in rows(tmp_path)["mine"] if "loss_step" in row]
    assert losses == list(range(10))


def begun(directory: Path) -> Logger:
    """Return a logger that starts its run before the fit, as ``logger.watch(model)`` does."""
    logger = wandb(directory)
    logger.experiment.config.update({"a": 1})
    return logger


def test_run_of_wandb_that_began_before_the_fit_is_reported(tmp_path: Path) -> None:
    """W&B can't rename a run that has started: both starts print advice."""
    first = run(lambda: fit([FaultTolerance(every_n_train_steps=2), KillAt(3)], tmp_path, begun))
    assert "WandbLogger does not continue in its run after a restart. Its run began before the fit" in first.output
    ended = run(lambda: fit([FaultTolerance(every_n_train_steps=2)], tmp_path, begun), seed=99)
    assert "began the run" in ended.output
    assert len(rows(tmp_path)) == 2


def test_offline_run_is_reported(tmp_path: Path) -> None:
    """If W&B is offline, the rows of a run are unknown: each start has a part of it, and the report says so."""
    ended = interrupted(tmp_path, lambda directory: wandb(directory, offline=True))
    assert "W&B is offline" in ended.output
    assert len(rows(tmp_path)) == 1


def test_run_of_wandb_whose_rows_cannot_be_counted_is_reported(tmp_path: Path) -> None:
    """A version of W&B that logs in another way doesn't end the fit: the report says that rows may come twice."""

    def without_its_method(directory: Path) -> WandbLogger:
        logger = wandb(directory)
        kind = importlib.import_module("wandb.wandb_run").Run
        if hasattr(kind, "_log"):
            kind.log = kind._log
            del kind._log
        return logger

    ended = interrupted(tmp_path, without_its_method)
    assert "has no `_log`" in ended.output
    [found] = rows(tmp_path).values()
    assert len(found) > len({row["loss_step"] for row in found if "loss_step" in row})


class Other(Logger):
    """A logger that the package does not know."""

    name, version = "other", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        return

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return


def test_unknown_loggers_are_named_once(tmp_path: Path) -> None:
    """An unknown logger is named at the start of the first fit, with advice, and not again in the second."""

    def main() -> None:
        for _ in range(2):
            fit([FaultTolerance()], tmp_path, lambda _: Other(), max_epochs=1)

    ended = run(main)
    told = [line for line in ended.output.splitlines() if "does not continue in its run" in line]
    assert [line.removeprefix("INFO: ") for line in told] == [
        "Other does not continue in its run after a restart."
        " See its documentation for how to name the run in which it continues."
    ]


def test_advice_for_loggers_of_lightning() -> None:
    """The advice for Lightning's loggers names the argument."""
    from lightning_faulttolerant.trainer.files.experiments import _advice

    assert _advice(CometLogger.__new__(CometLogger)) == "Give it an experiment_key."


def test_hp_metric_is_written_once(tmp_path: Path) -> None:
    """A restart does not write the first start's hyperparameters again."""
    for kill in (3, 2, None):
        faults = [] if kill is None else [KillAt(kill)]
        run(lambda faults=faults: fit([FaultTolerance(every_n_train_steps=1), *faults], tmp_path, TensorBoardLogger))
    found = EventAccumulator(str(tmp_path / "lightning_logs/version_0"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("hp_metric")] == [(0, -1.0)]
    assert len(found.Scalars("loss_step")) == 10
