"""The state of ``validate``, ``test``, or ``predict``, and its resume: whether an autosave fits, and what is restored.

The state is that of a fit between two batches, without what only fits have. An evaluation begins with weights that its
script loads, so its autosaves hold them only if they have changed since.

If a different number of ranks continues a ``predict``, each rank gets a state from those that saved. After a stop no
sample is predicted twice, after a kill only those since the last autosave. Predictions may depend on the rank or the
batch that a sample was in. If that is possible, the whole ``predict`` runs again instead.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.checkpoint.schema import NOT_EXACT, VERSION, CheckpointPart, SavedFingerprint
from lightning_faulttolerant.state.metrics import merged_metrics
from lightning_faulttolerant.state.process_settings import set_process_settings
from lightning_faulttolerant.trainer.adapters.state import begin_evaluation_bar, swap_for_validation
from lightning_faulttolerant.trainer.evaluation import compat as runs
from lightning_faulttolerant.trainer.evaluation.saving import (
    DEALT,
    GRADIENTS,
    PREDICTIONS,
    PROGRESS,
    RETURNED,
    SUMS,
    WEIGHTS,
    Dealing,
    Predictions,
    states_after,
)
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.log import tell_resumed
from lightning_faulttolerant.trainer.objects.objects import SPLITS
from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.position import TrainerPosition, function_of, loop_of
from lightning_faulttolerant.trainer.process import OBJECTS, SETTINGS
from lightning_faulttolerant.trainer.ranks.compat import has_shards
from lightning_faulttolerant.trainer.ranks.elastic import (
    LOST_GENERATORS,
    generators_of_rank,
    other_draws,
    ranks_in_words,
)
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT, changed_objects, kept_apart, state_of
from lightning_faulttolerant.trainer.resume.choice import Trust
from lightning_faulttolerant.trainer.resume.proof import Proving
from lightning_faulttolerant.trainer.resume.report import ResumeReport, of_all
from lightning_faulttolerant.trainer.run.fingerprint import (
    Comparison,
    Fingerprint,
    as_carried_over,
    differences,
    surroundings,
)
from lightning_faulttolerant.trainer.save.part import for_other_ranks
from lightning_faulttolerant.trainer.save.run_state import PARTS, TITLES, VALIDATION_RUN, RunState
from lightning_faulttolerant.trainer.settings import Options

State = Mapping[str, Any]


class OtherRanks:
    """The state of one rank of a ``predict`` that a different number of ranks has saved.

    Args:
        trainer: The trainer that predicts.
        part: Our part of the checkpoint.
        checkpoint: The whole checkpoint.
        rank: The number of this rank.
        is_per_sample: Whether samples are seeded one by one.
    """

    def __init__(
        self, trainer: Trainer, part: CheckpointPart, checkpoint: State, *, rank: int, is_per_sample: bool
    ) -> None:
        self._trainer = trainer
        self._states = [state_of(part, number, checkpoint) for number in range(len(part["ranks"]))]
        self.state: dict[str, Any] = dict(self._states[0])
        self.seeds: list[State | None] = []
        """For each loader the seeds of its samples, if each is seeded."""
        self.not_exact: list[str] = []
        """A line for each difference from the uninterrupted run."""
        self.reason = next(self._reasons(part, checkpoint), "")
        """Why these ranks can't continue; empty if they can."""
        if not self.reason:
            self._redistribute(rank, is_per_sample=is_per_sample)

    def _reasons(self, part: CheckpointPart, checkpoint: State) -> Iterator[str]:
        states = self._states
        if has_shards(self._trainer.strategy):
            yield "its weights are in shards, and a different number of ranks has other shards"
        yield from (state[DEALT]["reason"] for state in states if state[DEALT]["reason"])
        lengths = [[one["length"] for one in state[DEALT]["loaders"]] for state in states]
        known = [state.get(FINGERPRINT, part["fingerprint"]["loaders"]) for state in states]
        datasets = [{place: of.get("dataset") for place, of in own.items()} for own in known]
        if any(of != lengths[0] for of in lengths) or any(of != datasets[0] for of in datasets):
            yield "its ranks had different data"
        if any({WEIGHTS, GRADIENTS} & state.keys() for state in states):
            yield "it has changed weights, buffers, or gradients"
        loaders = states[0]["loaders"]
        if loaders["own"] or loaders["left"] or any("dataset" in state for state in loaders["places"].values()):
            yield "a data set or a loader has its own state, which belongs to one rank"
        if apart := kept_apart(part, checkpoint):
            yield f"its ranks have different values of {', '.join(apart)}"
        _, lost = self._metrics(0)
        yield from lost

    def _metrics(self, rank: int) -> tuple[dict[str, object], list[str]]:
        metrics, module = [state["metrics"] for state in self._states], self._trainer.lightning_module
        return merged_metrics(metrics, module, rank=rank)

    def _redistribute(self, rank: int, *, is_per_sample: bool) -> None:
        states, first, num_ranks = self._states, self._states[0], self._trainer.world_size
        taken_over = states[rank::num_ranks]
        dealt = states_after([state[DEALT]["loaders"] for state in states])
        places = first["loaders"]["places"]
        self.seeds = [places.get(f"predict/{number}", {}).get("per_sample") for number in range(len(dealt))]
        merged = {
            **first,
            **generators_of_rank(states, rank),
            "metrics": self._metrics(rank)[0],
            "loaders": {"places": {}, "left": [], "own": {}, "combined": None, "ahead": None},
            DEALT: {"reason": "", "loaders": dealt},
            PREDICTIONS: _joined_predictions([state[PREDICTIONS] for state in taken_over]),
        }
        if VALIDATION_RUN in first:
            indices = [state[VALIDATION_RUN]["epoch_batch_indices"] for state in taken_over]
            joined = [[batch for own in of_loader for batch in own] for of_loader in zip(*indices, strict=True)]
            start = {"loader": 0, "index": 0, "fetched": 0, "epoch_batch_indices": joined or [[] for _ in dealt]}
            merged[VALIDATION_RUN] = {**first[VALIDATION_RUN], **start}
        self.state = for_other_ranks(PARTS, first, merged)
        self._tell(is_per_sample=is_per_sample)

    def _tell(self, *, is_per_sample: bool) -> None:
        ranks = f"{ranks_in_words(len(self._states))} when it was saved, {ranks_in_words(self._trainer.world_size)} now"
        if VALIDATION_RUN in self._states[0]:
            difference = "batches consist of different samples, so the last bits of a prediction may differ"
        else:
            difference = "each rank also returns predictions of other ranks"
        self.not_exact.append(f"{ranks}: {difference}")
        self.not_exact.append(other_draws("predict") if is_per_sample else LOST_GENERATORS)
        changed = sorted(changed_objects(self._states[0].get(OBJECTS)))
        if changed:
            self.not_exact.append(f"all ranks have the values of rank 0 in {', '.join(changed)}")


def _joined_predictions(states: Sequence[State]) -> dict[str, object]:
    """Return the names of the files of several ranks, one rank after the other, and how many predictions they hold."""
    nums = [state["num"] for state in states if state["num"]]
    return {
        "files": [name for state in states for name in state["files"]],
        "num": [sum(of) for of in zip(*nums, strict=True)],
    }


class SavedEvaluation:
    """An autosave of an evaluation, as this rank continues from it.

    Args:
        trainer: The trainer that evaluates.
        path: The autosave.
        checkpoint: Its content.
        part: Our part of it.
        ranks: All ranks. The autosave holds a state for each of them.
        options: Say whether a different number of ranks may continue.
    """

    def __init__(
        self,
        trainer: Trainer,
        path: str,
        checkpoint: Mapping[str, object],
        part: CheckpointPart,
        *,
        ranks: Ranks,
        options: Options,
    ) -> None:
        self.began = time.monotonic()
        self.path = path
        self.part = part
        self.ranks = ranks
        self.position = TrainerPosition.from_state_dict(part["position"])
        self.other_ranks: OtherRanks | None = None
        """What a different number of ranks takes over, if one continues."""
        if part["world_size"] != trainer.world_size and self._may_be_resized(trainer, options):
            is_per_sample = options.worker_rng == "per_sample"
            self.other_ranks = OtherRanks(trainer, part, checkpoint, rank=ranks.rank, is_per_sample=is_per_sample)
        self.state: Mapping[str, Any] = (
            state_of(part, ranks.rank, checkpoint) if self.other_ranks is None else self.other_ranks.state
        )
        """The state of this rank. It is empty once it is restored."""
        saved = part["fingerprint"]
        self.fingerprint: SavedFingerprint = {**saved, "loaders": self.state.get(FINGERPRINT, saved["loaders"])}

    def _may_be_resized(self, trainer: Trainer, options: Options) -> bool:
        is_predict = function_of(trainer) == "predict" and not self.starts_over
        return is_predict and options.allows_other_ranks and self.part["version"] <= VERSION

    @property
    def starts_over(self) -> bool:
        """Whether only the start of the evaluation is saved, since it can't continue."""
        return bool(self.part.get("starts_over"))

    @property
    def dealt(self) -> list[Mapping[str, object]]:
        """What is left of each loader, if a different number of ranks began."""
        states: list[Mapping[str, object]] = list(self.state.get(DEALT, {}).get("loaders", ()))
        return states if any(state["consumed"] for state in states) and not self.position.is_finished else []

    def forget(self) -> None:
        """Free the state: it is restored."""
        self.state, self.other_ranks = {}, None


class EvaluationResume:
    """Restores one evaluation from an autosave.

    Args:
        trainer: The trainer that evaluates.
        saved: The autosave.
        run_state: Restores the state.
        loaders: The evaluation's loaders.
        fingerprint: The fingerprint of this run.
        trust: Decides whether objects may be unpickled.
        predictions: The predictions of this rank.
        patches: Those of the session, undone when the evaluation ends.
        options: Say whether another batch than before is an error.
    """

    def __init__(
        self,
        trainer: Trainer,
        saved: SavedEvaluation,
        run_state: RunState,
        loaders: Loaders,
        fingerprint: Fingerprint,
        *,
        trust: Trust,
        predictions: Predictions,
        patches: Patches,
        options: Options,
    ) -> None:
        self._surroundings = surroundings(trainer)  # what training has set is restored later
        self._trainer = trainer
        self._saved = saved
        self._run_state = run_state
        self._loaders = loaders
        self._fingerprint = fingerprint
        self._trust = trust
        self._predictions = predictions
        self._comparison = Comparison(saved.path, strict=False, is_elastic=False)
        own = Comparison(saved.path, strict=options.strict, is_elastic=False, accepted=options.accepted)
        self.proving = Proving(trainer, own)
        self._patches = patches
        self._report: ResumeReport | None = None
        self._reasons: tuple[str, ...] = ()
        self.notes: list[str] = []
        """Lines for the report that are worth knowing."""

    @property
    def report(self) -> ResumeReport | None:
        """The report, updated with anything that has since turned out not to be exact."""
        reasons = (*self._reasons, *self._loaders.exactness.reasons, *self.proving.comparison.not_exact)
        return self._report and replace(self._report, not_exact=reasons, proof=self.proving.proof)

    @property
    def position(self) -> TrainerPosition:
        """Where the autosave was taken."""
        return self._saved.position

    @property
    def run(self) -> Mapping[str, Any]:
        """The place of the loop."""
        found: Mapping[str, object] = self._saved.state[VALIDATION_RUN]
        return found

    def why_not(self, *, has_weights: bool) -> str:
        """Return why this evaluation is another one than the one that saved, or an empty string.

        Args:
            has_weights: Whether it has the weights that it evaluates.
        """
        if self._saved.part["version"] > VERSION:
            return f"{self._saved.path} was written by a newer version of the package"
        if self._saved.part["world_size"] != self._trainer.world_size:
            before, now = self._saved.part["world_size"], self._trainer.world_size
            ranks = f"the number of ranks is {now}, but was {before} in {self._saved.path}"
            if self._saved.other_ranks is None:
                return ranks
            if self._saved.other_ranks.reason:
                return f"{ranks}, and these ranks can't continue it: {self._saved.other_ranks.reason}"
        if has_weights and self._saved.state.get(SUMS) != self._run_state.own[SUMS]():
            return "it begins with different weights"
        found = {**self._fingerprint.model(), **self._fingerprint.settings()}
        saved = self._saved.fingerprint
        if self._saved.other_ranks is not None:
            saved = {**saved, "trainer": as_carried_over(saved["trainer"], found["trainer"])}
        return "; ".join(
            str(one) for name in ("module", "trainer") for one in differences(saved[name], found[name], name)
        )

    def put_back_splits(self) -> None:
        """Restore the splits that the script drew before the first start. `why_other_data` says if that fails."""
        saved = self._saved.state.get(OBJECTS) or {}
        self.notes, lost = self._run_state.objects.splits.put_back(saved.get(SPLITS, ()))
        self._comparison.take_drawn(lost)

    def why_other_data(self, dealing: Dealing | None) -> str:
        """Return why these are not the data of the evaluation that saved, or why they can't be dealt to these ranks.

        Args:
            dealing: Deals the samples of ``predict``.

        Returns:
            An empty string if the evaluation can continue. The loaders must be set up.
        """
        reason = "; ".join(self._comparison.not_exact)
        return reason or (dealing.why_not_dealt(self._saved.dealt) if self._saved.dealt and dealing is not None else "")

    def continue_loaders(self, dealing: Dealing | None) -> None:
        """Let the loaders continue; deal what is left of the samples to these ranks if another number began."""
        set_process_settings(self._saved.state[SETTINGS])  # workers inherit them
        self._loaders.resume_from(self._saved.state["loaders"])
        if not self._saved.dealt or dealing is None:
            return
        dealing.deal(self._saved.dealt, self._patches)
        if self._saved.other_ranks is not None:
            dealing.begin_again(self._saved.other_ranks.seeds)

    def compare_loader(self, place: str, now: Mapping[str, object]) -> None:
        """Compare a loader with that of the evaluation that saved."""
        saved = self._saved.fingerprint["loaders"].get(place)
        if saved is not None and self._saved.other_ranks is not None:
            saved = {**saved, "sampler": now.get("sampler")}  # `deal` compares the orders
        if saved is not None:
            self._comparison.compare_loader(
                place,
                saved,
                now,
                tracker=self._loaders.trackers.get(place),
                is_resized=self._saved.other_ranks is not None,
            )

    def restore(self) -> None:
        """Restore the state in place of the hooks at the start of the loop."""
        loop, run = loop_of(self._trainer), self.run
        runs.store_once(loop, self._patches, fetched_before=run["fetched"], loader=run["loader"])
        validation = self._run_state.validation
        validation.first_loop_iter = run["first_loop_iter"]
        self._load()
        if function_of(self._trainer) == "validate":
            swap_for_validation(self._trainer)
        begin_evaluation_bar(self._trainer)
        validation.lost_before = self._run_state.not_carried()
        self._settle()

    def restore_finished(self) -> object:
        """Restore the end of a finished evaluation. Return what it returned. The loaders must be set up."""
        loop = loop_of(self._trainer)
        if runs.is_predicting(loop):
            runs.make_room_for_predictions(loop)
        results = self._saved.state[RETURNED]
        self._load()
        loop.batch_progress.load_state_dict(dict(self._saved.state[PROGRESS]))
        self._settle()
        if runs.is_predicting(loop):
            return loop.predictions if loop.return_predictions else None
        runs.print_results(loop, results)
        return results

    def _load(self) -> None:
        state = self._trust.unpickled(self._saved.state, self._saved.path)
        self._not_exact = self._run_state.load_state_dict(state)
        if self._saved.other_ranks is None:
            found = self.proving.differences(self._run_state, state, self.position)
            self._not_exact += map(str, found)
        if PREDICTIONS in state:
            self._predictions.load(state[PREDICTIONS])

    def _settle(self) -> None:
        self._loaders.resumed()
        position, others = self.position, self._saved.other_ranks
        reasons = [*self._not_exact, *(() if others is None else others.not_exact)]
        self._reasons, objects = of_all(self._saved.ranks, reasons, self._run_state.objects_not_restored)
        self._report = ResumeReport(
            path=self._saved.path,
            position=str(position),
            where=position.where,
            epoch=position.epoch,
            batch=position.batch,
            global_step=position.global_step,
            num_validated=position.validation_batch,
            restored=tuple(TITLES[name] for name in TITLES if name in self._saved.state),
            objects=objects,
            inherited=tuple(self._saved.part.get(NOT_EXACT, ())),
            notes=(*self.notes, *self._run_state.objects.notes),
            seconds=time.monotonic() - self._saved.began,
        )
        changed = list(map(str, differences(self._saved.part["surroundings"], self._surroundings)))
        is_exact = not (self._reasons or objects or self._loaders.exactness.reasons)
        self.proving.begin_to_repeat(self._saved.ranks, position, is_exact=is_exact, changed=changed)
        self._saved.forget()
        tell_resumed(self.report or self._report, is_own=True)
