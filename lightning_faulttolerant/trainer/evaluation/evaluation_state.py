"""The state of ``validate``, ``test``, or ``predict``: that of a fit between two batches, without what only fits have.

An evaluation begins with weights that its script loads, so its autosaves hold them only if they have changed since.

A different number of ranks can continue a ``predict``. Lightning's own sampler gives rank r every n-th sample, each
sample once. The samples that no rank has predicted yet are split the same way among the ranks that continue. Their
batches get numbers that no earlier batch of the loader had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_faulttolerant.loader.remaining import Rest
from lightning_faulttolerant.loader.resized import fresh_moment
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state.tensors import TensorMarks, gradients_state, load_gradients, sums_of_bits
from lightning_faulttolerant.trainer.evaluation import compat as runs
from lightning_faulttolerant.trainer.loaders.loaders import Loaders
from lightning_faulttolerant.trainer.loaders.trackers import user_loader
from lightning_faulttolerant.trainer.patches import Patches
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.compat import saves_shards
from lightning_faulttolerant.trainer.save.run_state import RunState


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
            return f"its loaders had {saved} samples, and now {now}"
        if self._is_per_sample and any(_rest_of(state).begin is None for state in states):
            return "the seeds of its samples can't continue if the ranks were in different loaders"
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


SUMS, DEALT = "sums", "dealt"
_WEIGHTS, _GRADIENTS = "weights", "gradients"
_OF_FITS = ("trainer", _GRADIENTS)


class EvaluationState:
    """Reads and restores the state of an evaluation.

    Args:
        trainer: The trainer that evaluates.
        run_state: Reads the parts that an evaluation has in common with a fit.
        dealing: Knows which samples of a ``predict`` are left; ``None`` in other evaluations.
    """

    def __init__(self, trainer: Trainer, run_state: RunState, dealing: Dealing | None) -> None:
        self._trainer = trainer
        self._run_state = run_state
        self._dealing = dealing
        module = trainer.lightning_module
        self.sums: dict[str, int] = sums_of_bits({**dict(module.named_parameters()), **dict(module.named_buffers())})
        """A sum of the bits of each tensor that the evaluation begins with."""
        self._weights = TensorMarks(self._tensors())
        self._gradients = TensorMarks(self._tensors_of_gradients())

    def _tensors(self) -> list[Tensor]:
        module = self._trainer.lightning_module
        return [*module.parameters(), *module.buffers()]

    def _tensors_of_gradients(self) -> list[Tensor]:
        return [p.grad for p in self._trainer.lightning_module.parameters() if p.grad is not None]

    def can_be_saved(self) -> bool:
        """Return whether weights that the evaluation has changed could be saved, if there are any."""
        if not saves_shards(self._trainer.strategy):
            return True
        return self._weights.unmoved(self._tensors()) and self._gradients.unmoved(self._tensors_of_gradients())

    def state_dict(self, position: TrainerPosition) -> dict[str, object]:
        """Return the state of this rank."""
        module = self._trainer.lightning_module
        found = self._run_state.state_dict(position)
        state = {name: part for name, part in found.items() if name not in _OF_FITS}
        if not self._weights.unmoved(self._tensors()):
            state[_WEIGHTS] = {name: value.detach().clone() for name, value in module.state_dict().items()}
        if not self._gradients.unmoved(self._tensors_of_gradients()):
            state[_GRADIENTS] = gradients_state(module)
        if self._dealing is not None:
            state[DEALT] = self._dealing.state_dict(is_finished=position.is_finished)
        return {**state, SUMS: self.sums}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Restore the state, random generators last. Return a line for each thing that could not be restored."""
        module = self._trainer.lightning_module
        if _WEIGHTS in state:
            module.load_state_dict(dict(state[_WEIGHTS]))
            self._weights = TensorMarks([])
        if _GRADIENTS in state:
            load_gradients(module, state[_GRADIENTS])
            self._gradients = TensorMarks([])
        return self._run_state.load_state_dict(state)


def changes_tensors(state: Mapping[str, object]) -> bool:
    """Return whether the evaluation had changed weights, buffers, or gradients when it was saved."""
    return not {_WEIGHTS, _GRADIENTS}.isdisjoint(state)
