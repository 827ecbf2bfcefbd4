"""The autosaves of ``validate``, ``test``, and ``predict``: when they are due, and what is in them.

The predictions of a ``predict`` are in files next to its autosaves, each with the predictions since the last.

Several ranks save before batches that all of them reach. Each rank knows how many batches it has. The ranks learn the
smallest of these numbers at the start, and whenever they have saved, rank 0 says before which batch they save next. So
no rank waits for another one that has no more batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.autosave_files import PREDICTIONS_NAME
from lightning_faulttolerant.checkpoint.ranks import Ranks, by_first
from lightning_faulttolerant.checkpoint.saving import save_to_file
from lightning_faulttolerant.checkpoint.schema import KEY, PartHeader, part_with
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.trust import pack
from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.errors import UnsafeCheckpointError
from lightning_faulttolerant.storage.store import open_file, open_store
from lightning_faulttolerant.trainer.evaluation import compat as runs
from lightning_faulttolerant.trainer.evaluation.evaluation_state import SUMS
from lightning_faulttolerant.trainer.functions import loop_of
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT, LIGHTNINGS, gather
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.save.pace import Budget, Outage, described
from lightning_faulttolerant.trainer.save.trust import Trust
from lightning_faulttolerant.trainer.settings.options import Options

_PREDICTIONS, _POOL = "predictions", "pool"


class Predictions:
    """The predictions of one rank.

    Args:
        trainer: The trainer that predicts.
        directory: The directory of the autosaves, as a path or a URL.
        rank: The number of this rank.
        trust: Decides whether predictions that are objects may be unpickled.
    """

    def __init__(self, trainer: Trainer, directory: str, *, rank: int, trust: Trust) -> None:
        self._trainer = trainer
        self._store = open_store(directory)
        self._rank = rank
        self._trust = trust
        self._files: list[str] = []
        self._num_written: list[int] = []

    def write(self) -> dict[str, object]:
        """Write the predictions since the last call into a new file. Return the names of all files so far.

        Raises:
            OSError: If the file can't be written.
            UnsafeCheckpointError: If a prediction can't be pickled.
        """
        predictions = runs.predictions_of(self._trainer.predict_loop)
        if not runs.keeps_predictions(self._trainer) or not predictions:  # at its end it drops those of a writer
            return {"files": [], "num": []}
        begun = self._num_written or [0] * len(predictions)
        new = [of_loader[done:] for of_loader, done in zip(predictions, begun, strict=True)]
        if any(new):
            packed = pack({_PREDICTIONS: new})
            self._trust.check(packed, packed.checkpoint, self._store.url)
            name = self._next_name()
            with self._store.writer(name) as file:
                save_to_file({**packed.checkpoint, _POOL: packed.pool}, file)
            self._files.append(name)
            self._num_written = [len(of_loader) for of_loader in predictions]
        return {"files": list(self._files), "num": list(self._num_written)}

    def _next_name(self) -> str:
        matches = (PREDICTIONS_NAME.fullmatch(name) for name in self._store.names())
        number = 1 + max((int(match["number"]) for match in matches if match is not None), default=0)
        return f"predictions-rank={self._rank}-{number:08d}.pt"

    def load(self, state: Mapping[str, Any]) -> None:
        """Give the predictions of `state`, a result of `write`, back to the loop.

        Raises:
            UnsafeCheckpointError: If some of them are objects, and the directory is not trusted.
            OSError: If a file can't be read.
        """
        self._files, self._num_written = list(state["files"]), list(state["num"])
        predictions: list[list[object]] = [[] for _ in self._num_written]
        for name in self._files:
            for of_loader, new in zip(predictions, self._read(name), strict=True):
                of_loader.extend(new)
        if predictions:
            runs.predictions_of(self._trainer.predict_loop)[:] = predictions

    def _read(self, name: str) -> Sequence[list[object]]:
        path = self._store.path(name)
        with open_file(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
        self._trust.restore(content, content.pop(_POOL), path)
        found: Sequence[list[object]] = content[_PREDICTIONS]
        return found


class CommonPace:
    """Decides before which batches of an evaluation the ranks meet, to save there.

    Args:
        ranks: The ranks that evaluate together.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._next = math.inf
        self._num_common = 0.0
        self._began = (0, 0.0)

    def begin(self, batch: int, num_batches: float) -> None:
        """Note that an evaluation begins, or continues; a collective.

        Args:
            batch: The batch that comes first.
            num_batches: How many batches this rank has in all; infinite if that is not known.
        """
        numbers = self._ranks.to_first("the number of batches", num_batches)
        smallest = None if numbers is None else min(numbers)
        self._num_common = self._ranks.from_first("the number of common batches", smallest)
        self._began = batch, perf_counter()
        self._next = batch if self._can_meet(batch) else math.inf

    def _can_meet(self, batch: float) -> bool:
        return batch < self._num_common < math.inf

    def is_here(self, batch: int) -> bool:
        """Return whether the ranks meet before this batch."""
        return batch == self._next

    def meet_again(self, batch: int, in_seconds: float) -> None:
        """Decide where the ranks meet next; a collective.

        Args:
            batch: The batch before which they are.
            in_seconds: In how many seconds the next autosave is due. Only rank 0's counts.
        """
        first, began = self._began
        num_more = 1
        if batch > first:  # then rank 0 knows how long a batch takes
            seconds_per_batch = max((perf_counter() - began) / (batch - first), 1e-9)
            num_more = max(math.ceil(in_seconds / seconds_per_batch), 1)
        following = batch + num_more
        self._next = self._ranks.from_first("where to meet", following if self._can_meet(following) else math.inf)


RETURNED, PREDICTIONS, PROGRESS = "returned", "predictions", "progress"
_MORE_SECONDS = 10.0


class EvaluationPace:
    """Decides when an autosave of an evaluation is due: after an interval, or as often as the budget allows.

    Args:
        options: Say when to save.
        history: Knows the failures of the run, which decide how often to save.
    """

    def __init__(self, options: Options, history: HistoryWriter) -> None:
        interval = options.train_time_interval
        self._interval = None if interval is None else interval.total_seconds()
        self._budget = Budget(options.overhead_budget)
        if options.follows_failures:
            self._budget.begin(0.0, history.failures())
        self.now = self._budget.now
        self.save_seconds = 0.0
        """The duration of the longest save."""
        self.due_at = float("-inf")
        """The time of the clock until which no autosave is due: the first one is due at the first boundary."""

    def put_off(self) -> None:
        """Let the next autosave be due later: none can be taken here."""
        self.due_at = self.now() + (_MORE_SECONDS if self._interval is None else self._interval)

    def note_save(self, began: float) -> None:
        """Note that a save, which began at a time of the clock, is over."""
        self.save_seconds = max(self.save_seconds, self.now() - began)
        self._budget.spend_on_save(began)
        self.due_at = self._budget.save_at if self._interval is None else self.now() + self._interval


class EvaluationSaver:
    """Writes the autosaves of one evaluation.

    Args:
        trainer: The trainer that evaluates.
        series: Writes the files; ``None`` on ranks that write none.
        sums: A sum of the bits of each tensor that the evaluation begins with.
        options: Say when to save.
        ranks: The ranks that save together. Each method that saves is a collective.
        header: Returns what every autosave says about the run.
        history: Records each autosave.
        predictions: The predictions of this rank, for ``predict``.
        on_saved: Called with the position and the path of each autosave, on the rank that writes it.
    """

    def __init__(
        self,
        trainer: Trainer,
        series: AutosaveSeries | None,
        sums: Mapping[str, int],
        options: Options,
        *,
        ranks: Ranks,
        header: Callable[[], PartHeader],
        history: HistoryWriter,
        predictions: Predictions,
        on_saved: Sequence[Callable[[TrainerPosition, str], None]],
    ) -> None:
        self._trainer = trainer
        self._series = series
        self._ranks = ranks
        self._header = header
        self._history = history
        self._predictions = predictions
        self._on_saved = on_saved
        self._outage = Outage(history, speaks=ranks.rank == 0)
        self.pace = EvaluationPace(options, history)
        self.saved: TrainerPosition | None = None
        """The position of the last autosave."""
        self.has_only_start = False
        """Whether nothing but the start of the evaluation is saved."""
        self._at_start: dict[str, object] = {SUMS: sums, "files": {}}

    def note_files(self, files: Mapping[str, object]) -> None:
        """Note what loggers had written before the evaluation began."""
        self._at_start["files"] = files

    def is_due_for_all(self) -> bool:
        """Return whether an autosave is due, by rank 0's clock; a collective."""
        return bool(self._ranks.from_first("due", self.pace.now() >= self.pace.due_at))

    def save(self, position: TrainerPosition, state: Mapping[str, object], results: object = None) -> str:
        """Save a state; a collective. Return why it could not be written, or an empty string.

        Args:
            position: Where the evaluation is.
            state: The state of this rank, from `EvaluationState`.
            results: What a finished evaluation returned on this rank.
        """
        began = self.pace.now()
        state = {**state, PROGRESS: loop_of(self._trainer).batch_progress.state_dict(), RETURNED: results}
        failure = ""
        if runs.is_predicting(loop_of(self._trainer)):
            try:
                state[PREDICTIONS] = self._predictions.write()
            except (OSError, UnsafeCheckpointError) as error:
                failure = described(error)
        failures = self._ranks.to_first("predictions", failure)
        failure = self._ranks.from_first("predictions", next(iter(filter(None, failures or ())), ""))
        return self._write(position, state, began, failure=failure)

    def save_start(self, position: TrainerPosition) -> None:
        """Note that the evaluation has begun, and can only be run from its start; a collective."""
        position = replace(position, validation_batch=0)
        failure = self._write(position, {**self._at_start}, self.pace.now(), starts_over=True)
        self.has_only_start = not failure

    def _write(
        self,
        position: TrainerPosition,
        state: dict[str, object],
        began: float,
        *,
        failure: str = "",
        starts_over: bool = False,
    ) -> str:
        """Write an autosave, unless something has failed already. Note it, and return what has failed."""
        if not failure:
            checkpoint = self._checkpoint(position, state, starts_over=starts_over)
            failure = by_first(
                self._ranks, "save", self._series, lambda series: self._attempted(series, checkpoint, position, began)
            )
        self._note(position, began, failure)
        return failure

    def _checkpoint(
        self, position: TrainerPosition, state: dict[str, object], *, starts_over: bool
    ) -> dict[str, object]:
        """Return the whole checkpoint on rank 0; it is empty on the others."""
        header = self._header()
        if self._ranks.num_ranks > 1:
            state = {**state, FINGERPRINT: header["fingerprint"]["loaders"]}
        states = gather(self._ranks, position, state, {**state, LIGHTNINGS: {}})
        if states is None:
            return {}
        part = part_with(header, world_size=self._trainer.world_size, position=position.state_dict(), states=states)
        if starts_over:
            part["starts_over"] = True
        return {"epoch": position.epoch, "global_step": position.global_step, KEY: part}

    def _attempted(
        self, series: AutosaveSeries, checkpoint: dict[str, object], position: TrainerPosition, began: float
    ) -> str:
        try:
            path = series.save(
                checkpoint,
                epoch=position.epoch,
                batch=position.validation_batch,
                global_step=position.global_step,
            )
        except OSError as error:
            return described(error)
        self._history.autosave(series, path, position, seconds=self.pace.now() - began, taken=began)
        for tell in self._on_saved:
            tell(position, str(path))
        return ""

    def _note(self, position: TrainerPosition, began: float, failure: str) -> None:
        self.pace.note_save(began)
        if failure:
            self._outage.note(failure, position, self.saved)
        else:
            self._outage.end()
            self.saved, self.has_only_start = position, False
