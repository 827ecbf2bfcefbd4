"""Everything that ends a fit early, on one rank or several: signals, a deadline, a rank that has failed.

Under SLURM, it also knows when the job's time is over, which signal announces its end, and how it is queued again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn

from lightning_faulttolerant.checkpoint.ranks import Alone, Ranks
from lightning_faulttolerant.early_signals import EARLY, NOTICE, end_by_notice
from lightning_faulttolerant.errors import NotRepeatedError, TrainingStopped
from lightning_faulttolerant.processes import call_at_end
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.patches import Method, Patches
from lightning_faulttolerant.trainer.ranks.agreement import STOP
from lightning_faulttolerant.trainer.ranks.compat import call_off_observers, cluster_environment
from lightning_faulttolerant.trainer.ranks.nodes import NodeGroup
from lightning_faulttolerant.trainer.ranks.strategies import open_line
from lightning_faulttolerant.trainer.ranks.watch import Watch
from lightning_faulttolerant.trainer.settings import Options
from lightning_faulttolerant.trainer.signals import (
    DEADLINE_EXIT_CODE,
    NOT_REPEATED_EXIT_CODE,
    REQUEUED_EXIT_CODE,
    Deadline,
    StopReason,
    StopSignals,
    signal_reason,
    stopped_by,
)

_log = logging.getLogger(__name__)

END_TIME_VARIABLE = "SLURM_JOB_END_TIME"
_SCONTROL_SECONDS = 10.0
_NAME = re.compile(r"\d+(_\d+)?")
_NOT_REPEATED = StopReason(name="a batch that is not repeated", exit_code=NOT_REPEATED_EXIT_CODE)


def queues_again(trainer: Trainer) -> bool:
    """Return whether the job must be queued again when it is stopped before its end."""
    environment = cluster_environment(trainer)
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def requeue_signal(trainer: Trainer, original_handlers: Mapping[int, object]) -> signal.Signals | None:
    """Return the signal that announces the end of the job, or ``None`` if there is none or user code handles it.

    Args:
        trainer: The trainer that runs in the SLURM environment.
        original_handlers: The handlers from before Lightning's. As in Lightning, a user's own handler keeps the signal.
    """
    environment = cluster_environment(trainer)
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    found = environment.requeue_signal
    if found is None or original_handlers.get(found) not in (None, signal.SIG_DFL):
        return None
    return found


def end_time(environment: Mapping[str, str]) -> float | None:
    """Return when the job's time is over, in seconds since 1970, or ``None`` if its environment does not say so."""
    text = environment.get(END_TIME_VARIABLE, "")
    if not text:
        return None
    try:
        return float(int(text))
    except ValueError:
        _log.warning(
            "%s is %r, which is not a time in seconds: the end of the job is not known.", END_TIME_VARIABLE, text
        )
        return None


def asked_end_time(environment: Mapping[str, str]) -> float | None:
    """Ask ``scontrol`` when the job's time is over, since SLURM 22.05 sets no variable; ``None`` if it is not known."""
    job = _job(environment)
    if not _NAME.fullmatch(job) or shutil.which("scontrol") is None:
        return None
    failure, answer = _scontrol("--oneliner", "show", "job", job)
    if failure:
        _log.warning("%s: the end of the job is not known.", failure)
    found = re.search(r"\bEndTime=(\d+)\b", answer)
    end = None if found is None else float(found[1])
    return None if end is None or end <= time.time() else end  # a site may let a job run longer than its limit


def requeue(environment: Mapping[str, str]) -> str:
    """Queue this job again by ``scontrol requeue``. Return why that failed, or an empty string."""
    job = _job(environment)
    if not _NAME.fullmatch(job):
        return f"the job has no number: {job!r}"
    failure, _ = _scontrol("requeue", job)
    if not failure:
        _log.info("SLURM job %s is queued again.", job)
    return failure


def _job(environment: Mapping[str, str]) -> str:
    """Return the job's number; a task of an array has that of the array and its own."""
    if environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    return environment.get("SLURM_JOB_ID", "")


def _scontrol(*arguments: str) -> tuple[str, str]:
    """Run ``scontrol``, with times in seconds since 1970. Return why it failed, or an empty string, and its output."""
    program = shutil.which("scontrol")
    if program is None:
        return "scontrol is not on the PATH", ""
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            errors="replace",  # a name of a job or directory may hold any bytes
            timeout=_SCONTROL_SECONDS,
            check=False,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), ""
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        return f"scontrol {' '.join(arguments)} ended with {done.returncode}: {said}", ""
    return "", done.stdout


class Agreement(Protocol):
    """How the main thread of a rank learns what all ranks are to do. See `Member`."""

    def at_boundary(self) -> str | None:
        """Return what all ranks do at this boundary."""

    def want_save(self, window: Mapping[str, int]) -> None:
        """Let all ranks save at a boundary soon."""

    def begin_run(self) -> None:
        """Note that a validation run begins."""

    def at_validation_batch(self) -> bool:
        """Return whether all ranks stop in front of this batch of the validation run."""

    def end_batches(self) -> None:
        """Note that this rank has no more batches in the validation run."""


class SoleRank:
    """The agreement of a single rank with itself."""

    def __init__(self, signals: StopSignals) -> None:
        self._signals = signals
        self.num_places = 0

    def at_boundary(self) -> str | None:
        """Return `STOP` once it is wanted."""
        self.num_places += 1
        return None if self._signals.requested is None else STOP

    def want_save(self, window: Mapping[str, int]) -> None:
        """Do nothing: a sole rank saves when it wants to."""

    def begin_run(self) -> None:
        """Do nothing."""

    def at_validation_batch(self) -> bool:
        """Return whether a stop is wanted."""
        self.num_places += 1
        return self._signals.requested is not None

    def end_batches(self) -> None:
        """Do nothing."""


class Stopping:
    """Everything that can end a fit early, from `connect` to `close`.

    Args:
        trainer: The trainer that runs the fit.
        options: The callback's options.
    """

    def __init__(self, trainer: Trainer, options: Options) -> None:
        self._trainer = trainer
        self._options = options
        self.signals = StopSignals(options.signals, grace_seconds=options.grace_seconds)
        self.agreement: Agreement = SoleRank(self.signals)
        self.is_too_late = False
        """Whether the run stops with no time left for a save."""
        self.refusal: str | None = None
        """Why nothing may be saved: what a rank does not repeat as it was before."""
        self._ranks: Ranks = Alone()
        self._watch = Watch(self.signals)
        self._patches = Patches()
        self._agreed: str | None = None
        self._is_interrupted = False
        self._is_open = False
        self._noted_at: float | None = None
        """When SLURM's notice came, if it came before the fit."""

    def connect(self, ranks: Ranks) -> None:
        """Connect the ranks; a collective. From now on all ranks learn of the death of one."""
        if not isinstance(ranks, NodeGroup):  # there is one rank
            return
        self._ranks = ranks
        line = open_line(ranks)
        self._watch = Watch(self.signals, rank=ranks.rank, num_ranks=ranks.num_ranks, line=line)
        self.agreement = self._watch.member
        self.signals.is_alone = False
        self._begin_watch()

    def open(self) -> None:
        """Take over the seams that concern the end of a fit."""
        loop, around = compat.validation_loop(self._trainer), self._patches.around
        around(self._trainer.fit_loop, "run", self._around_run)
        around(loop, "run", self._around_run)
        around(loop, "reset", self._around_validation_reset)
        around(loop, "on_run_end", self._around_validation_end)
        around(compat.signal_connector(self._trainer), "register_signal_handlers", self._around_register)
        around(compat.signal_connector(self._trainer), "teardown", self._around_teardown)
        self._is_open = True

    def begin(self, save_seconds: Callable[[], float]) -> None:
        """Take over the signals, and watch the deadline.

        Args:
            save_seconds: Returns how long a save takes, from earlier saves.
        """
        original = compat.original_handlers(self._trainer)
        requeue = requeue_signal(self._trainer, original)
        self.signals.grace.save_seconds = save_seconds
        self.signals.install(original, requeue_signal=requeue)
        at = self._deadline_at()
        if at is not None:
            self.signals.grace.announced_seconds = lambda: at - time.time()
            deadline = Deadline(at, save_seconds=save_seconds, progress=self._progress)
            self._mind(deadline)  # it may have passed
            self._watch.looks.append(lambda: self._mind(deadline))
        if self._noted_at is not None:
            self._note_early(self._noted_at, requeue)
        self._begin_watch()

    def _note_early(self, noted_at: float, requeue_signal: signal.Signals | None) -> None:
        """Stop for a notice that came before the fit. If no stop is requested for it, end as without this package."""
        if NOTICE not in (requeue_signal, *self._options.signals):
            end_by_notice("Add it to stop_signals, or pass it as SLURMEnvironment(requeue_signal=...).")
        reason = signal_reason(NOTICE, requeues=requeue_signal == NOTICE)
        left = self.signals.grace.seconds - (time.monotonic() - noted_at)
        self.signals.note(reason, max(left, self.signals.grace.announced_seconds() if reason.requeues else 0.0))

    def _begin_watch(self) -> None:
        self.signals.before_hard_end = self._before_hard_end
        self._watch.start()

    def _deadline_at(self) -> float | None:
        job_end = end_time(os.environ)
        if job_end is not None and job_end <= time.time():
            rank_zero_warn(
                f"{END_TIME_VARIABLE} says that the time of this job was over {time.time() - job_end:.0f} "
                "seconds ago, but the job still runs. The variable comes from another job, or the time was extended. "
                "It is ignored."
            )
            job_end = None
        if job_end is None and self._ranks.rank == 0:
            job_end = asked_end_time(os.environ)
        ends = (self._options.deadline, *self._ranks.to_all("the end of the job", job_end))
        return min((at for at in ends if at is not None), default=None)

    def _progress(self) -> object:
        agreement = self.agreement
        return agreement.num_places if isinstance(agreement, SoleRank) else self._watch.member.place

    def _mind(self, deadline: Deadline) -> None:
        if self.signals.requested is None and deadline.is_near():
            reason = StopReason(
                name="the deadline",
                exit_code=DEADLINE_EXIT_CODE,
                requeues=queues_again(self._trainer) and not self._was_over(),
            )
            self.signals.note(reason, max(deadline.seconds_left(), self.signals.grace.seconds))

    def _was_over(self) -> bool:
        """Return whether the deadline had passed when the script began. A requeued job would only stop again."""
        return self._options.deadline is not None and self._options.deadline <= self._options.made_at

    # At the places where a fit can end.

    @property
    def reason(self) -> StopReason:
        """Why the run is to stop. Several ranks agree on one reason."""
        agreed = self._agreed or self._watch.member.stop
        if agreed is not None:
            return StopReason.from_text(agreed)
        assert self.signals.requested is not None
        return self.signals.requested

    def save_fits(self) -> bool:
        """Return whether a save fits in the rest of each rank's grace period; a collective."""
        left = self._ranks.to_first("the time that is left", self.signals.grace.seconds_left())
        fits = left is not None and self.signals.grace.save_fits(min(left))
        self.is_too_late = not self._ranks.from_first("whether a save fits", fits)
        return not self.is_too_late

    def all_can(self, can: bool) -> bool:
        """Return whether all ranks can; a collective."""
        return all(self._ranks.to_all("who can", can))

    def stop_if_wanted(self, where: str, unsaved: str = "") -> None:
        """Stop all ranks here if one of them was asked to stop; a collective.

        Args:
            where: The place in the run.
            unsaved: Why the state of that place could not be saved, if that failed.

        Raises:
            TrainingStopped: If a rank was asked to stop.
        """
        own = self.signals.requested
        wishes = self._ranks.to_all("a wish to stop", own and own.to_text())
        text = next(filter(None, wishes), None)
        if text is not None:
            self._agreed = text
            self.signals.note(StopReason.from_text(text))
            self.end_together()
            raise stopped_by(StopReason.from_text(text), where, unsaved)

    def refuse(self, reason: str) -> None:
        """Stop all ranks at the next boundary, because this one does not repeat what it did before."""
        self.refusal = reason
        self.signals.note(_NOT_REPEATED)

    def stop_if_refused(self) -> None:
        """Stop all ranks here, without a save, if one of them does not repeat what it did before; a collective.

        Raises:
            NotRepeatedError: If one does not.
        """
        for rank, reason in enumerate(self._ranks.to_all("what is not repeated", self.refusal)):
            if reason is not None:
                if self.refusal is None:
                    _log.error("This rank stops, because rank %d does not repeat exactly what it did before.", rank)
                self.refusal = reason
                self.end_together()
                raise NotRepeatedError(_NOT_REPEATED.exit_code, reason, _NOT_REPEATED.name)

    def before_sanity_batch(self) -> None:
        """Stop here if a rank was asked to stop. There is nothing to save in the sanity check.

        Raises:
            TrainingStopped: If a rank was asked to stop.
        """
        if self.agreement.at_validation_batch():
            self.end_together()
            raise stopped_by(self.reason, "in the sanity check")

    def end_together(self) -> None:
        """Note that all ranks end here by agreement. From now on a rank that is gone is not a failure."""
        self._watch.end_together = True
        if self._ranks.num_ranks > 1:
            call_off_observers()

    # At the end.

    def fail(self, exception: BaseException) -> None:
        """Report immediately what ended this rank, if it ended alone."""
        self._watch.fail(exception)

    def requeue(self, exception: BaseException) -> None:
        """Requeue the SLURM job after a stop, if the reason says so; a collective if the ranks end together."""
        if not isinstance(exception, TrainingStopped):
            return
        if self.signals.requested is None or not self.reason.requeues:
            return
        failure = requeue(os.environ) if self._ranks.rank == 0 else ""
        if self._ranks.num_ranks > 1 and self._watch.end_together:  # srun may end all ranks when the first ends
            failure = self._ranks.from_first("requeue", failure)
        if not failure:
            exception.code = REQUEUED_EXIT_CODE
        elif self._ranks.rank == 0:
            _shout(failure, exception.reason)

    def _before_hard_end(self, reason: StopReason) -> None:
        if reason.requeues and self._ranks.rank == 0:
            failure = requeue(os.environ)
            if failure:
                _shout(failure, "The run continues from its last autosave")

    def interrupt(self, exception: BaseException) -> None:
        """Keep watching until Lightning's own teardown is done: it may wait for a rank that is gone."""
        self.fail(exception)
        self._is_interrupted = True

    def close(self) -> None:
        """Give the signals back and stop watching, unless an interrupted fit is still being torn down."""
        # A free rank has nothing to watch for. And if a user's on_exception raises, Lightning never tears down.
        is_free = self._ranks.num_ranks == 1 and self.signals.requested is None
        if is_free or not self._is_interrupted or not self._is_open:
            self._end()

    def _end(self) -> None:
        with contextlib.ExitStack() as closing:
            closing.callback(self._watch.close)
            closing.callback(self._patches.undo)
            closing.callback(self.signals.uninstall)

    # What the seams do.

    def _around_run(self, run: Method) -> object:
        try:
            return run()
        except BaseException as error:
            self.fail(error)  # before any callback's on_exception, which may wait for the other ranks
            raise

    def _around_validation_reset(self, reset: Method) -> None:
        self.agreement.begin_run()
        reset()

    def _around_validation_end(self, on_run_end: Method) -> object:
        self.agreement.end_batches()
        return on_run_end()

    def _around_register(self, register_signal_handlers: Method) -> None:
        # Before the autosaves of this fit are removed, which may be remote: the last call comes first.
        call_at_end(EARLY.ignore, is_remote=True)
        self._noted_at = EARLY.take()  # or Lightning would take our handler for one of the script's
        register_signal_handlers()

    def _around_teardown(self, teardown: Method) -> None:
        teardown()
        if self._is_interrupted:
            self._end()


def _shout(failure: str, outcome: str) -> None:
    sys.stderr.write(
        f"\nFaultTolerance: THE SLURM JOB IS NOT QUEUED AGAIN: {failure}. {outcome}. Submit the job again.\n"
    )
