"""One fit: the seams in Lightning that it takes over at its start and gives back at its end, and what each does."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant.checkpoint.schema import MARK, NOT_EXACT, PARENT, REMARKS
from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.errors import TrainingStopped
from lightning_faulttolerant.records.incidents import Rule
from lightning_faulttolerant.records.requests import replay_requested
from lightning_faulttolerant.supervision.heartbeats import FIRST_BATCH, SAVE, TEARDOWN, TRAINING_BATCH
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.any_session import AnySession, end_interrupted, tell_stopped
from lightning_faulttolerant.trainer.loaders.loaders import TRAIN, VALIDATION
from lightning_faulttolerant.trainer.loaders.reloads import Reloads
from lightning_faulttolerant.trainer.loaders.trackers import must_note_fetches
from lightning_faulttolerant.trainer.objects.objects import RELOADS
from lightning_faulttolerant.trainer.objects.roots import Roots
from lightning_faulttolerant.trainer.objects.start_values import StartValues
from lightning_faulttolerant.trainer.patches import Method, pass_over_idle_hooks, then
from lightning_faulttolerant.trainer.process import OBJECTS, Registered, without_collections
from lightning_faulttolerant.trainer.ranks.strategies import BUCKETS, Buckets
from lightning_faulttolerant.trainer.resume.report import ResumeReport
from lightning_faulttolerant.trainer.resume.restoring import Restoring, write_atomically
from lightning_faulttolerant.trainer.resume.resume import Resume
from lightning_faulttolerant.trainer.run.fingerprint import Fingerprint, surroundings
from lightning_faulttolerant.trainer.save.autosave import AroundSaves, Autosaver, Checkpointer
from lightning_faulttolerant.trainer.save.contents import HookSaves
from lightning_faulttolerant.trainer.save.run_state import RunState, named_callbacks, remarks_of
from lightning_faulttolerant.trainer.sections import follow_buffers, follow_steps
from lightning_faulttolerant.trainer.settings import Options
from lightning_faulttolerant.trainer.steps.flight_recorder import StepRecorder
from lightning_faulttolerant.trainer.steps.incident_writer import IncidentWriter
from lightning_faulttolerant.trainer.steps.skipped_batches import SKIPPED, SkippedBatches
from lightning_faulttolerant.trainer.training import Training


class Session(AnySession):
    """Everything that this package keeps for the length of one fit.

    Args:
        trainer: The trainer that runs the fit.
        options: The callback's options.
        registered: The functions that were passed to `FaultTolerance.register`, by name.
    """

    def __init__(self, trainer: Trainer, options: Options, registered: Mapping[str, Registered]) -> None:
        super().__init__(trainer, options, strict=options.strict)
        self._registered = registered
        self._fingerprint = Fingerprint(trainer)
        self._stop = self.stopping.signals
        self._restoring = Restoring(trainer, options, self._beginning, self.loaders, self._fingerprint, self._files)
        self._is_interrupted = False
        self._reloads = Reloads(trainer)
        self._recorder: StepRecorder | None = None
        self._started: StartValues | None = None
        self._training: Training | None = None
        """The fit itself, once it begins: a finder's own fit has none."""

    @property
    def _resume(self) -> Resume | None:
        return self._restoring.resume

    @property
    def autosaver(self) -> Autosaver | None:
        """Writes the autosaves, once the fit itself begins."""
        return None if self._training is None else self._training.checkpointer.autosaver

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
        self.stopping.open()
        self._files.follow()
        write_atomically(self.trainer, self._patches)
        trainer, around, wrap = self.trainer, self._patches.around, self._patches.wrap
        fit_loop, epoch_loop, val_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop, compat.validation_loop(trainer)
        connector = compat.checkpoint_connector(trainer)
        around(connector, "resume_start", self._around_resume_start)
        around(connector, "restore_training_state", self._restoring.around_restore_training_state)
        around(connector, "restore_callbacks", self._restoring.around_restore_callbacks)
        wrap(compat.signal_connector(trainer), "register_signal_handlers", then(self._begin))
        around(trainer.strategy, "process_dataloader", self._around_process_dataloader)
        around(fit_loop, "setup_data", partial(self._around_setup_data, TRAIN))
        around(val_loop, "setup_data", partial(self._around_setup_data, VALIDATION))
        around(fit_loop, "run", self._around_fit)
        around(fit_loop, "on_run_start", self._once_begun(Training.start))
        around(fit_loop, "on_advance_start", self._once_begun(Training.before_epoch))
        around(fit_loop, "on_advance_end", self._once_begun(Training.end_epoch))
        around(epoch_loop, "reset", self._once_begun(Training.reset_epoch))
        around(epoch_loop, "on_run_start", self._around_epoch_start)
        for finder, search in compat.finders(trainer):
            around(finder, search, self._around_search)
        # Called for each batch: `wrap` costs one call less than `around`.
        follow_steps(trainer, self._patches, self._beginning.history.times)
        wrap(epoch_loop, "advance", self._wrap_advance)
        wrap(epoch_loop, compat.BEFORE_FETCH, self._wrap_before_fetch)
        wrap(epoch_loop, compat.AFTER_FETCH, self._wrap_after_fetch)
        around(val_loop, "reset", self._around_validation_reset)
        around(val_loop, "run", self._around_validation)
        around(val_loop, "on_run_end", self._around_validation_end)
        wrap(val_loop, compat.BEFORE_FETCH, self._wrap_before_validation_fetch)
        wrap(val_loop, compat.AFTER_FETCH, self._wrap_after_evaluation_fetch)

    def _around_resume_start(self, original: Method, *args: Any, **kwargs: object) -> None:
        if self._started is None:
            callbacks = named_callbacks(compat.callbacks(self.trainer))
            self._started = StartValues(Roots(self.trainer, callbacks).owners())
        self._restoring.around_resume_start(original, *args, **kwargs)

    def _save_interrupted(self, exception: BaseException) -> None:
        if self._recorder is not None:
            self._recorder.interrupt(exception)
        if self._training is not None:
            boundary = self._training.boundary if replay_requested() is None else None
            end_interrupted(self.trainer, boundary, self._training.checkpointer.autosaver, exception, self._beginning)
        elif isinstance(exception, TrainingStopped):
            tell_stopped(exception, None, self._beginning)

    def _close_own(self) -> None:
        if self._training is not None:
            self._training.close()
        if self._resume is not None:
            self._resume.restored.close()
        self._training = self._recorder = None

    def save_before_batch(self) -> None:
        """Save before the next training batch. The first autosave of a fit comes by itself."""
        if self._training is not None:
            self._training.save_before_batch()

    def save_before_evaluation_batch(self) -> None:
        """Save before the next batch of a validation run, if the fit can continue there."""
        if self._training is not None and self._training.boundary is not None:
            self._training.boundary.save_before_validation_batch()

    def put_part(self, checkpoint: dict[str, object]) -> None:
        """Put our part into a checkpoint that other code is saving."""
        if self._training is not None:
            self._supervision.in_section(SAVE)  # until the next section: the write is still to come
            self._training.put_part(checkpoint)

    # What the seams do.

    def _once_begun(self, seam: Callable[..., object]) -> Callable[..., object]:
        """Return what replaces a method: `seam` of the training, or the method itself before the training begins."""

        def around(original: Method, *args: object) -> object:
            return original(*args) if self._training is None else seam(self._training, original, *args)

        return around

    @without_collections()
    def _begin(self) -> None:
        """Begin the fit itself. If a finder ran before, it is done."""
        self.stopping.begin(lambda: self.autosaver.save_seconds if self.autosaver is not None else 0.0)
        buckets = Buckets(self.trainer)
        ranks, history = self._beginning.ranks, self._beginning.history
        skipped = SkippedBatches(self.trainer, self.loaders, ranks, self._options.skips, history)
        skipped.on_skipped = self.listeners.skipped
        own = {**self._restoring.changes(), BUCKETS: buckets.state_dict, SKIPPED: skipped.state_dict}
        schedulers = self._restoring.schedulers
        run_state = RunState(
            self.trainer, self.loaders, self._files, self._registered, self._options, schedulers, own=own
        )
        if self._resume is None and self.trainer.num_sanity_val_steps:
            run_state.objects.before_sanity_check()
            run_state.validation.before_sanity_check()
        self._reloads, run_state.objects.started = run_state.objects.reloads, self._started
        self._fingerprint.settings()
        if self._resume is None:
            skipped.begin(self._patches, {}, None)
        else:
            self._resume.begin(run_state.objects.splits)
            self._reloads.resume_from(self._resume.saved(OBJECTS).get(RELOADS, {}))
            self._resume.admit(buckets.why_not_exact())
            order = ranks.from_first("buckets", self._resume.saved(BUCKETS))
            self._resume.show(buckets.load_state_dict(order))
            self._resume.show(skipped.begin(self._patches, self._resume.saved(SKIPPED), self._resume.position))
        follow_buffers(self.trainer, self._patches, history.times)
        self._patches.around(self.trainer.precision_plugin, "on_save_checkpoint", run_state.left_out.note_dump)
        autosaver = self._make_autosaver(run_state)
        self._training = Training(
            self.trainer,
            self.loaders,
            Checkpointer(run_state=run_state, autosaver=autosaver, hook_saves=HookSaves(self.trainer, run_state)),
            self._resume,
            stopping=self.stopping,
            beginning=self._beginning,
            supervision=self._supervision,
        )
        self._training.skipped = skipped
        proving = self._resume.proving if self._resume is not None and self._resume.is_of_run else None
        edited = self._note_batches(proving, is_on=lambda: self._training is not None)
        if self._resume is not None:
            self._resume.show(edited)
        self._recorder = None if self._options.rule is None else self._make_recorder(self._training, self._options.rule)
        if self._replay is not None:
            self._replay.begin(self.loaders, self._beginning.ranks)

    def _make_recorder(self, training: Training, rule: str | Rule) -> StepRecorder:
        writer = IncidentWriter(
            self.trainer,
            self._beginning,
            training.checkpointer.autosaver.pace,
            boundary=lambda: training.boundary,
        )
        recorder = StepRecorder(self.trainer, rule, writer, stops=self._options.stop)
        recorder.take_seams(self._patches)
        training.captures_each = True
        return recorder

    def _make_autosaver(self, run_state: RunState) -> Autosaver:
        origin = self._restoring.forget_checkpoint()
        mark, here = self._files.mark, surroundings(self.trainer)
        autosaver = Autosaver(
            self.trainer,
            self._beginning.series,
            run_state,
            self._options,
            ranks=self._beginning.ranks,
            history=self._beginning.history,
            header=lambda state: {
                MARK: mark,
                "origin": origin,
                "surroundings": here,
                **self._parent(),  # type: ignore[typeddict-item]  # it has one key, or none
                NOT_EXACT: self._not_exact(),
                REMARKS: remarks_of(state),
                "fingerprint": self._fingerprint.state_dict(self.loaders.fingerprints),
            },
        )
        autosaver.around = AroundSaves(
            is_saved_before=self._restoring.is_saved if self._replay is None else lambda position: True,
            is_held=lambda: self._resume is not None and self._resume.proving.holds_saves(),
            before_save=partial(self._supervision.in_section, SAVE),
            refuse=self._refuse_other_batches,
            on_saved=self.listeners.saved,
        )
        return autosaver

    def _parent(self) -> dict[str, object]:
        """Return what each checkpoint says of the parent, if this run is a branch."""
        parent = None if self._resume is None else self._resume.parent
        return {} if parent is None else {PARENT: parent.state_dict()}

    def _not_exact(self) -> list[str]:
        """Return why the run is no longer exact. A hook may save before the resume is over."""
        if self._resume is None:
            return []
        report = self._resume.report
        return report.to_inherit if report is not None else self._resume.owed(NOT_EXACT) or []

    def _around_process_dataloader(self, original: Method, loader: object) -> object:
        return self.loaders.process(self._reloads.follow(original(loader)))

    def _around_setup_data(self, stage: str, original: Method) -> None:
        objects = None if self._training is None else self._training.checkpointer.run_state.objects

        def set_up() -> None:
            with self._reloads.begun(stage), self.loaders.iterated_by_trainer(stage=stage):
                self.loaders.begin(stage)
                original()

        if objects is None:
            set_up()
            return
        objects.set_up_loaders(set_up)
        objects.look_again()

    def _around_fit(self, original: Method) -> None:
        with self._ended_here():
            self._once_begun(Training.run)(original)
        if self._training is not None:
            self._supervision.in_section(TEARDOWN)

    @contextlib.contextmanager
    def _ended_here(self) -> Iterator[None]:
        """End a fit that raises in a process created for it. Nothing else ends the workers of its loaders."""
        try:
            yield
        except BaseException as error:
            if self._options.script.is_elsewhere:
                self.interrupt(error)
            raise

    def interrupt(self, exception: BaseException) -> None:
        """End the fit that raised an exception, once: Lightning may call ``on_exception``, too."""
        if not self._is_interrupted:
            self._is_interrupted = True
            super().interrupt(exception)

    def _around_search(self, original: Method, *args: object) -> object:
        """Let a finder train in the middle of the fit: it restores what it changes, and nothing of it is the fit's."""
        training, self._training = self._training, None
        try:
            return original(*args)
        finally:
            self._training = training

    def _around_epoch_start(self, original: Method, data_fetcher: object) -> None:
        self.loaders.note_prefetching()
        if self._training is not None:
            self._training.start_epoch(original, data_fetcher)
            return
        with self.loaders.iterated_by_trainer():
            original(data_fetcher)

    def _wrap_advance(self, original: Method) -> Method:
        supervision = self._supervision

        def advance(data_fetcher: object) -> None:
            section, training = TRAINING_BATCH, self._training
            if training is not None and training.boundary is not None:
                training.boundary.before_batch()
            elif training is not None:
                section = FIRST_BATCH
                training.before_first_batch()
            if supervision.heartbeat is not None:
                supervision.in_batch(section)
            skipped = None if training is None else training.skipped
            if skipped is not None and skipped.is_next(data_fetcher):
                skipped.pass_over(data_fetcher)
            else:
                original(data_fetcher)

        return advance

    def _wrap_before_fetch(self, original: Method) -> Method:
        loaders, times = self.loaders, self._beginning.history.times

        def before_fetch() -> None:
            if loaders.prefetches.is_on:
                loaders.mark()
            boundary = None if self._training is None else self._training.boundary
            if boundary is not None and boundary.workers is not None:
                self._stop.fetch_began = time.monotonic()
            original()
            loaders.begin_fetch()
            times.fetch_began = perf_counter()

        return before_fetch

    def _wrap_after_fetch(self, original: Method) -> Method:
        times = self._beginning.history.times

        def after_fetch() -> None:
            if times.fetch_began:
                times.data += perf_counter() - times.fetch_began
                times.fetch_began = 0.0
            self.loaders.end_fetch()
            original()
            self._stop.fetch_began = None

        return after_fetch

    def _around_validation(self, original: Method) -> object:
        self._supervision.in_section(self._around_evaluation)
        if self.trainer.sanity_checking:
            with self._ended_here():
                return original()
        return self._once_begun(Training.validate)(original)

    def _around_validation_end(self, original: Method) -> object:
        self._beginning.history.times.end_evaluation()
        return self._around_evaluation_end(original)

    def _around_validation_reset(self, original: Method) -> None:
        if self._training is not None:
            self._training.checkpointer.run_state.validation.watch_first_fetch()
        with self.loaders.iterated_by_trainer():
            original()
        self._notes_fetches = must_note_fetches(self.loaders.trackers, VALIDATION)

    def _wrap_before_validation_fetch(self, original: Method) -> Method:
        supervision = self._supervision

        def before_fetch() -> None:
            boundary = None if self._training is None else self._training.boundary
            if boundary is not None:
                boundary.before_validation_batch()
            elif self.trainer.sanity_checking:
                self.stopping.before_sanity_batch()
            if supervision.heartbeat is not None:
                supervision.in_evaluation_batch()
            original()
            if self._notes_fetches:
                self._begin_fetch()

        return before_fetch
