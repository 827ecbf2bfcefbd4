"""A callback: with `Trainer(callbacks=[FaultTolerance()])`, a script run again after a crash continues where it was."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from lightning_faulttolerant.early_signals import EARLY
from lightning_faulttolerant.errors import UnsupportedTrainerError, speak_of_variable
from lightning_faulttolerant.trainer.bases import is_module, names_of_hooks, served
from lightning_faulttolerant.trainer.companions import Protection, with_companions
from lightning_faulttolerant.trainer.process import (
    Registered,
    begin_fit,
    is_fit_in_progress,
    is_nested_fit,
    is_switched_off,
    without_collections,
)
from lightning_faulttolerant.trainer.resume.report import ResumeReport
from lightning_faulttolerant.trainer.settings import (
    Options,
    described,
    option_names,
    with_options_of_environment,
)

if TYPE_CHECKING:
    from lightning_faulttolerant.trainer.any_session import AnySession
    from lightning_faulttolerant.trainer.steps.open_ledger import OpenLedger

_log = logging.getLogger(__name__)


class FaultTolerance(Protection):
    """A callback that lets a killed training continue exactly where it was when the same command is run again.

    ``validate``, ``test``, and ``predict`` continue, too. Arguments that are not passed are taken from
    ``PL_FAULT_TOLERANT_OPTIONS``. `docs/guides/settings.md` says more.

    Args:
        dirpath: The directory or URL of the autosaves. Default: ``<default_root_dir>/fault_tolerance``.
        run_id: The name of the run. Default: ``PL_FAULT_TOLERANT_RUN_ID``, else a hash of script and arguments.
        keep_last: How many verified autosaves to keep, at least 1.
        every_n_train_steps: Autosave after this many optimizer steps.
        train_time_interval: Autosave after this much time.
        overhead_budget: Share of the time, in (0, 1], that training may wait for autosaves; 1 means no limit. Default:
            0.01, until failures of the run show the best interval.
        async_save: Write autosaves in the background. This needs memory for a copy.
        incremental: Write only the tensors that changed since a base file. This needs memory for a copy of the others.
        stop_signals: Names of the signals that stop the run. It finishes its batch and saves its state.
        grace_seconds: Seconds between the first signal and the end of the process.
        deadline: When the run must have ended: a ``datetime``, a ``timedelta`` from now, or a string of either. The run
            saves and stops before that, with exit code 75.
        auto_resume: Whether to continue from autosaves of this run. If not, they are set aside.
        strict: Whether state that can't be captured or restored exactly is an error rather than a warning.
        elastic: Whether a run may continue with a different number of ranks or workers, without their random states.
        worker_rng: ``capture``: the states of the workers' generators are saved. ``per_sample``: they are seeded before
            each sample, so that the number of workers may change.
        trust_autosaves: Whether a resume may unpickle objects that ``torch.load(weights_only=True)`` refuses, which can
            run any code. Default: ``PL_FAULT_TOLERANT_TRUST``, else yes if only this user and root can write to the
            autosave.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of its range, or two contradict each other.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_faulttolerant import FaultTolerance
        >>> trainer = Trainer(callbacks=[FaultTolerance()], logger=False)
    """

    @with_options_of_environment
    def __init__(
        self,
        dirpath: str | os.PathLike[str] | None = None,
        *,
        run_id: str | None = None,
        keep_last: int = 2,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        overhead_budget: float | None = None,
        async_save: bool = False,
        incremental: bool = False,
        stop_signals: Sequence[str] = ("SIGTERM", "SIGINT"),
        grace_seconds: float = 25.0,
        deadline: datetime | timedelta | str | None = None,
        auto_resume: bool = True,
        strict: bool = True,
        elastic: bool = False,
        worker_rng: Literal["capture", "per_sample"] = "capture",
        trust_autosaves: bool | None = None,
    ) -> None:
        self._options = Options.of_arguments(locals())
        self._set_up()

    def _set_up(self) -> None:
        EARLY.begin(os.environ, fit_follows=True)
        self._number = self._options.script.count_callback()
        self.is_from_environment = False
        self._log: object = None
        self._session: AnySession | None = None
        self._ledger: OpenLedger | None = None
        self._last_report: ResumeReport | None = None
        self._registered: dict[str, Registered] = {}

    def __repr__(self) -> str:
        return described(self, FaultTolerance.__init__)

    def register(
        self, name: str, state_dict: Callable[[], object], load_state_dict: Callable[[object], object]
    ) -> FaultTolerance:
        """Save a state that the callback can't find: in a C extension, a closure, or another library's global.

        Each rank saves and restores its own. It is restored together with the object state: after all hooks that start
        the fit, before the random states.

        Args:
            name: The name in reports, or the path of an object that a checkpoint can't carry, as a message shows it. It
                must not be registered yet.
            state_dict: Returns the state: numbers, strings, bytes, tensors, arrays, and containers of these.
            load_state_dict: Receives the value that `state_dict` returned.

        Returns:
            The callback itself.

        Raises:
            ValueError: If the name is already registered.
            TypeError: If one of the functions can't be called.

        Example:
            >>> seen = []
            >>> callback = FaultTolerance().register("seen", lambda: list(seen), seen.extend)
        """
        if name in self._registered:
            raise ValueError(f"A state is already registered as {name!r}. Choose another name.")
        if not callable(state_dict) or not callable(load_state_dict):
            raise TypeError(f"state_dict and load_state_dict of {name!r} must be functions.")
        self._registered[name] = (state_dict, load_state_dict)
        return self

    def call_on_skipped(self, function: Callable[[int, int], None]) -> None:
        """Call `function` with epoch and batch of each training batch that the fit in progress leaves out.

        Args:
            function: The function.
        """
        if self._session is not None:
            self._session.listeners.skipped.append(function)

    @property
    def resume_report(self) -> ResumeReport | None:
        """The report of what the last ``fit`` or evaluation restored; ``None`` if it started from the beginning."""
        if self._session is not None:
            return self._session.report
        return self._last_report or ResumeReport.load(self._options.script.report(self._number))

    @property
    def log(self) -> Any:
        """The module's ``log``, which Lightning sets on each callback."""
        return self._log

    @log.setter
    def log(self, log: object) -> None:
        # Lightning sets this first in a run. By the time of setup, loggers have begun new files and removed old ones.
        self._log = log
        module = getattr(log, "__self__", None)  # a user's function in its place has none: setup begins the fit
        if module is None or not is_module(module):
            return
        self._begin(module.trainer)

    @without_collections()
    def _begin(self, trainer: Any) -> None:
        """Begin a fit or an evaluation, unless it is only a trial."""
        if not self._is_in_charge(trainer):
            return
        if not self._has_begun(trainer) and trainer.state.fn != "fit":
            EARLY.give_back()  # nothing of ours could stop it

    def _has_begun(self, trainer: Any) -> bool:
        """Begin a session unless the run is only a trial, and return whether it has begun."""
        is_fit = trainer.state.fn == "fit"
        if is_switched_off():
            return False
        speak_of_variable(option_names(FaultTolerance.__init__) if self.is_from_environment else ())
        package = served(trainer)
        if package.compat.is_nobodys_training(trainer):
            return False
        if is_fit:
            package.check_strategy(trainer.strategy)
        elif not package.can_be_evaluated(trainer):
            return False
        if is_nested_fit(trainer):
            # It is part of a hook of the outer fit, and a resume runs that hook again from its start. The number of the
            # inner fit would then be that of another fit.
            _log.info("This fit runs inside another fit, so it is not saved: a resume of the outer fit repeats it.")
            return False
        self._last_report = None
        self._close_ledger()  # first: its patches lie over those of the session
        if self._session is not None:  # another callback's on_exception raised, and ours was never called
            self._session.close()
        begin_fit(trainer)
        kind = package.Session if is_fit else package.EvaluationSession
        options = with_companions(self._options, package.compat.callbacks(trainer))
        self._session = kind(trainer, options, self._registered)
        self._session.begin()
        return True

    def __getstate__(self) -> dict[str, object]:
        """Leave out the fit that is under way: a copy has the same arguments and has trained nothing yet."""
        of_the_fit = {"log_dict", *names_of_hooks()}
        own = {name: value for name, value in vars(self).items() if name not in of_the_fit}
        return {**own, "_log": None, "_session": None, "_ledger": None}

    def setup(self, trainer: object, pl_module: object, stage: str) -> None:
        """Take over the fit or the evaluation."""
        if self._is_of_another(trainer):
            return
        # If nobody has set our log. A callback that holds this one may call this a second time.
        if self._session is None or (self._session.is_open and not is_module(getattr(self._log, "__self__", None))):
            self._begin(trainer)
        if self._session is not None and not self._session.is_open:
            self._session.open(self)
            self._ledger = served(trainer).OpenLedger(trainer, self._options, self._session)
        elif is_switched_off() and served(trainer).begins_while_off(trainer) and self._is_in_charge(trainer):
            self._close_ledger()
            begin_fit(trainer)
            self._ledger = served(trainer).OpenLedger(trainer, self._options, None)

    def on_save_checkpoint(self, trainer: object, pl_module: object, checkpoint: dict[str, object]) -> None:
        """Add the position and our state to a checkpoint that user code or another callback saves inside the fit."""
        if self._session is not None and not self._is_of_another(trainer):
            self._session.put_part(checkpoint)

    def on_exception(self, trainer: object, pl_module: object, exception: BaseException) -> None:
        """Save what can be saved, and undo our changes to the trainer."""
        session = self._ended(trainer)
        with self._ledger_ended(trainer, finished=False):
            if session is not None:
                session.interrupt(exception)

    def teardown(self, trainer: object, pl_module: object, stage: str) -> None:
        """Mark the fit or the evaluation as finished, and undo our changes to the trainer."""
        session = self._ended(trainer)
        with self._ledger_ended(trainer, finished=True):
            if session is not None:
                session.finish()

    def _ended(self, trainer: object) -> AnySession | None:
        """Return the session of a fit that ends, or ``None`` if there is none, and forget it."""
        if self._session is None or self._is_of_another(trainer):
            return None
        session, self._session = self._session, None
        self._keep_report(session)
        return session

    def _ledger_ended(self, trainer: Any, *, finished: bool) -> AbstractContextManager[None]:
        if self._ledger is None or not self._ledger.is_of(trainer):
            return nullcontext()
        ledger, self._ledger = self._ledger, None
        return ledger.ended(finished=finished)

    def _close_ledger(self) -> None:
        """Close the ledger of a fit or an evaluation that ended without calling our hooks."""
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None

    def _keep_report(self, session: AnySession) -> None:
        report = self._last_report = session.report
        if self._options.script.is_elsewhere and session.trainer.is_global_zero:
            self._options.script.tell_report(self._number, None if report is None else asdict(report))

    def _is_of_another(self, trainer: object) -> bool:
        """Return whether this callback follows another fit, and `trainer` got it inside a hook of that fit."""
        own = self._session.trainer if self._session is not None else trainer
        return own is not trainer and is_fit_in_progress(own)

    def _is_in_charge(self, trainer: object) -> bool:
        """Return whether this callback is the one that acts: the first that the user added, if there are several."""
        callbacks = served(trainer).compat.callbacks(trainer)
        found = [callback for callback in callbacks if isinstance(callback, FaultTolerance)]
        if not any(callback is self for callback in found):
            raise UnsupportedTrainerError(
                "This FaultTolerance was not among the Trainer's callbacks, nor held by one, when the Trainer "
                "was created, so it can't follow this run: pass it to Trainer(callbacks=[...])."
            )
        own = [callback for callback in found if not callback.is_from_environment]
        return (own or found)[0] is self
