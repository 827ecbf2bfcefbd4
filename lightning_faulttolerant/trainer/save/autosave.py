"""Autosaves: when they are written, what is in them, and which work is done in the background."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.background import BackgroundWriter
from lightning_faulttolerant.checkpoint.incident_files import save_incident
from lightning_faulttolerant.checkpoint.opaque import Packed, pack
from lightning_faulttolerant.checkpoint.ranks import Alone, Ranks, by_first
from lightning_faulttolerant.checkpoint.schema import KEY, PICKLED, CheckpointPart, Instead, PartHeader, part_with
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.staging import Staging
from lightning_faulttolerant.checkpoint.verify import unsafe_paths
from lightning_faulttolerant.state.packing import blob_to_tensor
from lightning_faulttolerant.state.tensors import buffers_replaced, buffers_state, load_buffers
from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.deepspeed import engine_of
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT, OPAQUE_KEYS, as_captured, full_state, gather
from lightning_faulttolerant.trainer.ranks.sharded import (
    IN_SHARDS,
    WITHOUT_STATE,
    Replicas,
    ShardWriter,
    left_alone,
    make_loadable,
    without_shards,
    without_state,
    writer_of,
)
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.run.own_times import OwnTimes
from lightning_faulttolerant.trainer.save.hook_saves import HookSave, can_wait
from lightning_faulttolerant.trainer.save.pace import Pace, described
from lightning_faulttolerant.trainer.save.run_state import TITLES, Capture, RunState, put_instead
from lightning_faulttolerant.trainer.save.trust import Trust
from lightning_faulttolerant.trainer.settings.options import Options

_log = logging.getLogger(__name__)


class Autosaver:
    """Writes the autosaves of one fit.

    Args:
        trainer: The trainer that runs the fit.
        series: Writes the files; ``None`` on ranks that write none.
        run_state: Reads the state that Lightning's checkpoint lacks.
        options: Say when to save.
        ranks: The ranks that save together. Each method that saves is a collective.
        header: Returns what every checkpoint of this fit says about it: origin, fingerprint, surroundings.
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
        header: Callable[[], PartHeader],
        history: HistoryWriter,
    ) -> None:
        self._trainer = trainer
        self._series = series
        self._run_state = run_state
        self._options = options
        self._ranks = ranks
        self._header = header
        self._history = history
        self.pace = Pace(trainer, options, history, speaks=ranks.rank == 0)
        """Knows when a save is due, and whether the last one succeeded."""
        self._writer = BackgroundWriter("autosave")
        self._staging = Staging()
        self._replicas = Replicas(trainer, ranks, strict=options.strict)
        self._shards = writer_of(trainer, series, ranks)
        """Writes the autosaves if the strategy shards; ``None`` if they are files."""
        self._trust = Trust(options)
        run_state.objects.keeps_bytes = by_first(ranks, "trust", series, self._trust.is_trusted_series)
        self._packed = Packed({}, {}, [], {})
        """The objects of the last save."""
        self.counts_steps = options.every_n_train_steps is not None
        """Whether an autosave is due by steps rather than by time."""
        self.save_seconds = 0.0
        """The duration of the longest save that training waited for."""
        self._in_background: TrainerPosition | None = None
        """The position of the last state that was given to the background writer."""
        self._is_proven = False
        """Whether this process has written an autosave and loaded it again."""
        self.is_saved_before: Callable[[TrainerPosition], bool] = lambda position: False
        """Returns at the first boundary whether its state is the one that the fit resumed from."""
        self.is_dumping = False
        self.before_save: Callable[[], None] = lambda: None
        """Called when a save begins, before it waits for the one in the background."""
        self.on_saved: Sequence[Callable[[TrainerPosition, str], None]] = ()
        """Called with the position and path of each autosave, also from the background thread."""

    def is_due(self) -> bool:
        """Return whether an autosave is due at this boundary. At the first boundary one always is.

        Raises:
            Exception: The error of the background write since the last boundary, unless it is only an ``OSError``.
        """
        self._take_failure()
        waits = self.counts_steps or self.pace.kept_steps.is_due()
        return self.pace.is_due() and (waits or not self._writer.is_busy)

    def _take_failure(self) -> None:
        """Note why the background write failed, if it did. Raise the error if the store did not cause it."""
        error = self._writer.take_error()
        if error is None:
            return
        if self._in_background is None or not isinstance(error, OSError):
            raise error
        self.pace.note_failure(self._in_background, described(error), self.pace.now())

    def save_due(self, position: TrainerPosition) -> None:
        """Save the state of this boundary: in the background with ``async_save``, except for the first autosave."""
        self.before_save()
        if self.pace.is_first and self._is_saved_before(position):
            return
        if self.pace.is_first:
            self._save_first(position)
            return
        if not self._is_proven or not self._options.async_save or self._shards is not None:
            self.save(position)
            return
        began = self.pace.now()
        self._writer.wait()
        self._take_failure()
        checkpoint = self._taken(position, self._own_state(position))
        self._by_first(position, began, lambda series: self._save_in_background(series, checkpoint, position, began))

    def _save_first(self, position: TrainerPosition) -> None:
        try:
            self.save(position)
        except Exception as error:
            if not can_wait(error, self._trainer, position):
                raise
            self.pace.is_urgent = True
        else:
            self.pace.is_urgent = False

    def _is_saved_before(self, position: TrainerPosition) -> bool:
        """Return whether the state of the first boundary is saved already; a collective."""
        self.pace.begin()
        answers = self._ranks.to_first("who has it saved", self.is_saved_before(position))
        is_saved: bool = self._ranks.from_first("all have it saved", answers is not None and all(answers))
        if is_saved:
            self.pace.begin_saved(position)
        return is_saved

    def _save_in_background(
        self, series: AutosaveSeries, checkpoint: dict[str, Any], position: TrainerPosition, began: float
    ) -> bool:
        """Begin to write in the background. Return whether the checkpoint was written immediately instead."""
        self._run_state.files.flush()
        try:
            staged = self._staging.copy(checkpoint)
        except Exception as error:  # noqa: BLE001 - deepcopy runs user code; torch.save may write what it can't copy
            _log.warning("The state could not be copied, so training waits for this save: %r", error)
            self._write_now(series, checkpoint, position, began)
            return True
        waited, self._in_background = self.pace.now() - began, position
        self._writer.start(partial(self._write_in_background, series, staged, position, began, waited))
        self._note(position, began)
        return False

    def save(self, position: TrainerPosition) -> None:
        """Save the state of this instant. A failed write is noted in `pace`.

        Raises:
            Exception: Any error before the write begins; at the first save of the fit, any error at all.
        """
        began = self.pace.now()
        self.before_save()
        self.settle()
        self._save(self._taken(position, self._own_state(position)), position, began)

    def save_unless_saved(self, position: TrainerPosition) -> None:
        """Save the state of this instant, unless it was just saved."""
        self.before_save()
        self.settle()
        if self.pace.is_first and self._is_saved_before(position):
            return
        if self._ranks.from_first("saved", self.pace.saved) != position:
            self.save(position)

    def save_capture(self, capture: Capture) -> None:
        """Save the state of `capture`. Parameters and optimizer states are taken from the trainer now."""
        began = self.pace.now()
        self.before_save()
        self.settle()
        module = self._trainer.lightning_module
        now = buffers_state(module)
        # They stay until the file is written: a state_dict holds the buffers themselves, not copies.
        load_buffers(module, capture.buffers)
        try:
            self._save(self._taken(capture.position, capture.state, capture), capture.position, began)
        finally:
            load_buffers(module, now)

    def write_incident(self, capture: Capture, *, name: str) -> None:
        """Write the state of `capture` to a file of an incident, which is no autosave. Call it on a sole rank.

        Parameters and optimizer states are taken from the trainer now.

        Args:
            capture: The state before a step.
            name: The name of the file.

        Raises:
            Exception: If it can't be written.
        """
        assert self._series is not None
        self.before_save()
        self._writer.wait()  # it needs what was packed for it
        module = self._trainer.lightning_module
        with buffers_replaced(module, capture.buffers):
            checkpoint = self._gathered(capture.position, capture.state, capture)
            self._check(self._series, checkpoint)
            self._run_state.files.flush()
            path = save_incident(self._series, checkpoint, name)
        self._trust.written(checkpoint[KEY].get(PICKLED, {}), path, is_first=False)

    @property
    def is_sharded(self) -> bool:
        """Whether the autosaves are directories of shards."""
        return self._shards is not None

    def settle(self) -> None:
        """Wait for the background write. If it failed, only warn: the next save makes up for it."""
        self._writer.wait()
        error = self._writer.take_error()
        if error is not None:
            self.pace.is_urgent = False
            _log.warning("An autosave could not be written in the background; the previous one stays: %r", error)

    def close(self) -> None:
        """Wait for the background write, and free its memory."""
        self.settle()
        self._staging.clear()

    def put_part(self, checkpoint: dict[str, Any], save: HookSave) -> None:
        """Put our part into a checkpoint that other code saves; a collective, unless one rank saves alone."""
        self._run_state.files.flush()
        ranks = Alone(rank=self._ranks.rank) if save.is_of_one_rank else self._ranks
        inexact = save.inexact if save.is_of_one_rank else (*save.inexact, *self._replicas.why_not_exact())
        part = self._part_of_all(ranks, save.position, save.state, checkpoint, save.instead)
        if part is not None:
            checkpoint[KEY] = part
            part["behind"], part["inexact"] = list(save.pending), list(inexact)
            if save.instead is not None:
                part["instead"] = {**save.instead}
            if save.before_validation is not None:
                part["before_validation"] = dict(save.before_validation)

    def _part_of_all(
        self,
        ranks: Ranks,
        position: TrainerPosition,
        state: Mapping[str, Any],
        checkpoint: Mapping[str, Any],
        instead: Instead | None = None,
        times: OwnTimes | None = None,
    ) -> CheckpointPart | None:
        """Return our part of a checkpoint on rank 0, and ``None`` on the others."""
        header = self._header()
        if ranks.num_ranks > 1:
            state = {**state, FINGERPRINT: header["fingerprint"]["loaders"]}
        checkpoint = as_captured(checkpoint, instead, self._trainer)
        buffers = {} if instead is None else instead["buffers"]
        full = full_state(state, checkpoint, self._trainer.lightning_module, buffers=buffers)
        states = gather(ranks, position, state, full, times)
        if states is None:
            return None
        world_size = self._trainer.world_size
        part = part_with(header, world_size=world_size, position=position.state_dict(), states=states)
        part["parts"], part[WITHOUT_STATE] = list(TITLES), without_state(self._trainer)
        return part

    def _taken(
        self, position: TrainerPosition, state: Mapping[str, object], capture: Capture | None = None
    ) -> dict[str, Any]:
        """Return what `_gathered` returns, for an autosave."""
        self.pace.note_taken(position, None if capture is None else capture.taken_at)
        return self._gathered(position, state, capture)

    def _own_state(self, position: TrainerPosition) -> dict[str, Any]:
        return self._history.times.timed(lambda: self._run_state.state_dict(position))  # type: ignore[no-any-return]

    def _gathered(
        self, position: TrainerPosition, state: Mapping[str, object], capture: Capture | None = None
    ) -> dict[str, Any]:
        """Return the whole checkpoint on rank 0, else an empty one; if the strategy shards, each rank's own part."""
        self._replicas.check()
        self.is_dumping = True
        try:
            with left_alone(self._trainer, without_state(self._trainer)):
                checkpoint = self._history.times.timed(lambda: compat.dump_checkpoint(self._trainer))
        finally:
            self.is_dumping = False
        make_loadable(self._trainer, checkpoint)
        opaque = {key: checkpoint.pop(key) for key in OPAQUE_KEYS if key in checkpoint}
        if capture is not None:
            put_instead(checkpoint, capture.instead(), position, self._trainer)
        packed = pack(checkpoint, leave=() if self._shards is None else IN_SHARDS)
        self._packed = Packed({}, *packed[1:])  # without the checkpoint, which need not stay in memory
        own = {KEY: {PICKLED: packed.pool}} if packed.pool else {}
        part = self._part_of_all(self._ranks, position, state, {**packed.checkpoint, **own}, times=self._history.times)
        if part is None:
            return {} if self._shards is None else packed.checkpoint
        safe = {key: value for key, value in opaque.items() if not unsafe_paths({key: value})}
        rest = {key: _pickled(key, value) for key, value in opaque.items() if key not in safe}
        part["opaque"] = {key: blob_to_tensor(blob) for key, blob in rest.items() if blob is not None}
        return {**packed.checkpoint, **safe, KEY: {**part, **own.get(KEY, {})}}

    def _save(self, checkpoint: dict[str, Any], position: TrainerPosition, began: float) -> None:
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
        self, shards: ShardWriter, checkpoint: dict[str, Any], position: TrainerPosition, began: float
    ) -> None:
        is_first = self.pace.is_first
        if is_first and self._options.async_save:
            tell("async_save=True: training waits for the autosaves of a strategy that shards.")
        if is_first and self._options.incremental:
            tell("incremental=True has no effect on the autosaves of a strategy that shards: they are written whole.")
        by_first(self._ranks, "check", self._series, lambda series: self._check(series, without_shards(checkpoint)))
        keep = self.pace.kept_steps.keeps(position)
        flush = self._run_state.files.flush
        path, failure = shards.save(checkpoint, position, flush=flush, raises=is_first, keep=keep)
        if failure:
            self.pace.note_failure(position, failure, began)
            return
        pool, is_new = self._packed.pool, not self._is_proven
        pickles = engine_of(self._trainer) is not None
        by_first(
            self._ranks,
            "load",
            self._series,
            lambda _: self._trust.written(pool, path, is_first=is_new, has_pickles=pickles),
        )
        self._has_saved(position, path)
        self._note(position, began, path)

    def _has_saved(self, position: TrainerPosition, path: str) -> None:
        self._is_proven, self.pace.saved = True, position
        self.pace.kept_steps.note_written(position)
        for hear in self.on_saved:
            hear(position, path)

    def _write_now(
        self, series: AutosaveSeries, checkpoint: dict[str, Any], position: TrainerPosition, began: float
    ) -> bool:
        is_proven = self._is_proven
        self._run_state.files.flush()
        path = self._write(series, checkpoint, position, is_first=not is_proven)
        self._has_saved(position, path)
        self._note(position, began, path)
        if not is_proven and self._options.async_save:  # so that the first copy need not allocate memory
            self._writer.start(self._staging.reserve(checkpoint))
        return True

    def _check(self, series: AutosaveSeries, checkpoint: Mapping[str, object]) -> None:
        # Checked now rather than when the run resumes, and before a good autosave is deleted to make room for it.
        self._trust.check(self._packed, checkpoint, os.fspath(series.directory))
        if engine_of(self._trainer) is not None:
            self._trust.check_engines_files(os.fspath(series.directory), is_saving=True)

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
        checkpoint: dict[str, Any],
        position: TrainerPosition,
        began: float,
        waited: float,
    ) -> None:
        try:
            path = self._write(series, checkpoint, position)
            self._has_saved(position, path)
            self._history.autosave(series, path, position, seconds=waited, taken=began, is_in_background=True)
            self.pace.note_written()
        except BaseException:
            self.pace.is_urgent = True
            raise

    def _note(self, position: TrainerPosition, began: float, path: str | None = None) -> None:
        seconds = self.pace.note_waited(position, began)
        _log.debug("Autosave of %s held training up for %.3f s", position, seconds)
        if path is not None:
            self._history.autosave(self._series, path, position, seconds=seconds, taken=self.pace.taken_at)
            self.pace.note_written()


def _pickled(key: str, value: object) -> bytes | None:
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        _log.warning("%s can't be pickled and is left out of the autosaves; a resume doesn't need it: %s", key, error)
        return None
