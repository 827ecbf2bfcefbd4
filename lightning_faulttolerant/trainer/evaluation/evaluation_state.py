"""The state of ``validate``, ``test``, or ``predict``: that of a fit between two batches, without what only fits have.

An evaluation begins with weights that its script loads, so its autosaves hold them only if they have changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_faulttolerant.state.tensors import TensorMarks, gradients_state, load_gradients, sums_of_bits
from lightning_faulttolerant.trainer.evaluation.dealing import Dealing
from lightning_faulttolerant.trainer.position import TrainerPosition
from lightning_faulttolerant.trainer.ranks.compat import saves_shards
from lightning_faulttolerant.trainer.save.run_state import RunState

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

    def state_dict(self, position: TrainerPosition) -> dict[str, Any]:
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
