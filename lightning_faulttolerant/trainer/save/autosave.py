"""Autosaves: when they are written, and which work is done in the background.

What saves one fit once it has begun: its autosaves, and our part of the checkpoints that other code saves.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.ranks import Ranks, by_first
from lightning_faulttolerant.checkpoint.saving import BackgroundWriter, Staging
from lightning_faulttolerant.checkpoint.schema import KEY, PICKLED, PartHeader
from lightning_faulttolerant.checkpoint.series import AutosaveSeries, save_incident
from lightning_faulttolerant.state.tensors import buffers_replaced, buffers_state, load_buffers
from lightning_faulttolerant.trainer.compat import running_hook
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.sharded import ShardWriter, without_shards, writer_of
from lightning_faulttolerant.trainer.resume.choice import Trust
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.save.capture import Capture
from lightning_faulttolerant.trainer.save.contents import CheckpointContents, HookSaves, can_wait
from lightning_faulttolerant.trainer.save.pace import Pace, described
from lightning_faulttolerant.trainer.save.run_state import RunState
from lightning_faulttolerant.trainer.settings import Options

_log = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class AroundSaves:
    """What other code does before and after the autosaves of a fit.

    Args:
        is_saved_before: Returns at the first boundary whether its state is the one that the fit resumed from.
        is_held: Returns whether a save that is due at a boundary waits, unless it is the first one.
        before_save: Called when a save begins, before it waits for the one in the background.
        refuse: Called on all ranks when they save; a collective. Raises if the state must not be saved.
        on_saved: Called with the position and path of each autosave, also from the background thread.
    """

    is_saved_before: Callable[[TrainerPosition], bool] = lambda position: False
    is_held: Callable[[], bool] = lambda: False
    before_save: Callable[[], None] = lambda: None
    refuse: Callable[[], None] = lambda: None
    on_saved: Sequence[Callable[[TrainerPosition, str], None]] = ()


class BackgroundSaves:
    """The copies of the state that a thread writes while training continues."""

    def __init__(self) -> None:
        self._writer = BackgroundWriter("autosave")
        self._staging = Staging()
        self.position: TrainerPosition | None = None
        """The position of the last state that was given to the thread."""

    @property
    def is_busy(self) -> bool:
        """Whether a write is in progress."""
        return self._writer.is_busy

    def copy(self, checkpoint: dict[str, object]) -> dict[str, object]:
        """Return a copy that training can't change."""
        staged: dict[str, object] = self._staging.copy(checkpoint)
        return staged

    def reserve(self, checkpoint: dict[str, object]) -> None:
        """Allocate the memory for copies of such a checkpoint, in the thread."""
        self._writer.start(self._staging.reserve(checkpoint))

    def start(self, write: Callable[[], None], position: TrainerPosition) -> None:
        """Begin to write."""
        self.position = position
        self._writer.start(write)

    def wait(self) -> None:
        """Wait for the write in progress."""
        self._writer.wait()

    def take_error(self) -> BaseException | None:
        """Return the error of the last write, once."""
        return self._writer.take_error()

    def close(self) -> None:
        """Free the memory of the copies."""
        self._staging.clear()


class Autosaver:
    """Writes the autosaves of one fit.

    Args:
        trainer: The trainer that runs the fit.
        series: Writes the files; ``None`` on ranks that write none.
        run_state: Reads the state that Lightning's checkpoint lacks.
        options: Say when to save.
        ranks: The ranks that save together. Each method that saves is a collective.
        header: Returns what a checkpoint of this fit with a state of this rank says about it.
        history: Records each autosave.
    """

    def __init__(
        self,
        trainer: Trainer,
        series: AutosaveSeries | None,
        run_state: RunState,
        options: Options,
        *,
        ranks: Ranks,
        header: Callable[[Mapping[str, Any]], PartHeader],
        history: HistoryWriter,
    ) -> None:
        self._series = series
        self._run_state = run_state
        self._options = options
        self._ranks = ranks
        self.pace = Pace(trainer, options, history, speaks=ranks.rank == 0)
        """Knows when a save is due, and whether the last one succeeded."""
        self._background = BackgroundSaves()
        self._shards = writer_of(trainer, series, ranks)
        """Writes the autosaves if the strategy shards; ``None`` if they are files."""
        self.contents = CheckpointContents(
            run_state, ranks, header, history.times, strict=options.strict, is_sharded=self._shards is not None
        )
        self._trust = Trust(options)
        run_state.objects.keeps_bytes = by_first(ranks, "trust", series, self._trust.is_trusted_series)
        self.save_seconds = 0.0
        """The duration of the longest save that training waited for."""
        self._is_proven = False
        """Whether this process has written an autosave and loaded it again."""
        self.around = AroundSaves()

    @property
    def counts_steps(self) -> bool:
        """Whether an autosave is due by steps rather than by time."""
        return self._options.every_n_train_steps is not None

    def is_due(self) -> bool:
        """Return whether an autosave is due at this boundary. At the first boundary one always is.

        Raises:
            Exception: The error of the background write since the last boundary, unless it is only an ``OSError``.
        """
        self._take_failure()
        is_kept = self.pace.kept_steps.is_due()
        waits = self.counts_steps or is_kept
        is_free = is_kept or self.pace.is_first or not self.around.is_held()
        return self.pace.is_due() and is_free and (waits or not self._background.is_busy)

    def _take_failure(self) -> None:
        """Note why the background write failed, if it did. Raise the error if the store did not cause it."""
        error = self._background.take_error()
        if error is None:
            return
        position = self._background.position
        if position is None or not isinstance(error, OSError):
            raise error
        self.pace.note_failure(position, described(error), self.pace.now())

    def save_due(self, position: TrainerPosition) -> None:
        """Save the state of this boundary: in the background with ``async_save``, except for the first autosave."""
        self.around.before_save()
        if self.pace.is_first and self._is_saved_before(position):
            return
        if self.pace.is_first:
            self._save_first(position)
            return
        if not self._is_proven or not self._options.async_save or self._shards is not None:
            self.save(position)
            return
        began = self.pace.now()
        self._background.wait()
        self._take_failure()
        checkpoint = self._taken(position, self.contents.own_state(position))
        self._by_first(position, began, lambda series: self._save_in_background(series, checkpoint, position, began))

    def _save_first(self, position: TrainerPosition) -> None:
        try:
            self.save(position)
        except Exception as error:
            if not can_wait(error, self._run_state.trainer, position):
                raise
            self.pace.is_urgent = True
        else:
            self.pace.is_urgent = False

    def _is_saved_before(self, position: TrainerPosition) -> bool:
        """Return whether the state of the first boundary is saved already; a collective."""
        self.pace.begin()
        is_saved = all(self._ranks.to_all("who has it saved", self.around.is_saved_before(position)))
        if is_saved:
            self.pace.begin_saved(position)
        return is_saved

    def _save_in_background(
        self, series: AutosaveSeries, checkpoint: dict[str, object], position: TrainerPosition, began: float
    ) -> bool:
        """Begin to write in the background. Return whether the checkpoint was written immediately instead."""
        self._run_state.files.flush()
        try:
            staged = self._background.copy(checkpoint)
        except Exception as error:  # noqa: BLE001 - deepcopy runs user code; torch.save may write what it can't copy
            _log.warning("The state could not be copied, so training waits for this save: %r", error)
            self._write_now(series, checkpoint, position, began)
            return True
        waited = self.pace.now() - began
        self._background.start(
            functools.partial(self._write_in_background, series, staged, position, began, waited), position
        )
        self._note(position, began)
        return False

    def save(self, position: TrainerPosition) -> None:
        """Save the state of this instant. A failed write is noted in `pace`.

        Raises:
            Exception: Any error before the write begins; at the first save of the fit, any error at all.
        """
        began = self.pace.now()
        self.around.before_save()
        self.settle()
        # What can't be carried is an error as long as no time is lost.
        state = self.contents.own_state(position, strict=self._options.strict and self.pace.is_first)
        self._save(self._taken(position, state), position, began)

    def save_unless_saved(self, position: TrainerPosition) -> None:
        """Save the state of this instant, unless it was just saved."""
        self.around.before_save()
        self.settle()
        if self.pace.is_first and self._is_saved_before(position):
            return
        if self._ranks.from_first("saved", self.pace.saved) != position:
            self.save(position)

    def save_capture(self, capture: Capture) -> None:
        """Save the state of `capture`. Parameters and optimizer states are taken from the trainer now."""
        began = self.pace.now()
        self.around.before_save()
        self.settle()
        module = self._run_state.trainer.lightning_module
        now = buffers_state(module)
        # They stay until the file is written: a state_dict holds the buffers themselves, not copies.
        load_buffers(module, capture.instead["buffers"])
        try:
            self._save(self._taken(capture.position, capture.state, capture), capture.position, began)
        finally:
            load_buffers(module, now)

    def write_incident(self, capture: Capture, *, name: str, ranks: Ranks) -> None:
        """Write the state of `capture` to a file of an incident, which is no autosave. It is no collective.

        Parameters and optimizer states are taken from the trainer now.

        Args:
            capture: The state before a step.
            name: The name of the file.
            ranks: Gather the states of all ranks. The first of them writes the file.

        Raises:
            Exception: If it can't be written.
        """
        self.around.before_save()
        self._background.wait()  # it needs what was packed for it
        module = self._run_state.trainer.lightning_module
        with buffers_replaced(module, capture.instead["buffers"]):
            checkpoint = self.contents.gathered(capture.position, capture.state, capture, ranks)
            if self._series is None:
                return
            self._check(self._series, checkpoint)
            self._run_state.files.flush()
            path = save_incident(self._series, checkpoint, name)
        self._trust.written(checkpoint[KEY].get(PICKLED, {}), path, is_first=False)

    @property
    def is_sharded(self) -> bool:
        """Whether the autosaves are directories of shards."""
        return self._shards is not None

    def set_aside(self) -> None:
        """Set the autosaves aside: nothing was trained since the first one."""
        if self._series is not None:
            self._series.set_aside("refused-start")

    def settle(self) -> None:
        """Wait for the background write. If it failed, only warn: the next save makes up for it."""
        self._background.wait()
        error = self._background.take_error()
        if error is not None:
            self.pace.is_urgent = False
            _log.warning("An autosave could not be written in the background; the previous one stays: %r", error)

    def close(self) -> None:
        """Wait for the background write, and free its memory."""
        self.settle()
        self._background.close()

    def _taken(
        self, position: TrainerPosition, state: Mapping[str, object], capture: Capture | None = None
    ) -> dict[str, object]:
        """Return the checkpoint of an autosave."""
        self.around.refuse()
        self.pace.note_taken(position, None if capture is None else capture.taken_at)
        return self.contents.gathered(position, state, capture)

    def _save(self, checkpoint: dict[str, object], position: TrainerPosition, began: float) -> None:
        if self._shards is not None:
            self._save_shards(self._shards, checkpoint, position, began)
        elif self._by_first(position, began, lambda series: self._write_now(series, checkpoint, position, began)):
            self.save_seconds = max(self.save_seconds, self.pace.now() - began)

    def _by_first(self, position: TrainerPosition, began: float, write: Callable[[AutosaveSeries], bool]) -> bool:
        """Let rank 0 write, or begin to write, and note it on every rank. Return whether it succeeded; a collective."""
        is_written, failure = by_first(self._ranks, "save", self._series, lambda series: self._attempted(series, write))
        if failure:
            self.pace.note_failure(position, failure, began)
        elif self._ranks.rank > 0:
            self._is_proven = True
            self._note(position, began)
            if is_written:
                self.pace.saved = position
        return not failure

    def _attempted(self, series: AutosaveSeries, write: Callable[[AutosaveSeries], bool]) -> tuple[bool, str]:
        try:
            return write(series), ""
        except OSError as error:
            if self.pace.is_first:
                raise
            return False, described(error)

    def _save_shards(
        self, shards: ShardWriter, checkpoint: dict[str, object], position: TrainerPosition, began: float
    ) -> None:
        is_first = self.pace.is_first
        if is_first and self._options.async_save:
            tell("async_save=True has no effect with a strategy that shards: training waits for its autosaves.")
        if is_first and self._options.incremental:
            tell("incremental=True has no effect with a strategy that shards: its autosaves are written whole.")
        by_first(self._ranks, "check", self._series, lambda series: self._check(series, without_shards(checkpoint)))
        keep = self.pace.kept_steps.keeps(position)
        flush = self._run_state.files.flush
        path, failure = shards.save(checkpoint, position, flush=flush, raises=is_first, keep=keep)
        if failure:
            self.pace.note_failure(position, failure, began)
            return
        pool, is_new = self.contents.packed.pool, not self._is_proven
        by_first(self._ranks, "load", self._series, lambda _: self._trust.written(pool, path, is_first=is_new))
        self._has_saved(position, path)
        self._note(position, began, path)

    def _has_saved(self, position: TrainerPosition, path: str) -> None:
        self._is_proven, self.pace.saved = True, position
        self.pace.kept_steps.note_written(position)
        for hear in self.around.on_saved:
            hear(position, path)

    def _write_now(
        self, series: AutosaveSeries, checkpoint: dict[str, object], position: TrainerPosition, began: float
    ) -> bool:
        is_proven = self._is_proven
        self._run_state.files.flush()
        path = self._write(series, checkpoint, position, is_first=not is_proven)
        self._has_saved(position, path)
        self._note(position, began, path)
        if not is_proven and self._options.async_save:  # so that the first copy need not allocate memory
            self._background.reserve(checkpoint)
        return True

    def _check(self, series: AutosaveSeries, checkpoint: Mapping[str, object]) -> None:
        # Checked now rather than when the run resumes, and before a good autosave is deleted to make room for it.
        self._trust.check(self.contents.packed, checkpoint, os.fspath(series.directory))

    def _write(
        self, series: AutosaveSeries, checkpoint: dict[str, Any], position: TrainerPosition, *, is_first: bool = False
    ) -> str:
        self._check(series, checkpoint)
        epoch, batch, global_step = position.epoch, position.batch, position.global_step
        keep = self.pace.kept_steps.keeps(position)
        path = series.save(checkpoint, epoch=epoch, batch=batch, global_step=global_step, keep=keep)
        self._trust.written(checkpoint[KEY].get(PICKLED, {}), path, is_first=is_first)
        return path

    def _write_in_background(
        self,
        series: AutosaveSeries,
        checkpoint: dict[str, object],
        position: TrainerPosition,
        began: float,
        waited: float,
    ) -> None:
        try:
            path = self._write(series, checkpoint, position)
            self._has_saved(position, path)
            self.pace.note_written(series, path, position, seconds=waited, taken=began, is_in_background=True)
        except BaseException:
            self.pace.is_urgent = True
            raise

    def _note(self, position: TrainerPosition, began: float, path: str | None = None) -> None:
        seconds = self.pace.note_waited(position, began)
        _log.debug("Autosave of %s held training up for %.3f s", position, seconds)
        if path is not None:
            self.pace.note_written(self._series, path, position, seconds=seconds, taken=self.pace.taken_at)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpointer:
    """Saves one fit.

    Args:
        run_state: Reads the state of the fit.
        autosaver: Writes autosaves.
        hook_saves: Creates our part of other checkpoints.
    """

    run_state: RunState
    autosaver: Autosaver
    hook_saves: HookSaves

    def put_part(self, checkpoint: dict[str, object], capture: Capture | None) -> None:
        """Put our part into a checkpoint that other code is saving.

        Args:
            checkpoint: The checkpoint.
            capture: The last capture, if any.
        """
        contents = self.autosaver.contents
        if not contents.is_dumping:
            hook, saver = running_hook(self.run_state.trainer)
            contents.put_part(checkpoint, self.hook_saves.make(hook, saver, capture))
