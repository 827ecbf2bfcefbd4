"""Private names of Lightning that this package uses, on 2.5.6 to 2.6.6: loggers, ModelCheckpoint, files.

Of WandbLogger, MLFlowLogger, and a run of W&B, too.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import DummyLogger

# Each with what breaks without it.
TRAINER_SEAMS = {"_run": "continuing in the version that a logger had, with the files that ModelCheckpoint has there"}
TRAINER_OBJECT_SEAMS = {
    "_default_root_dir": "a run whose start has another default_root_dir writes where it wrote before"
}
EPOCH_LOOP_SEAMS = {"_batches_that_stepped": "TensorBoard drops what was logged after the resumed step"}
MODEL_CHECKPOINT_SEAMS = {
    "_last_global_step_saved": "a step that was saved before the interruption is saved again after it",
    "_last_checkpoint_saved": "save_last='link' and save_last after a resume",
    "_defer_save_until_validation": "a save that waits for a validation run, across an interruption",
    "_last_time_checked": "train_time_interval after a resume",
    "_train_time_interval": "a resume from a file that train_time_interval had saved",
    "_save_topk_checkpoint": "a resume from a file of ModelCheckpoint itself: what it still had to do",
    "_save_last_checkpoint": "a resume from a file of ModelCheckpoint itself: what it still had to do",
}
SAVE_TOPK, SAVE_LAST = "_save_topk_checkpoint", "_save_last_checkpoint"
LOGGER_SEAMS = {
    "_version": "a logger continues in the version that it had",
    "_get_next_version": "a version that somebody named is told from one that was taken",
    "_experiment": "a logger adds to the files that it had",
    "_root_dir": "a logger whose directory is another one at each start continues in its first one",
    "_fs": "likewise, where that is on another file system",
}
CSV_SEAMS = {"_save_dir": "a CSVLogger whose directory is another one at each start continues in its first one"}
TENSORBOARD_SEAMS = {"_kwargs": "TensorBoard drops what was logged after the resumed step"}
EVENT_WRITER_SEAMS = {"time": "TensorBoard reads the event file of a resumed run last"}
CLOCK = "time"
EVENT_FILE = re.compile(r"events\.out\.tfevents\.(\d+)\.[^/]*$")
STRATEGY_SEAMS = {"_checkpoint_io": "checkpoints of ModelCheckpoint and trainer.save_checkpoint that no crash damages"}
CHECKPOINT_IO = "_checkpoint_io"
CSV_WRITER_SEAMS = {"_check_log_dir_exists": "CSVLogger keeps the metrics that are there"}

# Since 2.6 a fit can specify how its checkpoint is loaded.
HAS_WEIGHTS_ONLY = "weights_only" in inspect.signature(Trainer.fit).parameters

_PLACE = ("_root_dir", "_version", "_fs")
LAST_SAVED = "_last_checkpoint_saved"
_ATTRIBUTES = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")


def weights_only_argument(weights_only: bool) -> dict[str, object]:
    """Return the argument that passes ``weights_only`` to a `CheckpointIO` of this Lightning, if it has one."""
    return {"weights_only": weights_only} if HAS_WEIGHTS_ONLY else {}


def given_checkpoint(trainer: Trainer) -> tuple[object] | None:
    """Return the ``ckpt_path`` that Lightning has chosen for the fit that begins, or ``None`` if it can't be known.

    It is only in a variable of ``Trainer._run`` until loggers have begun their files and callbacks are set up.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_run" and frame.f_locals.get("self") is trainer and "ckpt_path" in frame.f_locals:
            return (frame.f_locals["ckpt_path"],)
        frame = frame.f_back
    return None


def logged_step(trainer: Trainer) -> int:
    """Return the step that the next values are logged with."""
    return trainer.fit_loop.epoch_loop._batches_that_stepped


def set_default_root_dir(trainer: Trainer, path: str) -> Callable[[], None]:
    """Give a trainer another ``default_root_dir``; return a function that undoes it."""
    before = trainer._default_root_dir  # type: ignore[attr-defined]
    trainer._default_root_dir = path  # type: ignore[attr-defined]

    def undo() -> None:
        trainer._default_root_dir = before  # type: ignore[attr-defined]

    return undo


def model_checkpoint_state(callback: ModelCheckpoint) -> dict[str, Any]:
    """Return what a ModelCheckpoint keeps from its last save and does not put into its own state."""
    checked = callback._last_time_checked
    state = {
        "current_score": callback.current_score,
        "seconds": None if checked is None else time.monotonic() - checked,
        "attributes": {name: getattr(callback, name) for name in _ATTRIBUTES},
        "dirpath": None if callback.dirpath is None else str(callback.dirpath),
    }
    if type(callback).state_dict is not ModelCheckpoint.state_dict:
        state["own"] = own_state(callback)  # a subclass may return anything instead
    return state


def own_state(callback: ModelCheckpoint) -> dict[str, object]:
    """Return what Lightning's class puts into the state of a ModelCheckpoint, whatever a subclass does."""
    own = ModelCheckpoint.state_dict(callback)
    return {**own, "best_k_models": dict(own["best_k_models"])}


def model_checkpoint_state_to_save_again(callback: ModelCheckpoint, hook: str) -> dict[str, object]:
    """Return the same with the callback's own state: with it, `hook` repeats what it is about to do."""
    state = {**model_checkpoint_state(callback), "own": own_state(callback)}
    if hook == "on_train_batch_end" and callback._train_time_interval is not None:
        state["seconds"] = callback._train_time_interval.total_seconds()  # it was due, and is due again
    return state


def as_saved(attributes: Mapping[str, object], path: str, step: int) -> dict[str, object]:
    """Return `attributes` of `model_checkpoint_state` as they are after `path` is written."""
    return {**attributes, "_last_global_step_saved": step, "_last_checkpoint_saved": path}


def saved_last_at(callback: ModelCheckpoint) -> int:
    """Return the optimizer step of the last save."""
    return callback._last_global_step_saved


def load_model_checkpoint(callback: ModelCheckpoint, state: Mapping[str, Any]) -> None:
    """Restore a result of `model_checkpoint_state` or `model_checkpoint_state_to_save_again`."""
    for name, value in state.get("own", {}).items():
        if name not in ("dirpath", "monitor"):  # these are the script's
            setattr(callback, name, value)
    callback.current_score = state["current_score"]
    callback._last_time_checked = None if state["seconds"] is None else time.monotonic() - state["seconds"]
    for name, value in state["attributes"].items():
        setattr(callback, name, value)


FileLogger = CSVLogger | TensorBoardLogger


def has_begun(logger: FileLogger) -> bool:
    """Return whether a logger has begun its files."""
    return logger._experiment is not None


def takes_next_version(logger: FileLogger) -> bool:
    """Return whether a logger has, or will take, the next free version: the user has not named one."""
    return logger._version is None or logger._version == logger._get_next_version() - has_begun(logger)


def set_version(logger: FileLogger, version: int | str) -> None:
    """Let a logger continue in another version than the one that it has or would take."""
    logger._version = version


def set_save_dir(logger: FileLogger, save_dir: str) -> Callable[[], None]:
    """Let a logger write below another directory; return a function that undoes it, with its version and its files."""
    names = (*_PLACE, "_save_dir") if isinstance(logger, CSVLogger) else _PLACE
    before = {name: getattr(logger, name) for name in names}
    # The writer of TensorBoard is closed if the logger continues elsewhere: the logger creates another one.
    experiment = logger._experiment if isinstance(logger, CSVLogger) else None

    def undo() -> None:
        if isinstance(logger._experiment, ExperimentWriter) and logger._experiment.metrics:
            logger.save()
        elif isinstance(logger, TensorBoardLogger) and logger._experiment is not None:
            logger._experiment.close()
        for name, value in before.items():
            setattr(logger, name, value)
        logger._experiment = experiment

    logger._root_dir = save_dir
    logger._fs = get_filesystem(save_dir)
    if isinstance(logger, CSVLogger):
        logger._save_dir = save_dir
    return undo


class _GoesOn(ExperimentWriter):
    """A writer that is created without removing the existing metrics."""

    def _check_log_dir_exists(self) -> None:
        return


def go_on_in_csv(logger: CSVLogger, columns: list[str]) -> None:
    """Let a logger add to the metrics of its version; rows that it was about to add elsewhere are dropped."""
    before = logger._experiment
    writer: ExperimentWriter = _GoesOn(log_dir=logger.log_dir)
    writer.__class__ = ExperimentWriter  # nothing of ours remains
    writer.metrics_keys = list(columns)
    if isinstance(before, ExperimentWriter):
        writer.hparams.update(before.hparams)
    logger._experiment = writer


def set_columns(logger: CSVLogger, columns: list[str]) -> None:
    """Tell a logger the columns of its file, besides those of rows that it is about to add."""
    if isinstance(logger._experiment, ExperimentWriter):
        logger._experiment.metrics_keys = list(columns)


def go_on_in_tensorboard(logger: TensorBoardLogger, purge_step: int | None) -> None:
    """Begin the next event file of a logger; TensorBoard drops events of earlier files from `purge_step` on."""
    kwargs = logger._kwargs
    if logger._experiment is not None:
        logger._experiment.close()
        logger._experiment = None
    logger._kwargs = kwargs if purge_step is None else {**kwargs, "purge_step": purge_step}
    try:
        with begins_last(logger.log_dir):
            _ = logger.experiment
    finally:
        logger._kwargs = kwargs


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterClock:
    """Stands for the module ``time``, with a clock that shows a later time to one thread.

    Args:
        earliest: The earliest time that it shows, in seconds.
        thread: The thread.
    """

    earliest: int
    thread: int

    def time(self) -> float:
        """Return the time in seconds."""
        return max(time.time(), self.earliest) if threading.get_ident() == self.thread else time.time()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@contextlib.contextmanager
def begins_last(log_dir: str) -> Iterator[None]:
    """Let TensorBoard read an event file that this thread begins in the block after all those in a directory.

    It reads them in the order of their names. These begin with the second, and continue with the names of host and
    process. So a file of the same second, or from a host whose clock is ahead, may have a later name.

    Args:
        log_dir: The directory.
    """
    earliest = 0
    with contextlib.suppress(OSError):
        found = map(EVENT_FILE.search, entries_of(log_dir))
        earliest = max((1 + int(one[1]) for one in found if one), default=0)
    try:
        from torch.utils.tensorboard.writer import EventFileWriter  # type: ignore[attr-defined]  # SummaryWriter's
    except ImportError:  # the logger writes with tensorboardX
        module = None
    else:
        module = sys.modules[EventFileWriter.__module__]
    if module is None or time.time() >= earliest:
        yield
        return
    setattr(module, CLOCK, LaterClock(earliest=earliest, thread=threading.get_ident()))
    try:
        yield
    finally:
        setattr(module, CLOCK, time)


def entries_of(directory: str) -> list[str]:
    """Return the names of the entries in a directory now, sorted; none if it does not exist."""
    file_system = get_filesystem(directory)
    file_system.invalidate_cache(directory)
    paths = file_system.ls(directory, detail=False) if file_system.isdir(directory) else []
    return sorted(os.path.basename(str(path).rstrip("/")) for path in paths)


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


def run_has_begun(logger: TrackingLogger) -> bool:
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
    return run_has_begun(logger) or getattr(wandb, "run", None) is not None


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
