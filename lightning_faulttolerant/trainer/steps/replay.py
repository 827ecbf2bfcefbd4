"""The steps of a replay: what happens before the first of them, in each, and after the last one.

Nothing of the run is touched: what a replay writes goes below its own directory, or nowhere. The replacements for this
stay until the process ends, since hooks for exceptions may save, too. Loggers of Lightning that write files write below
the replay's directory, all others receive nothing. A logger that opens a run in its constructor, such as Comet's, has
done so before.

A replay may set values before its first step of interest: what would the step do with another value?
"""

from __future__ import annotations

import ast
import bdb
import os
import sys
import traceback
from collections.abc import Callable, MutableMapping, MutableSequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.errors import ReplayError
from lightning_faulttolerant.processes import leave_process
from lightning_faulttolerant.records.requests import (
    ENDED,
    LEFT,
    PASSED,
    RAISED,
    REACHED,
    ReplayOutcome,
    ReplayRequest,
    StepPlace,
    read_start,
    replay_requested,
    write_outcome,
)
from lightning_faulttolerant.storage.store import is_url
from lightning_faulttolerant.trainer.compat import callbacks, num_begun_in_all
from lightning_faulttolerant.trainer.files.compat import set_default_root_dir, set_save_dir
from lightning_faulttolerant.trainer.files.run_files import config_callbacks
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.process import current_number
from lightning_faulttolerant.trainer.run.directory import Script
from lightning_faulttolerant.trainer.settings import Options
from lightning_faulttolerant.trainer.steps import compat
from lightning_faulttolerant.trainer.steps.flight_recorder import StepDump

_SILENT = ("log_metrics", "log_hyperparams", "log_graph", "save", "finalize", "after_save_checkpoint")


def silence(trainer: Trainer, directory: str) -> None:
    """Let nothing reach the files and services that a trainer's loggers log to. Call it before they begin.

    Args:
        trainer: The trainer of the loggers.
        directory: The directory of the replay.
    """
    for number, logger in enumerate(trainer.loggers):
        if isinstance(logger, (CSVLogger, TensorBoardLogger)):
            set_save_dir(logger, os.path.join(directory, "logs", str(number)))
            compat.begin_again(logger)
        elif not getattr(logger, "is_silent_in_replay", False):
            logger.__class__ = _silent(type(logger))


def save_logs(trainer: Trainer) -> None:
    """Write what the loggers of files keep in memory."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        if isinstance(logger, (CSVLogger, TensorBoardLogger)):
            logger.save()


def _silent(kind: type) -> Any:
    """Return a class like that of a logger, whose methods do nothing. Scripts keep the object, and look at it."""

    def nothing(self: object, *args: object, **kwargs: object) -> None:
        """Do nothing."""

    methods: dict[str, object] = dict.fromkeys(_SILENT, nothing)
    experiment = property(lambda self: DummyLogger().experiment)
    namespace = {**methods, "experiment": experiment, "is_silent_in_replay": True, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**namespace, "__doc__": kind.__doc__})


_NEVER = timedelta(days=36_500)
_MARK = "is_protected_by_replay"


def protect(trainer: Trainer, request: ReplayRequest) -> None:
    """Keep a trainer from writing to the files of the run. Call it on each rank, before loggers begin their files.

    Args:
        trainer: The trainer that begins a fit or an evaluation.
        request: The request for the replay.
    """
    if hasattr(trainer.strategy, _MARK):  # it has run another fit
        return
    setattr(trainer.strategy, _MARK, True)
    patches = Patches()
    silence(trainer, request.directory)
    patches.around(trainer.strategy, "save_checkpoint", partial(_save_below, request.directory))
    patches.around(trainer.strategy, "remove_checkpoint", partial(_remove_below, request.directory))
    for callback in (one for one in callbacks(trainer) if isinstance(one, ModelCheckpoint)):
        patches.around(callback, compat.LINK_CHECKPOINT, partial(_link_below, request.directory))
    for saves_config in config_callbacks(trainer):
        vars(saves_config)["already_saved"] = True


def redirect(trainer: Trainer, request: ReplayRequest) -> None:
    """Give a trainer the directory of the replay as its ``default_root_dir``, once the run is found.

    Args:
        trainer: The trainer.
        request: The request for the replay.
    """
    root = request.path("root")
    os.makedirs(root, exist_ok=True)
    set_default_root_dir(trainer, root)


def without_saves(options: Options) -> Options:
    """Return the options of a callback for a replay: it saves nothing, and nothing stops it, not even a long step.

    Args:
        options: The options that the script passed.
    """
    return replace(
        options,
        every_n_train_steps=None,
        train_time_interval=_NEVER,
        keep_every=None,
        rule=None,
        stop=False,
        async_save=False,
        auto_resume=True,
        deadline=None,
        stop_signals=(),
        action="off",  # a user in the debugger takes any time
        timeout=None,
    )


def _is_below(path: object, directory: str) -> bool:
    text = str(path)
    return not is_url(text) and os.path.realpath(text).startswith(f"{os.path.realpath(directory)}/")


def _save_below(
    directory: str, save: Method, checkpoint: object, filepath: object, *args: object, **kwargs: object
) -> None:
    if _is_below(filepath, directory):
        save(checkpoint, filepath, *args, **kwargs)


def _remove_below(directory: str, remove: Method, filepath: object) -> None:
    if _is_below(filepath, directory):
        remove(filepath)


def _link_below(directory: str, link: Method, trainer: Trainer, filepath: object, linkpath: str) -> None:
    if _is_below(os.path.dirname(linkpath), directory):
        link(trainer, filepath, linkpath)


def set_value(trainer: Trainer, key: str, text: str) -> None:
    """Set a value of a fit.

    Args:
        trainer: The trainer of the fit.
        key: Where it is: ``model``, ``datamodule``, ``optimizers``, or ``trainer``, and names of attributes, keys of
            dicts, or indices of lists, with dots between.
        text: The value, as in Python; anything else is a string. A tensor is filled with a number, or takes the numbers
            of a list of its shape.

    Raises:
        ReplayError: If there is no such value yet, or it can't be set.

    Example:
        `set_value(trainer, "optimizers.0.param_groups.0.lr", "1e-4")`
    """
    first, *names = key.split(".")
    roots = {
        "model": trainer.lightning_module,
        "datamodule": getattr(trainer, "datamodule", None),
        "optimizers": trainer.optimizers,
        "trainer": trainer,
    }
    if first not in roots or not names:
        raise ReplayError(f"--set {key}: a key, such as model.hparams.size, begins with one of {', '.join(roots)}.")
    owner, value = None, roots[first]
    for number, name in enumerate(names):
        owner = value
        try:
            value = _get(owner, name)
        except (AttributeError, LookupError, ValueError):
            place = ".".join([first, *names[:number]])
            raise ReplayError(f"--set {key}: {place}, a {type(owner).__name__}, has no {name}.") from None
    try:
        _set(owner, names[-1], value, _parsed(text))
    except (AttributeError, TypeError, RuntimeError, ValueError) as error:
        raise ReplayError(f"--set {key}: it can't be set to {text}: {error}") from error


def _get(owner: object, name: str) -> object:
    if isinstance(owner, MutableMapping) and name in owner:
        return owner[name]
    if isinstance(owner, MutableSequence):
        return owner[int(name)]
    return getattr(owner, name)


def _set(owner: object, name: str, before: object, value: Any) -> None:
    if isinstance(before, torch.Tensor):
        with torch.no_grad():
            before.copy_(torch.as_tensor(value, dtype=before.dtype, device=before.device))
    elif isinstance(owner, MutableMapping) and name in owner:
        owner[name] = value
    elif isinstance(owner, MutableSequence):
        owner[int(name)] = value
    else:
        setattr(owner, name, value)


def _parsed(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


_DONE, _FAILED = 0, 1


def replay_of(trainer: Trainer, script: Script) -> ReplayedSteps | None:
    """Return the replay that a function of a trainer belongs to; ``None`` if the environment requests none.

    Args:
        trainer: The trainer.
        script: The process that created the callback.
    """
    request = replay_requested()
    return None if request is None else ReplayedSteps(trainer, request, script)


def _debugged(function: Method, *args: object, **kwargs: object) -> object:
    """Call a function in the debugger, which stops at its first line. Unlike ``runcall``, quitting it raises."""
    import pdb  # five modules that each start of a training would import

    debugger = pdb.Pdb(nosigint=True)
    debugger.reset()
    sys.settrace(debugger.trace_dispatch)
    try:
        return function(*args, **kwargs)
    finally:
        debugger.quitting = True
        sys.settrace(None)


class ReplayedSteps:
    """Runs the steps, and ends the process after the last one: no later code of the script may write anything.

    Args:
        trainer: The trainer that runs the fit.
        request: The request for the replay.
        script: The process that created the callback.
    """

    def __init__(self, trainer: Trainer, request: ReplayRequest, script: Script) -> None:
        self.request = request
        self._trainer = trainer
        self._script = script
        self._patches = Patches()
        self._first = self._last = StepPlace(number=0)
        self._place = StepPlace(number=0, epoch=0, batch=0)
        self._prepared_at: StepPlace | None = None
        self._ranks: Ranks | None = None
        self._close_workers: Callable[[], None] = lambda: None
        self._dump: StepDump | None = None

    def protect(self) -> None:
        """Keep the trainer from the files of the run."""
        protect(self._trainer, self.request)

    def redirect(self) -> None:
        """Give the trainer another ``default_root_dir``, once the run is found."""
        redirect(self._trainer, self.request)

    def begin(self, loaders: Loaders, ranks: Ranks) -> None:
        """Take the seams of the loops, if this is the fit to replay. Call it when its real work begins.

        Args:
            loaders: The fit's loaders.
            ranks: The ranks that train together.
        """
        if current_number(self._script) != self.request.fit:
            return
        start = ranks.from_first("replay", read_start(self.request))
        place = None if start is None else start.place
        first, last = self.request.since or place, self.request.until or place
        assert first is not None
        assert last is not None
        self._first, self._last, self._ranks, self._close_workers = first, last, ranks, loaders.close_workers
        if self.request.dumps is not None:
            self._dump = StepDump(self._trainer, loaders, self.request.dumps, self._patches)
        self._patches.around(self._trainer.fit_loop.epoch_loop, "advance", self._around_advance)
        self._patches.around(self._trainer.fit_loop, "run", self._around_run)

    def _around_advance(self, original: Method, data_fetcher: object) -> None:
        self._place = place = self._here()
        if place.is_after(self._last):
            self._end(PASSED)
        if not place.is_before(self._first):
            self._prepare()
            if self._dump is not None:
                self._dump.begin(place)
        original(data_fetcher)
        if num_begun_in_all(self._trainer) == place.number:
            return  # it only returns to where a validation run continues
        if self._dump is not None:
            self._dump.write()
        if not self.request.is_of_exception and not place.is_before(self._last):
            self._end(REACHED)

    def _here(self) -> StepPlace:
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        return StepPlace(
            number=num_begun_in_all(self._trainer), epoch=self._trainer.current_epoch, batch=current.completed
        )

    def _prepare(self) -> None:
        """Prepare the first of the steps."""
        if self._prepared_at is not None:
            return
        self._prepared_at = self._place
        for key, value in self.request.values:
            set_value(self._trainer, key, value)
        if self.request.detects_anomalies:
            torch.autograd.set_detect_anomaly(True)
        if self.request.opens_debugger and self._trainer.is_global_zero:
            debugging = Patches()

            def debug(training_step: Method, *args: object, **kwargs: object) -> Any:
                debugging.undo()  # the next steps run without it
                return _debugged(training_step, *args, **kwargs)

            debugging.around(self._trainer.lightning_module, "training_step", debug)

    def _around_run(self, original: Method) -> None:
        try:
            original()
        except bdb.BdbQuit:
            self._end(LEFT)
        except BaseException as error:  # noqa: BLE001 - the process ends here, and reports it
            self._fail(error)
        self._end(ENDED)

    def _fail(self, error: BaseException) -> NoReturn:
        traceback.print_exception(error)
        if self._dump is not None:
            self._dump.write()
        self._report(RAISED, f"{type(error).__name__}: {error}")
        self._leave(RAISED)

    def _end(self, word: str) -> NoReturn:
        """End the process; a collective, unless the user has quit the debugger."""
        self._report(word)
        if self._ranks is not None and word != LEFT:  # no rank may end while another one waits for it
            self._ranks.to_first("replayed", None)
            self._ranks.from_first("replayed", None)
        self._leave(word)

    def _report(self, word: str, text: str = "") -> None:
        """Report the end. Call this before any other rank may end, and with it the command that reads the reports."""
        changed = self._prepared_at if self.request.values else None
        outcome = ReplayOutcome(word=word, place=self._place, text=text, changed=changed)
        write_outcome(self.request, self._trainer.global_rank, outcome)

    def _leave(self, word: str) -> NoReturn:
        self._close_workers()
        save_logs(self._trainer)
        # Lightning's parent waits for a result of the processes that it has created, unless they fail.
        leave_process(_FAILED if word in (RAISED, LEFT) or self._script.is_elsewhere else _DONE)
