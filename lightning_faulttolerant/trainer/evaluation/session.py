"""One ``validate``, ``test``, or ``predict``: it continues at its batch when the same command is run again.

An evaluation that can't be resumed is run from its start, and not refused: to repeat it gives the same results. One
that continues stops at a batch that is another one than before.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant.checkpoint.ranks import by_first
from lightning_faulttolerant.checkpoint.schema import MARK, NOT_EXACT, REMARKS
from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.early_signals import EARLY
from lightning_faulttolerant.errors import CheckpointError, NotExactError, RanksLostError, TrainingStopped
from lightning_faulttolerant.storage.store import is_url, local_path
from lightning_faulttolerant.supervision.heartbeats import SAVE, TEARDOWN
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.adapters.compat import copied
from lightning_faulttolerant.trainer.any_session import AnySession, tell_stopped
from lightning_faulttolerant.trainer.evaluation import compat as runs
from lightning_faulttolerant.trainer.evaluation.evaluation_resume import EvaluationResume, SavedEvaluation
from lightning_faulttolerant.trainer.evaluation.saving import Dealing, EvaluationSaver, OwnParts, Predictions
from lightning_faulttolerant.trainer.evaluation.validation import CommonPace
from lightning_faulttolerant.trainer.loaders.trackers import must_note_fetches
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.patches import Method, pass_over_idle_hooks, then
from lightning_faulttolerant.trainer.position import TrainerPosition, function_of, loop_of, num_evaluated, position_of
from lightning_faulttolerant.trainer.process import Registered
from lightning_faulttolerant.trainer.resume.choice import Choice, Trust
from lightning_faulttolerant.trainer.resume.report import ResumeReport
from lightning_faulttolerant.trainer.run.fingerprint import Fingerprint, surroundings
from lightning_faulttolerant.trainer.save.run_state import RunState, remarks_of
from lightning_faulttolerant.trainer.settings import Options
from lightning_faulttolerant.trainer.signals import stopped_by


@dataclass(frozen=True, kw_only=True, slots=True)
class _BegunEvaluation:
    """What reads and saves an evaluation once it has begun, with its weights loaded.

    Args:
        run_state: Reads the state.
        own: Reads what only evaluations have.
        saver: Writes the autosaves.
    """

    run_state: RunState
    own: OwnParts
    saver: EvaluationSaver


class EvaluationSession(AnySession):
    """Everything that this package keeps for the length of one evaluation.

    Args:
        trainer: The trainer that evaluates.
        options: The callback's options.
        registered: The functions that were passed to `FaultTolerance.register`, by name.
    """

    def __init__(self, trainer: Trainer, options: Options, registered: Mapping[str, Registered]) -> None:
        super().__init__(trainer, options, strict=None)
        self._registered = registered
        self._fingerprint = Fingerprint(trainer)
        self._function = function_of(trainer)
        self._loop = loop_of(trainer)
        self._begun: _BegunEvaluation | None = None
        self._resume: EvaluationResume | None = None
        self._common: CommonPace | None = None
        self._dealing: Dealing | None = None
        self._is_without_weights = False
        """Whether the checkpoint of a finished evaluation is gone: ModelCheckpoint keeps the best file only."""
        self._is_off = False
        self._continued: Choice | None = None
        """The autosave of this very evaluation that it continues from, or whose start it repeats."""

    @property
    def report(self) -> ResumeReport | None:
        """The report of what was restored, if this evaluation resumed."""
        return self._resume.report if self._resume is not None else None

    def choose(self) -> None:
        """Open the run on rank 0, and choose there."""
        self._attempt(super().choose)

    def connect(self) -> None:
        """Connect the ranks, and send the choice to all of them; a collective."""
        self._attempt(super().connect)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do `work`. If its run can't be opened, the evaluation runs as it is: nothing is lost but time."""
        try:
            work()
        except RanksLostError:
            raise
        except (CheckpointError, OSError) as error:
            self._is_off = True
            tell(f"This {self._function} can't be resumed if it is interrupted: {error}")

    def open(self, callback: Callback) -> None:
        """Take over the seams. `callback` is the callback that opens this session."""
        if not self._beginning.is_connected:
            self.connect()
        self.is_open = True
        if self._is_off:
            self._supervision.close()  # nothing marks its batches
            EARLY.give_back()  # nothing stops it for a notice
            return
        pass_over_idle_hooks(callback, self._patches)
        self.stopping.open()
        trainer, loop, around = self.trainer, self._loop, self._patches.around
        around(compat.checkpoint_connector(trainer), "resume_start", self._around_resume_start)
        self._patches.wrap(compat.signal_connector(trainer), "register_signal_handlers", then(self._begin))
        around(trainer.strategy, "process_dataloader", self._around_process_dataloader)
        around(loop, "run", self._around_run)
        around(loop, "setup_data", self._around_setup_data)
        around(loop, "reset", self._around_reset)
        around(loop, "on_run_start", self._around_run_start)
        around(loop, "on_run_end", self._around_evaluation_end)

    def put_part(self, checkpoint: dict[str, object]) -> None:
        """Leave the checkpoint as it is: it is not one of a fit."""

    def _begin(self) -> None:
        """Begin the evaluation itself: its weights are loaded."""
        options, beginning, ranks = self._options, self._beginning, self._beginning.ranks
        self.stopping.begin(lambda: self._begun.saver.pace.save_seconds if self._begun is not None else 0.0)
        if runs.is_predicting(self._loop):
            is_per_sample = options.worker_rng == "per_sample"
            self._dealing = Dealing(self.trainer, self.loaders, is_per_sample=is_per_sample)
        own = OwnParts(self.trainer, self._dealing)
        run_state = RunState(self.trainer, self.loaders, self._files, self._registered, options, own=own.readers)
        trust, series = Trust(options), beginning.series
        run_state.objects.keeps_bytes = by_first(ranks, "trust", series, trust.is_trusted_series)
        directory = ranks.from_first("the directory", None if series is None else str(series.directory))
        predictions = Predictions(self.trainer, directory, rank=ranks.rank, trust=trust)
        self.loaders.share_seeds(ranks)
        mark, here = self._files.mark, surroundings(self.trainer)
        saver = EvaluationSaver(
            self.trainer,
            series,
            own.sums,
            options,
            ranks=ranks,
            header=lambda state: {
                MARK: mark,
                "origin": None,
                "surroundings": here,
                NOT_EXACT: [] if self.report is None else self.report.to_inherit,
                REMARKS: remarks_of(state),
                "fingerprint": self._fingerprint.state_dict(self.loaders.fingerprints),
            },
            history=beginning.history,
            predictions=predictions,
            on_saved=self.listeners.saved,
        )
        self._begun = _BegunEvaluation(run_state=run_state, own=own, saver=saver)
        self._patches.wrap(self._loop, compat.BEFORE_FETCH, partial(self._wrap_before_fetch, self._begun))
        choice = beginning.choice
        if choice is not None and choice.checkpoint is not None and choice.part is not None:
            saved = SavedEvaluation(
                self.trainer, str(choice.path), choice.checkpoint, choice.part, ranks=ranks, options=options
            )
            beginning.forget_checkpoint()
            self._continue(choice.with_checkpoint(None), saved, self._begun, predictions, trust)

    def _continue(
        self, choice: Choice, saved: SavedEvaluation, begun: _BegunEvaluation, predictions: Predictions, trust: Trust
    ) -> None:
        """Continue from an autosave if all ranks can, or start over."""
        resume = EvaluationResume(
            self.trainer,
            saved,
            begun.run_state,
            self.loaders,
            self._fingerprint,
            trust=trust,
            predictions=predictions,
            patches=self._patches,
            options=self._options,
        )
        reason = resume.why_not(has_weights=not self._is_without_weights)
        if self.stopping.all_can(not reason):
            self._files.settle()
            self._resume = None if saved.starts_over else resume
            self._continued = choice
            return
        self._start_over(reason)

    def _start_over(self, reason: str) -> None:
        self._resume, self._continued, series = None, None, self._beginning.series
        if self._beginning.ranks.rank == 0 and series is not None:
            aside = series.set_aside("another-evaluation")
            reason = reason or "another rank can't continue it"
            tell(f"This {self._function} starts over: {reason}. Its autosaves are now in {aside}.")

    # What the seams do.

    def _around_resume_start(
        self, original: Method, checkpoint_path: object = None, *args: object, **kwargs: object
    ) -> None:
        if checkpoint_path is not None and self._is_finished_for_good() and _is_gone(checkpoint_path):
            checkpoint_path, self._is_without_weights = None, True
        original(checkpoint_path, *args, **kwargs)

    def _is_finished_for_good(self) -> bool:
        """Return whether this evaluation is finished, and a later fit restores its own weights anyway."""
        choice = self._beginning.choice
        part = None if choice is None else choice.part
        is_finished = part is not None and TrainerPosition.from_state_dict(part["position"]).is_finished
        return is_finished and self._beginning.has_later_autosaves()

    def _around_process_dataloader(self, original: Method, loader: object) -> object:
        return self.loaders.process(original(loader))

    def _around_setup_data(self, original: Method) -> None:
        self.loaders.begin(self._function)
        if self._resume is not None:
            self.loaders.expect(self._resume.compare_loader)
        with self.loaders.iterated_by_trainer(stage=self._function):
            original()
        if self._dealing is not None:
            self._dealing.look()
        if self._resume is not None:
            reason = self._resume.why_other_data(self._dealing)
            if self.stopping.all_can(not reason):
                self._resume.continue_loaders(self._dealing)
            else:
                self.loaders.resumed()
                self._start_over(reason)
        if self._begun is not None:
            self._begun.run_state.objects.look_again()

    def _around_run(self, original: Method) -> object:
        if self._begun is None:
            return original()
        run_state, saver = self._begun.run_state, self._begun.saver
        if self._resume is not None:
            self._resume.put_back_splits()
        run_state.objects.begin()
        self._files.flush()
        saver.note_files(self._files.state_dict())
        if self._resume is not None and self._resume.position.is_finished:
            self._loop.setup_data()  # what the evaluation has changed on the loaders' objects is restored, too
        if self._resume is not None and self._resume.position.is_finished:
            results = self._resume.restore_finished()
            self._note_start()
        else:
            run_state.validation.begin()
            run_state.validation.lost_before = run_state.not_carried()
            results = original()
            finished = self._position(is_finished=True)
            self._supervision.in_section(SAVE)
            self._refuse_other_batches()
            returned = None if runs.is_predicting(self._loop) or results is None else copied(results)
            saver.save(finished, run_state.state_dict(finished), returned)
        self._supervision.in_section(TEARDOWN)
        self.stopping.stop_if_wanted(f"after the end of {self._function}")
        return results

    def _note_start(self) -> None:
        position = None if self._resume is None else self._resume.position
        self._supervision.start(position)
        self._beginning.history.start(self._continued, self.report, position)

    def _around_reset(self, original: Method) -> None:
        notes_fetches = must_note_fetches(self.loaders.trackers, self._function)
        if notes_fetches and self._begun is not None:
            self._patches.wrap(self._loop, compat.AFTER_FETCH, self._wrap_after_evaluation_fetch)
        with self.loaders.iterated_by_trainer():
            if self._begun is None:
                original()
            elif self._resume is not None:
                self._begun.run_state.validation.reset(self._resume.run, original)
            else:
                self._begun.run_state.validation.watch_first_fetch()
                original()
        self._notes_fetches = notes_fetches

    def _around_run_start(self, original: Method) -> None:
        edits = self._note_batches(None if self._resume is None else self._resume.proving)
        if self._resume is None:
            original()
        else:
            self._resume.notes += edits
            self._resume.restore()
        self._note_start()
        if self._beginning.ranks.num_ranks > 1 and self._begun is not None:
            first, num_batches = num_evaluated(self.trainer), runs.num_batches_of(self._loop)
            self._common = CommonPace(self._beginning.ranks, first, num_batches)

    def _position(self, *, is_finished: bool = False) -> TrainerPosition:
        return position_of(self.trainer, f"{'after' if is_finished else 'in'} {self._function}")

    def _wrap_before_fetch(self, begun: _BegunEvaluation, original: Method) -> Method:
        saver, run = begun.saver, begun.run_state.validation
        wants_stop = self.stopping.agreement.at_validation_batch
        history, supervision = self._beginning.history, self._supervision

        def before_fetch() -> None:
            if wants_stop():
                self._stop_here(begun)
            now = perf_counter()
            if now >= saver.pace.due_at or self._common is not None:
                self._save_if_due(begun)
            if now >= history.due_at:
                history.alive()
            if run.is_ahead:
                run.note_fetch()
            if supervision.heartbeat is not None:
                supervision.in_evaluation_batch()
            original()
            if self._notes_fetches:
                self._begin_fetch()

        return before_fetch

    def save_before_evaluation_batch(self) -> None:
        """Save before the next batch, if the evaluation can continue there; a collective."""
        if self._begun is not None:
            self._save(self._begun)

    def _save_if_due(self, begun: _BegunEvaluation) -> None:
        if self._common is None:
            self._save(begun)
            return
        batch = num_evaluated(self.trainer)
        if self._common.is_here(batch):
            pace = begun.saver.pace
            if self._beginning.ranks.from_first("due", pace.now() >= pace.due_at):
                self._save(begun)
            self._common.meet_again(batch, pace.due_at - pace.now())

    def _save(self, begun: _BegunEvaluation) -> None:
        """Save the state before this batch. If the evaluation can't continue here, note its start, once."""
        self._supervision.in_section(SAVE)
        position, saver = self._position(), begun.saver
        state = self._state_here(begun, position)
        if state is not None:
            saver.save(position, state)
        elif saver.saved is None:
            saver.save_start(position)
        else:
            saver.pace.put_off()

    def _stop_here(self, begun: _BegunEvaluation) -> None:
        position, saver, unsaved = self._position(), begun.saver, ""
        reason = self.stopping.reason
        place = str(position)
        state = self._state_here(begun, position)
        if state is None:
            if saver.saved is None:
                saver.save_start(position)
            outcome = "all of it" if saver.has_only_start else "the batches since its last autosave"
            place += f". The next start repeats {outcome}: {begun.run_state.validation.reason}"
        elif self.stopping.save_fits():
            with self.stopping.signals.saving():
                unsaved = saver.save(position, state)
        self.stopping.end_together()
        raise stopped_by(reason, place, unsaved)

    def _state_here(self, begun: _BegunEvaluation, position: TrainerPosition) -> dict[str, object] | None:
        """Return the state before this batch; ``None`` if a rank can't continue here. A collective."""
        self._refuse_other_batches()
        state = self._own_state_here(begun, position)
        return state if self.stopping.all_can(state is not None) else None

    def _own_state_here(self, begun: _BegunEvaluation, position: TrainerPosition) -> dict[str, object] | None:
        run = begun.run_state.validation
        if self.loaders.exactness.reasons:
            run.repeat(self.loaders.exactness.reasons[0])
        if run.can_be_resumed and not begun.own.can_be_saved():
            run.repeat("it has changed weights that are in shards")
        if not run.can_be_resumed:
            return None
        try:
            state = begun.run_state.state_dict(position)
        except NotExactError as error:  # a loader can't report its place
            run.repeat(str(error))
            return None
        run.check_objects(begun.run_state.not_carried(state))
        return state if run.can_be_resumed else None

    # The end.

    def _save_interrupted(self, exception: BaseException) -> None:
        if isinstance(exception, TrainingStopped):  # if not, the last autosave stays
            tell_stopped(exception, None if self._begun is None else self._begun.saver.saved, self._beginning)

    def _close_own(self) -> None:
        self._begun = None


def _is_gone(checkpoint_path: Any) -> bool:
    return not is_url(checkpoint_path) and not os.path.exists(local_path(checkpoint_path))
