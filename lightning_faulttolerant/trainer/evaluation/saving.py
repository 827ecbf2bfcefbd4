"""The autosaves of ``validate``, ``test``, and ``predict``: when they are due, and what is in them.

When several ranks save inside an evaluation: before batches that all of them reach.

Each rank knows how many batches it has. The ranks learn the smallest of these numbers at the start, and whenever they
have saved, rank 0 says before which batch they save next. So no rank waits for another one that has no more batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.ranks import Ranks, by_first
from lightning_faulttolerant.checkpoint.schema import KEY, PartHeader, part_with
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.errors import UnsafeCheckpointError
from lightning_faulttolerant.trainer.evaluation import compat as runs
from lightning_faulttolerant.trainer.evaluation.evaluation_state import SUMS
from lightning_faulttolerant.trainer.evaluation.predictions import Predictions
from lightning_faulttolerant.trainer.functions import loop_of
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT, LIGHTNINGS, gather
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.save.pace import Budget, Outage, described
from lightning_faulttolerant.trainer.settings.options import Options


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
        self._sums = sums
        self._ranks = ranks
        self._header = header
        self._history = history
        self._predictions = predictions
        self._on_saved = on_saved
        interval = options.train_time_interval
        self._interval = None if interval is None else interval.total_seconds()
        self._budget = Budget(options.overhead_budget)
        self._outage = Outage(history, speaks=ranks.rank == 0)
        self.save_seconds = 0.0
        """The duration of the longest save."""
        self.saved: TrainerPosition | None = None
        """The position of the last autosave."""
        self.due_at = float("-inf")
        """The time of the clock until which no autosave is due: the first one is due at the first boundary."""
        self.has_only_start = False
        """Whether nothing but the start of the evaluation is saved."""
        self.files_at_start: Mapping[str, Any] = {}
        """What loggers had written before the evaluation began."""
        self.now = self._budget.now

    def is_due_for_all(self) -> bool:
        """Return whether an autosave is due, by rank 0's clock; a collective."""
        return bool(self._ranks.from_first("due", self.now() >= self.due_at))

    def save(self, position: TrainerPosition, state: Mapping[str, object], results: object = None) -> str:
        """Save a state; a collective. Return why it could not be written, or an empty string.

        Args:
            position: Where the evaluation is.
            state: The state of this rank, from `EvaluationState`.
            results: What a finished evaluation returned on this rank.
        """
        began = self.now()
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
        state = {SUMS: self._sums, "files": self.files_at_start}
        failure = self._write(replace(position, validation_batch=0), state, self.now(), starts_over=True)
        self.has_only_start = not failure

    def put_off(self) -> None:
        """Let the next autosave be due later: none can be taken here."""
        self.due_at = self.now() + (_MORE_SECONDS if self._interval is None else self._interval)

    def _write(
        self,
        position: TrainerPosition,
        state: dict[str, Any],
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

    def _checkpoint(self, position: TrainerPosition, state: dict[str, Any], *, starts_over: bool) -> dict[str, Any]:
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
        self, series: AutosaveSeries, checkpoint: dict[str, Any], position: TrainerPosition, began: float
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
        self._history.autosave(series, path, position, seconds=self.now() - began, taken=began)
        for tell in self._on_saved:
            tell(position, str(path))
        return ""

    def _note(self, position: TrainerPosition, began: float, failure: str) -> None:
        self.save_seconds = max(self.save_seconds, self.now() - began)
        self._budget.spend_on_save(began)
        self.due_at = self._budget.save_at if self._interval is None else self.now() + self._interval
        if failure:
            self._outage.note(failure, position, self.saved)
        else:
            self._outage.end()
            self.saved, self.has_only_start = position, False
