"""A ``predict`` that continues with another number of ranks: the state that each rank gets from those that saved.

After a stop no sample is predicted twice, after a kill only those since the last autosave. What could make predictions
depend on the rank, or on the batch, that a sample was in is a reason to run the whole ``predict`` again instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from lightning_faulttolerant.checkpoint.schema import CheckpointPart
from lightning_faulttolerant.state.merge import merged_metrics
from lightning_faulttolerant.trainer.evaluation.dealing import states_after
from lightning_faulttolerant.trainer.evaluation.evaluation_state import DEALT, changes_tensors
from lightning_faulttolerant.trainer.evaluation.saving import PREDICTIONS
from lightning_faulttolerant.trainer.process import OBJECTS
from lightning_faulttolerant.trainer.ranks.elastic import (
    LOST_GENERATORS,
    generators_of_rank,
    other_draws,
    ranks_in_words,
)
from lightning_faulttolerant.trainer.ranks.gather import FINGERPRINT, changed_objects, kept_apart, state_of
from lightning_faulttolerant.trainer.save.run_state import VALIDATION_RUN

State = Mapping[str, Any]


class OtherRanks:
    """The state of one rank of a ``predict`` that another number of ranks has saved.

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
        if isinstance(self._trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
            yield "its weights are in shards, and other ranks have other shards"
        if any(DEALT not in state for state in states):
            yield "it was saved by an older version of the package"
        yield from (state[DEALT]["reason"] for state in states if state[DEALT]["reason"])
        lengths = [[one["length"] for one in state[DEALT]["loaders"]] for state in states]
        datasets = [_datasets(state.get(FINGERPRINT, part["fingerprint"]["loaders"])) for state in states]
        if any(of != lengths[0] for of in lengths) or any(of != datasets[0] for of in datasets):
            yield "its ranks had different data"
        if any(changes_tensors(state) for state in states):
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
        return merged_metrics(metrics, module, rank=rank, num_ranks=self._trainer.world_size)

    def _redistribute(self, rank: int, *, is_per_sample: bool) -> None:
        states, first, num_ranks = self._states, self._states[0], self._trainer.world_size
        taken_over = states[rank::num_ranks]
        dealt = states_after([state[DEALT]["loaders"] for state in states])
        places = first["loaders"]["places"]
        self.seeds = [places.get(f"predict/{number}", {}).get("per_sample") for number in range(len(dealt))]
        self.state = {
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
            self.state[VALIDATION_RUN] = {**first[VALIDATION_RUN], **start}
        self._tell(is_per_sample=is_per_sample)

    def _tell(self, *, is_per_sample: bool) -> None:
        ranks = f"{ranks_in_words(len(self._states))} when it was saved, {ranks_in_words(self._trainer.world_size)} now"
        if VALIDATION_RUN in self._states[0]:
            difference = "batches consist of other samples, so the last bits of a prediction may differ"
        else:
            difference = "each rank also returns predictions of other ranks"
        self.not_exact.append(f"{ranks}: {difference}")
        self.not_exact.append(other_draws("predict") if is_per_sample else LOST_GENERATORS)
        changed = sorted(changed_objects(self._states[0].get(OBJECTS)))
        if changed:
            self.not_exact.append(f"all ranks have the values of rank 0 in {', '.join(changed)}")


def _datasets(fingerprints: State) -> dict[str, Any]:
    return {place: of.get("dataset") for place, of in fingerprints.items()}


def _joined_predictions(states: Sequence[State]) -> dict[str, Any]:
    """Return the names of the files of several ranks, one rank after the other, and how many predictions they hold."""
    nums = [state["num"] for state in states if state["num"]]
    return {
        "files": [name for state in states for name in state["files"]],
        "num": [sum(of) for of in zip(*nums, strict=True)],
    }
