"""One fit: the seams in Lightning that it takes over at its start and gives back at its end, and what each does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from functools import partial

from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant.checkpoint.schema import MARK
from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.any_session import AnySession
from lightning_faulttolerant.trainer.boundary import Boundary
from lightning_faulttolerant.trainer.ddp.buckets import BUCKETS, Buckets
from lightning_faulttolerant.trainer.files.stand_in import write_atomically
from lightning_faulttolerant.trainer.hooks import pass_over_idle_hooks
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, VALIDATION
from lightning_faulttolerant.trainer.loaders.reloads import Reloads
from lightning_faulttolerant.trainer.loaders.trackers import must_note_fetches
from lightning_faulttolerant.trainer.objects.objects import RELOADS
from lightning_faulttolerant.trainer.patches import Method, then
from lightning_faulttolerant.trainer.position import BOUNDARY, FINISHED, position_of
from lightning_faulttolerant.trainer.process import OBJECTS, Registered
from lightning_faulttolerant.trainer.resume.report import ResumeReport
from lightning_faulttolerant.trainer.resume.restoring import Restoring
from lightning_faulttolerant.trainer.resume.resume import Resume
from lightning_faulttolerant.trainer.resume.resumed_epoch import ResumedEpoch
from lightning_faulttolerant.trainer.run.fingerprint import surroundings
from lightning_faulttolerant.trainer.save.autosave import Autosaver
from lightning_faulttolerant.trainer.save.checkpointer import Checkpointer
from lightning_faulttolerant.trainer.save.exception import end_interrupted, tell_stopped
from lightning_faulttolerant.trainer.save.hook_saves import HookSaves
from lightning_faulttolerant.trainer.save.run_state import RunState
from lightning_faulttolerant.trainer.settings.options import Options


class Session(AnySession):
    """Everything that this package keeps for the length of one fit.

    Args:
        trainer: The trainer that runs the fit.
        options: The callback's options.
        registered: The functions that were passed to `FaultTolerance.register`, by name.
    """

    def __init__(self, trainer: Trainer, options: Options, registered: Mapping[str, Registered]) -> None:
        super().__init__(trainer, options, registered, strict=options.strict)
        self._stop = self._stopping.signals
        self._restoring = Restoring(trainer, options, self._beginning, self._loaders, self._fingerprint, self._files)
        self._is_interrupted = False
        self._reloads = Reloads(trainer)
        self._checkpointer: Checkpointer | None = None
        """Saves the fit, once the fit itself begins: a finder's own fit has none."""
        self._resumed_epoch: ResumedEpoch | None = None
        """The epoch that a resume has to finish, until it is over."""
        self._boundary: Boundary | None = None
        """The work between two batches, from the first batch or validation run on."""

    @property
    def _resume(self) -> Resume | None:
        return self._restoring.resume

    @property
    def autosaver(self) -> Autosaver | None:
        """Writes the autosaves, once the fit itself begins."""
        return None if self._checkpointer is None else self._checkpointer.autosaver

    @property
    def report(self) -> ResumeReport | None:
        """The report of what was restored, if this fit resumed."""
        return self._resume.report if self._resume is not None else None

    def open(self, callback: Callback) -> None:
        """Take over the seams. `callback` is the callback that opens this session."""
        if not self._beginning.is_connected:
            self.connect()
        pass_over_idle_hooks(callback, self._patches)
        self.is_open = True
        self._stopping.open()
        self._files.follow()
        write_atomically(self._trainer, self._patches)
        trainer, around, wrap = self._trainer, self._patches.around, self._patches.wrap
        fit_loop, epoch_loop, val_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop, compat.validation_loop(trainer)
        connector = compat.checkpoint_connector(trainer)
        around(connector, "resume_start", self._restoring.around_resume_start)
        around(connector, "restore_training_state", self._restoring.around_restore_training_state)
        around(connector, "restore_callbacks", self._restoring.around_restore_callbacks)
        wrap(compat.signal_connector(trainer), "register_signal_handlers", then(self._begin))
        around(trainer.strategy, "process_dataloader", self._around_process_dataloader)
        around(fit_loop, "setup_data", partial(self._around_setup_data, TRAIN))
        around(val_loop, "setup_data", partial(self._around_setup_data, VALIDATION))
        around(fit_loop, "run", self._around_fit)
        around(fit_loop, "on_run_start", self._around_fit_start)
        around(fit_loop, "on_advance_start", self._around_before_epoch)
        around(fit_loop, "on_advance_end", self._around_epoch_end)
        around(epoch_loop, "reset", self._around_epoch_reset)
        around(epoch_loop, "on_run_start", self._around_epoch_start)
        # Called for each batch: `wrap` costs one call less than `around`.
        wrap(epoch_loop, "advance", self._wrap_advance)
        wrap(epoch_loop, compat.BEFORE_FETCH, self._wrap_before_fetch)
        wrap(epoch_loop, compat.AFTER_FETCH, self._wrap_after_fetch)
        around(val_loop, "reset", self._around_validation_reset)
        around(val_loop, "run", self._around_validation)
        wrap(val_loop, compat.BEFORE_FETCH, self._wrap_before_validation_fetch)
        wrap(val_loop, compat.AFTER_FETCH, self._wrap_after_evaluation_fetch)

    def _save_interrupted(self, exception: BaseException) -> None:
        saves, source = self._options.save_on_exception or self._stop.requested is not None, self._beginning.source
        if self.autosaver is not None:
            end_interrupted(self._trainer, self._boundary if saves else None, self.autosaver, exception, source)
        elif isinstance(exception, TrainingStopped):
            tell_stopped(exception, None, source)

    def _close_own(self) -> None:
        if self._resumed_epoch is not None:
            self._resumed_epoch.put_limit_back()
        if self.autosaver is not None:
            self.autosaver.close()
        self._boundary = self._checkpointer = None

    def save_before_batch(self) -> None:
        """Save before the next training batch. The first autosave of a fit comes by itself."""
        if self.autosaver is not None and not self.autosaver.pace.is_first:
            self.autosaver.save_unless_saved(position_of(self._trainer, BOUNDARY))

    def save_before_evaluation_batch(self) -> None:
        """Save before the next batch of a validation run, if the fit can continue there."""
        if self._boundary is not None:
            self._boundary.save_before_validation_batch()

    # What the seams do.

    def put_part(self, checkpoint: dict[str, object]) -> None:
        """Put our part into a checkpoint that other code is saving."""
        if self._checkpointer is not None:
            self._checkpointer.put_part(checkpoint, self._boundary.capture if self._boundary is not None else None)

    def _begin(self) -> None:
        """Begin the fit itself. If a finder ran before, it is done."""
        self._stopping.begin(lambda: self.autosaver.save_seconds if self.autosaver is not None else 0.0)
        run_state = RunState(self._trainer, self._loaders, self._files, self._registered, self._options)
        if self._resume is None and self._trainer.num_sanity_val_steps:
            run_state.objects.before_sanity_check()
        self._reloads = run_state.objects.reloads
        hook_saves = HookSaves(self._trainer, run_state)
        self._fingerprint.settings()
        buckets = Buckets(self._trainer)
        if self._resume is not None:
            self._begin_resume(self._resume, run_state, buckets)
        autosaver = self._make_autosaver(run_state, buckets)
        self._checkpointer = Checkpointer(run_state=run_state, autosaver=autosaver, hook_saves=hook_saves)
        if self._beginning.choice is None or not self._beginning.choice.continues:
            self.on_saved.append(self._fingerprint.hyperparameters.tell_passing)

    def _begin_resume(self, resume: Resume, run_state: RunState, buckets: Buckets) -> None:
        resume.begin()
        self._reloads.last = resume.saved(OBJECTS).get(RELOADS, {})
        resume.admit(buckets.why_not_exact())
        resume.notes += buckets.load_state_dict(resume.owed(BUCKETS) or {})
        place = resume.place_in_epoch
        if place is not None:
            self._resumed_epoch = ResumedEpoch(self._trainer, resume, self._loaders, run_state, where=place.where)

    def _make_autosaver(self, run_state: RunState, buckets: Buckets) -> Autosaver:
        origin = self._restoring.forget_checkpoint()
        mark, here = self._files.mark, surroundings(self._trainer)
        autosaver = Autosaver(
            self._trainer,
            self._beginning.series,
            run_state,
            self._options,
            ranks=self._beginning.ranks,
            history=self._beginning.history,
            header=lambda: {
                MARK: mark,
                "origin": origin,
                "surroundings": here,
                BUCKETS: buckets.state_dict(),
                **self._restoring.changes(),
                "fingerprint": self._fingerprint.state_dict(self._loaders.fingerprints),
            },
        )
        autosaver.on_saved = self.on_saved
        autosaver.is_saved_before = self._restoring.is_saved
        return autosaver

    def _around_process_dataloader(self, original: Method, loader: object) -> object:
        return self._loaders.process(self._reloads.follow(original(loader)))

    def _around_setup_data(self, stage: str, original: Method) -> None:
        self._loaders.begin(stage)
        loaders = self._loaders.iterated_by_trainer(stage=stage)
        with loaders, self._reloads.begun(is_training=stage == TRAIN):
            original()
        if self._checkpointer is not None:
            self._checkpointer.run_state.objects.look_again()

    def _around_fit(self, original: Method) -> None:
        with self._ended_here():
            if self._checkpointer is not None:
                self._checkpointer.run_state.objects.after_sanity_check()
            original()
            if self._checkpointer is not None:
                self._save_finished(self._checkpointer)

    @contextlib.contextmanager
    def _ended_here(self) -> Iterator[None]:
        """End a fit that raises in a process created for it. Nothing else ends the workers of its loaders."""
        try:
            yield
        except BaseException as error:
            if self._options.script.is_elsewhere and not self._is_interrupted:
                self._is_interrupted = True
                self.interrupt(error)
            raise

    def _save_finished(self, checkpointer: Checkpointer) -> None:
        """Save one autosave that marks the fit as finished, or restore the state of such an autosave."""
        is_pending = self._resume is not None and self._resume.is_pending
        if self._resume is not None and is_pending:
            self._resume.restore(checkpointer.run_state)
            compat.set_not_restarting(self._trainer)  # or the next fit would have no sanity check
        self._note_start()
        if not is_pending:
            checkpointer.autosaver.save(position_of(self._trainer, FINISHED))
        self._stopping.stop_if_wanted("after the end of the fit", checkpointer.autosaver.pace.unsaved)

    def _around_fit_start(self, original: Method) -> None:
        if self._resumed_epoch is None:
            original()
        else:
            self._resumed_epoch.start_fit(original)
        if self._checkpointer is None:
            return
        run_state = self._checkpointer.run_state
        run_state.objects.tell_drawn() if self._resume is None else self._resume.put_back_drawn()
        run_state.objects.begin()
        if self._resume is not None and self._resume.is_after_the_end:
            self._resume.continue_after_the_end()
            self._resume.restore(run_state)
            compat.set_not_restarting(self._trainer)

    def _around_before_epoch(self, original: Method) -> None:
        if self._resumed_epoch is not None:
            self._resumed_epoch.put_limit_back()
        original()

    def _around_epoch_reset(self, original: Method) -> None:
        if self._resumed_epoch is not None:
            self._resumed_epoch.reset(original)
        else:
            original()

    def _around_epoch_start(self, original: Method, data_fetcher: object) -> None:
        self._loaders.note_prefetching()
        if self._resumed_epoch is not None:
            self._resumed_epoch.start(original, data_fetcher)
            return
        with self._loaders.iterated_by_trainer():
            original(data_fetcher)
        if self._resume is not None and self._checkpointer is not None:
            self._resume.settle()

    def _around_epoch_end(self, original: Method) -> None:
        if self._resumed_epoch is None:
            original()
            return
        resumed, self._resumed_epoch = self._resumed_epoch, None
        resumed.end(original)

    def _note_start(self) -> None:
        position = None if self._resume is None else self._resume.position
        self._beginning.history.start(self._beginning.choice, self.report, position)

    def _make_boundary(self, checkpointer: Checkpointer) -> Boundary:
        if self._boundary is None:
            self._note_start()
            self._boundary = Boundary(
                self._trainer,
                loaders=self._loaders,
                checkpointer=checkpointer,
                stopping=self._stopping,
                ranks=self._beginning.ranks,
                history=self._beginning.history,
            )
        return self._boundary

    def _wrap_advance(self, original: Method) -> Method:
        def advance(data_fetcher: object) -> None:
            if self._boundary is not None:
                self._boundary.before_batch()
            elif self._checkpointer is not None:
                self._make_boundary(self._checkpointer).before_batch()
            original(data_fetcher)

        return advance

    def _wrap_before_fetch(self, original: Method) -> Method:
        loaders = self._loaders

        def before_fetch() -> None:
            if loaders.fetches_ahead:
                loaders.mark()
            if self._boundary is not None and self._boundary.fetches_from_workers:
                self._stop.fetch_began = time.monotonic()
            original()
            loaders.begin_fetch()

        return before_fetch

    def _wrap_after_fetch(self, original: Method) -> Method:
        def after_fetch() -> None:
            self._loaders.end_fetch()
            original()
            self._stop.fetch_began = None

        return after_fetch

    def _around_validation(self, original: Method) -> object:
        if self._trainer.sanity_checking:
            with self._ended_here():
                return original()
        if self._checkpointer is None:
            return original()
        boundary, history = self._make_boundary(self._checkpointer), self._beginning.history
        history.begin_validation(continues=self._checkpointer.run_state.validation.is_continuing)
        boundary.before_validation()
        results = original()
        history.end_validation()
        return results

    def _around_validation_reset(self, original: Method) -> None:
        if self._checkpointer is not None:
            self._checkpointer.run_state.validation.watch_first_fetch()
        with self._loaders.iterated_by_trainer():
            original()
        self._notes_fetches = must_note_fetches(self._loaders.trackers, VALIDATION)

    def _wrap_before_validation_fetch(self, original: Method) -> Method:
        def before_fetch() -> None:
            if self._boundary is not None:
                self._boundary.before_validation_batch()
            elif self._trainer.sanity_checking:
                self._stopping.before_sanity_batch()
            original()
            if self._notes_fetches:
                self._begin_fetch()

        return before_fetch
