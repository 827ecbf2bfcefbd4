"""Private names that this package uses on 2.5.6 to 2.6.6: of WandbLogger, MLFlowLogger, and a run of W&B."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

# Each with what breaks without it.
WANDB_SEAMS = {
    "_experiment": "a run that had begun before the fit is told from one that begins in it",
    "_wandb_init": "WandbLogger continues in the run that it had",
    "_id": "WandbLogger names the run that it had before it begins it",
}
MLFLOW_SEAMS = {
    "_initialized": "a run that had begun before the fit is told from one that begins in it",
    "_run_id": "MLFlowLogger continues in the run that it had",
    "_experiment_id": "MLFlowLogger looks its experiment up again where its run is gone",
    "_mlflow_client": "rows that the run of MLflow has already aren't logged a second time",
}
WANDB_RUN_SEAMS = {"_log": "rows that the run of W&B has already aren't logged a second time"}
LOG = "_log"

# A user who passes one of these wants another run at each start, or says where the run continues.
_OWN_WAYS = ("resume_from", "fork_from")
_NEVER = ("never", False)

TrackingLogger = WandbLogger | MLFlowLogger


def is_tracking(logger: Logger) -> bool:
    """Return whether a logger keeps its run as Lightning's WandbLogger or MLFlowLogger does."""
    kinds: tuple[Any, ...] = (WandbLogger, MLFlowLogger)
    return any(isinstance(logger, kind) and _experiment_of(logger) is kind.experiment for kind in kinds)


def is_unknown(logger: Logger) -> bool:
    """Return whether this package does not know how a logger continues."""
    if isinstance(logger, DummyLogger) or is_tracking(logger):
        return False
    kinds: tuple[Any, ...] = (CSVLogger, TensorBoardLogger)
    return all(_experiment_of(logger) is not kind.experiment for kind in kinds)


def _experiment_of(logger: Logger) -> object:
    return getattr(type(logger), "experiment", None)


def has_begun(logger: TrackingLogger) -> bool:
    """Return whether a logger has begun its run."""
    return bool(logger._initialized) if isinstance(logger, MLFlowLogger) else logger._experiment is not None


def run_id(logger: TrackingLogger) -> str | None:
    """Return the id of the run that a logger has begun or is to begin; ``None`` if no id is chosen."""
    if isinstance(logger, MLFlowLogger):
        return logger._run_id
    return str(logger._experiment.id) if logger._experiment is not None else given_id(logger)


def given_id(logger: WandbLogger) -> str | None:
    """Return the id that the user has passed, or that a resume has set."""
    given = logger._wandb_init.get("id") or os.environ.get("WANDB_RUN_ID")
    return None if given is None else str(given)


def has_begun_before(logger: WandbLogger) -> bool:
    """Return whether the run that a logger has, or will take, has already begun."""
    wandb = sys.modules.get("wandb")
    return has_begun(logger) or getattr(wandb, "run", None) is not None


def starts_over(logger: TrackingLogger) -> bool:
    """Return whether the user requests a new run at each start, or says where the run continues."""
    if isinstance(logger, MLFlowLogger):
        return False
    given = logger._wandb_init
    return given.get("resume") in _NEVER or any(given.get(name) is not None for name in _OWN_WAYS)


def set_run_id(logger: TrackingLogger, run_id: str | None) -> None:
    """Let a logger continue in a run, or begin one if `run_id` is ``None``."""
    if isinstance(logger, MLFlowLogger):
        logger._run_id = run_id
        logger._experiment_id = None
        logger._initialized = False
    else:
        logger._wandb_init["id"] = logger._id = run_id


def syncs_tensorboard(logger: WandbLogger) -> bool:
    """Return whether W&B creates rows from what others write to TensorBoard."""
    return bool(logger._wandb_init.get("sync_tensorboard"))


def client_of(logger: MLFlowLogger) -> Any:
    """Return the client that all values go through, including the user's."""
    return logger._mlflow_client


def experiments_of(loggers: Iterable[Logger]) -> list[object]:
    """Return the runs and clients of loggers: connections, with attributes that are not the user's state."""
    tracking = [logger for logger in loggers if isinstance(logger, (WandbLogger, MLFlowLogger))]
    return [one._mlflow_client if isinstance(one, MLFlowLogger) else one._experiment for one in tracking]
