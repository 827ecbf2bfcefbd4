"""The autosaves of ``validate``, ``test``, and ``predict``: when they are due, and what a ``predict`` adds to them.

The predictions of a ``predict`` are in files next to its autosaves, each with the predictions since the last.

A different number of ranks can continue a ``predict``. Lightning's own sampler gives rank r every n-th sample, each
sample once. The samples that no rank has predicted yet are split the same way among the ranks that continue. Their
batches get numbers that no earlier batch of the loader had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from lightning_faulttolerant.checkpoint.autosave_files import PREDICTIONS_NAME
from lightning_faulttolerant.checkpoint.ranks import Ranks, by_first
from lightning_faulttolerant.checkpoint.saving import save_to_file
from lightning_faulttolerant.checkpoint.schema import KEY, PartHeader, part_with
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.trust import pack
from lightning_faulttolerant.errors import UnsafeCheckpointError
from lightning_faulttolerant.loader.remaining import Rest
from lightning_faulttolerant.loader.resized import fresh_moment
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state import tensors
from lightning_faulttolerant.storage.store import open_file, open_store
from lightning_faulttolerant.trainer.evaluation import compat as runs
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.loaders.trackers import user_loader
from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.position import TrainerPosition, loop_of
from lightning_faulttolerant.trainer.ranks.compat import saves_shards
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT, LIGHTNINGS, gather
from lightning_faulttolerant.trainer.resume.choice import Trust
from lightning_faulttolerant.trainer.run.history import HistoryWriter
from lightning_faulttolerant.trainer.save.pace import Budget, Outage, described
from lightning_faulttolerant.trainer.settings import Options

WEIGHTS, GRADIENTS, SUMS, DEALT = "weights", "gradients", "sums", "dealt"


class OwnParts:
    """The parts of a state that only an evaluation has.

    Args:
        trainer: The trainer that evaluates.
        dealing: Knows which samples of a ``predict`` are left; ``None`` in other evaluations.
    """

    def __init__(self, trainer: Trainer, dealing: Dealing | None) -> None:
        self._trainer = trainer
        self._module = module = trainer.lightning_module
        self.sums: dict[str, int] = tensors.sums_of_bits({**tensors.weights_of(module), **tensors.buffers_of(module)})
        """A sum of the bits of each tensor that the evaluation begins with."""
        self._weights = tensors.TensorMarks(self._tensors())
        self._gradients = tensors.TensorMarks(self._tensors_of_gradients())
        self.readers: dict[str, Callable[..., object]] = {
            WEIGHTS: self._changed_weights,
            GRADIENTS: self._changed_gradients,
            SUMS: lambda: self.sums,
            DEALT: (lambda is_finished: None) if dealing is None else dealing.state_dict,
        }
        """What reads each of them; it returns ``None`` if there is nothing to carry."""

    def _tensors(self) -> list[Tensor]:
        return [*self._module.parameters(), *self._module.buffers()]

    def _tensors_of_gradients(self) -> list[Tensor]:
        return [p.grad for p in self._module.parameters() if p.grad is not None]

    def can_be_saved(self) -> bool:
        """Return whether weights that the evaluation has changed could be saved, if there are any."""
        is_same = self._weights.unmoved(self._tensors()) and self._gradients.unmoved(self._tensors_of_gradients())
        return is_same or not saves_shards(self._trainer.strategy)

    def _changed_weights(self) -> dict[str, Tensor] | None:
        if self._weights.unmoved(self._tensors()):
            return None
        ready = {name: value for name, value in self._module.state_dict().items() if not is_lazy(value)}
        return {name: value.detach().clone() for name, value in ready.items()}

    def _changed_gradients(self) -> dict[str, Any] | None:
        is_same = self._gradients.unmoved(self._tensors_of_gradients())
        return None if is_same else tensors.gradients_state(self._module)


@dataclass(kw_only=True, slots=True)
class _Dealt:
    """The part of a loader's samples that this rank predicts.

    Args:
        loader: Lightning's loader.
        rest: The samples that are dealt to these ranks.
        first: The number of the first batch.
        num_own: How many samples this rank gets.
    """

    loader: Any
    rest: Rest
    first: int
    num_own: int

    @property
    def batch_size(self) -> int:
        return runs.batch_size_of(self.loader)

    @property
    def num_batches(self) -> int:
        return -(-self.num_own // self.batch_size)

    def state_dict(self, num_batches: int) -> dict[str, object]:
        """Return what is left after this rank's first batches, as plain values."""
        return {
            "length": self.rest.length,
            "consumed": [list(of_ranks) for of_ranks in self.rest.consumed],
            "first": self.first,
            "own": min(num_batches * self.batch_size, self.num_own),
            "next": self.first + num_batches,
        }


class Dealing:
    """Knows which samples of each loader are left, and deals them.

    Args:
        trainer: The trainer that predicts.
        loaders: Its loaders.
        is_per_sample: Whether samples are seeded one by one.
    """

    def __init__(self, trainer: Trainer, loaders: Loaders, *, is_per_sample: bool) -> None:
        self._trainer = trainer
        self._loaders = loaders
        self._is_per_sample = is_per_sample
        self._dealt: list[_Dealt] = []
        self._reason = ""

    def look(self) -> None:
        """Find out how the samples come to the ranks. Call this when the loaders are set up."""
        trainer = self._trainer
        rank, num_ranks = trainer.global_rank, trainer.world_size
        self._dealt, self._reason = [], ""
        for number, loader in enumerate(map(user_loader, runs.loaders_of(trainer.predict_loop))):
            length = runs.num_in_order(loader, rank=rank, num_ranks=num_ranks)
            if length is None:
                self._reason = f"loader predict/{number} has a different order than Lightning's own sampler"
                self._dealt = []
                return
            num_own = len(range(rank, length, num_ranks))
            self._dealt.append(_Dealt(loader=loader, rest=Rest(length=length), first=0, num_own=num_own))

    def state_dict(self, *, is_finished: bool) -> dict[str, object]:
        """Return what is left at this place, and why a different number of ranks can't continue here, if so."""
        loop = self._trainer.predict_loop
        loader, index = (len(self._dealt), 0) if is_finished or not self._dealt else runs.place_in_loaders(loop)
        begun = [one.num_batches if i < loader else index * (i == loader) for i, one in enumerate(self._dealt)]
        return {
            "reason": "" if is_finished else self._why_not(),
            "loaders": [one.state_dict(num) for one, num in zip(self._dealt, begun, strict=True)],
        }

    def _why_not(self) -> str:
        if self._reason:
            return self._reason
        limit = self._trainer.limit_predict_batches
        if isinstance(limit, int) or limit != 1.0:  # 1 is one batch, 1.0 are all
            return f"limit_predict_batches={limit} counts the batches of one rank"
        modules = self._trainer.lightning_module.modules()
        if any(isinstance(one, _BatchNorm) and (one.training or one.running_mean is None) for one in modules):
            return "a batch norm takes the mean of each batch, so each sample depends on the others in its batch"
        return ""

    def why_not_dealt(self, states: Sequence[Mapping[str, object]]) -> str:
        """Return why what is left can't be dealt to these ranks, or an empty string.

        Args:
            states: For each loader, a state with ``length``, ``consumed``, and ``first``.
        """
        if self._reason:
            return self._reason
        saved, now = [state["length"] for state in states], [one.rest.length for one in self._dealt]
        if saved != now:
            return f"its loaders had {saved} samples, and have {now} now"
        if self._is_per_sample and any(_rest_of(state).begin is None for state in states):
            return "its ranks were in different loaders, so the seeds of its samples can't be continued"
        return ""

    def deal(self, states: Sequence[Mapping[str, Any]], patches: Patches) -> None:
        """Deal what is left to these ranks.

        Args:
            states: As for `why_not_dealt`.
            patches: Those of the session.
        """
        loop = self._trainer.predict_loop
        for number, (one, state) in enumerate(zip(self._dealt, states, strict=True)):
            rest = _rest_of(state)
            indices = rest.of_rank(self._trainer.global_rank, self._trainer.world_size)
            runs.put_indices(one.loader, indices)
            one.rest, one.first, one.num_own = rest, state["first"], len(indices)
            tracker = self._loaders.trackers.get(f"predict/{number}")
            if isinstance(tracker, TrackedLoader):
                tracker.begin_after(rest.begin or 0)
        runs.set_num_batches(loop, [one.first + one.num_batches for one in self._dealt])
        runs.count_from(loop, [one.first for one in self._dealt], patches)

    def begin_again(self, seeds: Sequence[Mapping[str, object] | None]) -> None:
        """Let each loader begin with new workers, which repeat nothing that earlier ones have drawn.

        Args:
            seeds: For each loader the seeds of its samples, if each is seeded.
        """
        trainer = self._trainer
        for number, (one, seed) in enumerate(zip(self._dealt, seeds, strict=True)):
            tracker = self._loaders.trackers.get(f"predict/{number}")
            if not isinstance(tracker, TrackedLoader):
                continue
            state: dict[str, object] = {"consumed": None, "drop": 0, "record": None, "workers": None}
            if seed is not None:
                state["per_sample"] = {**seed, "num_begun": 0}
            elif tracker.num_workers:
                names = (number, one.rest.consumed, trainer.global_rank, trainer.world_size)
                state["record"] = {"birth": fresh_moment(*names, loader=one.loader).state_dict()}
            tracker.load_state_dict(state)


def states_after(ranks: Sequence[Sequence[Mapping[str, object]]]) -> list[dict[str, object]]:
    """Return for each loader what is left after all ranks that saved, in the form that `Dealing.deal` takes.

    Args:
        ranks: For each rank the loaders of `Dealing.state_dict`.
    """
    return [
        {
            "length": own[0]["length"],
            "consumed": [*own[0]["consumed"], [one["own"] for one in own]],
            "first": max(one["next"] for one in own),
        }
        for own in zip(*ranks, strict=True)
    ]


def _rest_of(state: Mapping[str, Any]) -> Rest:
    return Rest(length=state["length"], consumed=tuple(map(tuple, state["consumed"])))


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
        header: Returns what an autosave with a state of this rank says about the run.
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
        header: Callable[[Mapping[str, Any]], PartHeader],
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

    def save(self, position: TrainerPosition, state: Mapping[str, object], results: object = None) -> str:
        """Save a state; a collective. Return why it could not be written, or an empty string.

        Args:
            position: Where the evaluation is.
            state: The state of this rank.
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
        failure = next(filter(None, self._ranks.to_all("predictions", failure)), "")
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
        header = self._header(state)
        if self._ranks.num_ranks > 1:
            state = {**state, FINGERPRINT: header["fingerprint"]["loaders"]}
        states = gather(self._ranks, position, state, {**state, LIGHTNINGS: {}}, header)
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
