"""Writes the ledger of one fit or evaluation. It only observes: it draws no random numbers, and is not a hook.

`lightning_faulttolerant.records.ledger` describes the lines.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.errors import LedgerError
from lightning_faulttolerant.records import ledger as kinds
from lightning_faulttolerant.records.ledger import EVALUATED
from lightning_faulttolerant.records.lines import LineFile
from lightning_faulttolerant.state.rng import rng_state
from lightning_faulttolerant.trainer.adapters.compat import logger_connector_state
from lightning_faulttolerant.trainer.compat import num_completed
from lightning_faulttolerant.trainer.evaluation.compat import is_predicting
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.position import FIT, TrainerPosition, function_of, loop_of, num_evaluated
from lightning_faulttolerant.trainer.run.fingerprint import surroundings
from lightning_faulttolerant.trainer.steps.compat import as_logged, is_after_the_batches, logger_connector
from lightning_faulttolerant.trainer.steps.digests import (
    digest,
    exact,
    exact_metrics,
    learning_rates,
    loss_of,
    optimizers_digest,
    weights_digest,
)
from lightning_faulttolerant.trainer.steps.followed import WholeStep, WholeSteps

if TYPE_CHECKING:
    from lightning_faulttolerant.trainer.any_session import AnySession


def is_evaluating(trainer: Trainer) -> bool:
    """Return whether a validation run or an evaluation is in progress."""
    return trainer.validating or trainer.testing or trainer.predicting


def training_place(trainer: Trainer) -> dict[str, int]:
    """Return the epoch, and how many of its batches are done; zeros outside a fit."""
    if function_of(trainer) != FIT:
        return {"epoch": 0, "batch": 0}
    return {"epoch": trainer.current_epoch, "batch": num_completed(trainer)}


def _one_of(digests: list[Any]) -> str:
    """Return the digest of a batch, or one of all that a step has fetched by itself."""
    return digests[0] if len(digests) == 1 else digest(digests)


def returned_by(loop: Any, results: Any) -> dict[str, object]:
    """Return what an evaluation returned, in a form that JSON can hold.

    Args:
        loop: The loop of the evaluation.
        results: Its results: metrics of each loader, or predictions.
    """
    if results is None:
        return {}
    if not is_predicting(loop):
        return {name: value for metrics in results for name, value in exact_metrics(metrics).items()}
    of_loaders = results if loop.num_dataloaders > 1 else [results]
    number = sum(len(predictions) for predictions in of_loaders)
    return {"number of predictions": number, "predictions": digest(of_loaders)}


class _Lines:
    """The lines of one fit or evaluation.

    Args:
        file: The file to write to.
        number: The number of the fit or evaluation in its script, from 1.
    """

    def __init__(self, file: LineFile, number: int) -> None:
        self._file = file
        self._number = number

    def append(self, event: str, values: Mapping[str, object]) -> None:
        try:
            self._file.append({"event": event, "fit": self._number, "time": time.time(), **values})
        except OSError as error:
            raise LedgerError(
                f"A line could not be added to the ledger: {error}. A ledger with a gap can't be compared. Free some "
                "space, or run without a ledger."
            ) from error

    def close(self) -> None:
        self._file.close()


class _LoggedValues:
    """Follows what is logged: through the trainer, or to a logger directly.

    Args:
        trainer: The trainer that runs the fit or evaluation.
        log: Called with a step, the values, and the keywords of `FitLedger._log`.
    """

    def __init__(self, trainer: Trainer, log: Callable[..., None]) -> None:
        self._trainer = trainer
        self._log = log
        self._is_listening = self._is_logging = False

    def take_seams(self, loop: object, patches: Patches) -> None:
        patches.around(loop, "on_run_start", self._around_run_start)
        patches.around(logger_connector(self._trainer), "log_metrics", self._around_log)
        for logger in self._trainer.loggers:
            patches.around(logger, "log_metrics", partial(self._around_logger, logger))

    def _around_run_start(self, original: Method, *args: object, **kwargs: object) -> None:
        original(*args, **kwargs)
        self._is_listening = True  # values logged at the start of a fit are logged again at each start

    def _around_log(self, original: Method, metrics: Mapping[str, object], step: int | None = None) -> None:
        trainer = self._trainer
        if metrics and not trainer.sanity_checking:
            self._log(*as_logged(trainer, metrics, step), closes_epoch=is_after_the_batches(trainer))
        self._is_logging = True
        try:
            original(metrics, step=step)
        finally:
            self._is_logging = False

    def _around_logger(self, logger: object, original: Method, *args: object, **kwargs: object) -> object:
        if self._is_listening and not self._is_logging and not self._trainer.sanity_checking:
            metrics = args[0] if args else kwargs.get("metrics")
            step = args[1] if len(args) > 1 else kwargs.get("step")
            self._log(exact(step), metrics, logger=type(logger).__name__)
        return original(*args, **kwargs)  # unchanged: a logger may accept them by name only


class FitLedger:
    """Writes down what one fit or evaluation does.

    Args:
        trainer: The trainer that runs it.
        file: The file to write to.
        number: The number of the fit or evaluation in its script, from 1.
        session: Its session; ``None`` if fault tolerance is switched off.
        patches: Applies the patches to the trainer.
    """

    def __init__(
        self,
        trainer: Trainer,
        file: LineFile,
        *,
        number: int,
        session: AnySession | None,
        patches: Patches,
    ) -> None:
        self._trainer = trainer
        self._lines = _Lines(file, number)
        self._session = session
        loaders = None if session is None else session.loaders
        self._steps = WholeSteps(trainer, loaders, keep=digest, done=self._note_step)
        self._step: WholeStep | None = None
        self._has_begun = self._has_told_resume = False
        self._logged = _LoggedValues(trainer, self._log)
        self._place: tuple[int, int] | None = None  # the epoch, and how many of its batches have begun
        self._returned: dict[str, object] = {}
        self._is_fit = function_of(trainer) == FIT
        if session is not None:
            session.listeners.saved.append(self._autosaved)
        self._patches = patches

    def take_seams(self) -> None:
        """Begin to write."""
        trainer, patches = self._trainer, self._patches
        loop = trainer.fit_loop if self._is_fit else loop_of(trainer)
        patches.around(loop, "reset", self._around_reset)
        if self._is_fit:
            patches.around(logger_connector(trainer), "on_batch_start", self._around_batch_start)
            patches.around(trainer.fit_loop.epoch_loop.automatic_optimization, "run", self._around_optimization)
            patches.around(trainer.fit_loop.epoch_loop.manual_optimization, "run", self._around_optimization)
            patches.around(logger_connector(trainer), "log_eval_end_metrics", self._around_validation_end)
        else:
            patches.around(loop, "run", self._around_evaluation)
        self._logged.take_seams(loop, patches)
        self._steps.take_seams(patches)

    def _autosaved(self, position: TrainerPosition, path: str) -> None:
        """Write a line for an autosave that is written and verified."""
        is_inside = position.num_validated is not None or (position.is_of_evaluation and not position.is_finished)
        number = {"validation_batch": position.validation_batch} if is_inside else {}
        place = {"epoch": position.epoch, "batch": position.batch} if self._is_fit else {"epoch": 0, "batch": 0}
        self._write(kinds.AUTOSAVE, **place, **number, where=position.where, text=str(position), path=path)

    def end(self) -> None:
        """Write a line for the results of the fit or the evaluation."""
        trainer = self._trainer
        metrics = logger_connector_state(trainer)["metrics"]["callback"]  # the property would compute and change it
        if self._is_fit:
            results: dict[str, object] = {
                "weights": weights_digest(trainer),
                "optimizers": optimizers_digest(trainer),
            }
        else:
            results = {"returned": self._returned}
        self._write(
            kinds.END,
            **results,
            metrics=exact_metrics(metrics),
            rng=digest(rng_state()),
        )

    def close(self) -> None:
        """Close the file."""
        self._lines.close()

    def _write(self, event: str, **values: object) -> None:
        if not self._has_begun:
            self._begin()
        if not self._has_told_resume:
            self._tell_resume()
        self._lines.append(event, values)

    def _begin(self) -> None:
        self._has_begun = True
        trainer = self._trainer
        num_batches = trainer.num_training_batches if self._is_fit else sum(loop_of(trainer).max_batches)
        values = {
            "function": function_of(trainer),
            "pid": os.getpid(),
            "rank": trainer.global_rank,
            "num_ranks": trainer.world_size,
            "num_batches": None if num_batches == float("inf") else int(num_batches),
            "max_epochs": trainer.max_epochs if self._is_fit else 1,
            "surroundings": surroundings(trainer),
        }
        self._lines.append(kinds.FIT, values)

    def _tell_resume(self) -> None:
        report = None if self._session is None else self._session.report
        if report is None:
            return
        self._has_told_resume = True
        epoch, batch = (report.epoch, report.batch) if self._is_fit else (0, 0)
        self._place = self._place or (epoch, batch)
        place = {"epoch": epoch, "batch": batch, "where": report.where, "text": report.position}
        place |= {} if report.num_validated is None else {"validation_batch": report.num_validated}
        exactness = {"exact": report.is_exact, "not_exact": list(report.all_not_exact)}
        self._lines.append(kinds.RESUMED, {**place, **exactness, "path": report.path})

    # The wrapped methods.

    def _around_reset(self, original: Method) -> None:
        original()
        if not self._has_begun:
            self._begin()

    def _around_batch_start(self, original: Method, *args: object, **kwargs: object) -> None:
        if self._trainer.training:
            self._place = (self._trainer.current_epoch, num_completed(self._trainer) + 1)
        original(*args, **kwargs)

    def _around_optimization(self, original: Method, *args: object, **kwargs: object) -> object:
        outcome = original(*args, **kwargs)
        if self._step is not None:
            step, self._step = self._step, None
            order = _one_of([f"{one:08x}" for one in step.orders]) if step.orders and all(step.orders) else None
            rates = learning_rates(self._trainer)
            self._write(
                kinds.BATCH, **self._known_of(step), order=order, loss=exact(loss_of(step.output)), learning_rates=rates
            )
        return outcome

    def _note_step(self, step: WholeStep) -> None:
        if step.is_training:
            self._step = step
            return
        number = num_evaluated(self._trainer)
        self._write(EVALUATED, **self._known_of(step), validation_batch=number, output=exact(step.output))

    def _known_of(self, step: WholeStep) -> dict[str, object]:
        return {
            **training_place(self._trainer),
            "content": _one_of(step.batches),
            "rng": digest(step.generators),
        }

    def _around_validation_end(self, original: Method, metrics: Any) -> None:
        if not self._trainer.sanity_checking:
            self._write(
                kinds.VALIDATED,
                **training_place(self._trainer),
                metrics=exact_metrics(metrics),
            )
        original(metrics)

    def _around_evaluation(self, original: Method) -> object:
        results = original()
        self._returned = returned_by(loop_of(self._trainer), results)
        return results

    def _log(self, step: object, metrics: object, *, closes_epoch: bool = False, logger: str | None = None) -> None:
        validating = is_evaluating(self._trainer)
        if not self._has_told_resume:
            self._tell_resume()
        epoch, batch = self._place or (0, 0)
        self._write(
            kinds.LOG,
            epoch=epoch,
            batch=batch,
            step=step,
            metrics=exact_metrics(metrics),
            validating=validating,
            **({"validation_batch": num_evaluated(self._trainer)} if validating else {}),
            epoch_end=closes_epoch and not validating,
            logger=logger,
        )
