"""The places in a training step at which a flight recorder looks: after each backward pass, and after the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer
from torch import Tensor

from lightning_faulttolerant.trainer.patches import Method, Patches


@dataclass(kw_only=True, slots=True)
class SeenStep:
    """A training step in progress.

    Args:
        batch: What ``training_step`` received first: a batch, or an iterator.
        loss: The loss that it returned. In manual optimization, until it has returned, that of the last backward pass.
        num_backward: How many backward passes have ended.
    """

    batch: Any
    loss: Tensor | None = None
    num_backward: int = 0


class StepSeams:
    """Follows the training steps of a fit.

    Args:
        trainer: The trainer that runs the fit.
        patches: Applies the patches to the trainer.
        after_backward: Called after each backward pass, before any optimizer's step that follows it.
        after_step: Called when ``training_step`` has returned. In automatic optimization, its backward pass is to come.
    """

    def __init__(
        self,
        trainer: Trainer,
        patches: Patches,
        *,
        after_backward: Callable[[SeenStep], None],
        after_step: Callable[[SeenStep], None] = lambda seen: None,
    ) -> None:
        self._trainer = trainer
        self._after_backward = after_backward
        self._after_step = after_step
        self._seen = SeenStep(batch=None)
        patches.around(trainer.strategy, "training_step", self._around_step)
        patches.around(trainer.strategy, "backward", self._around_backward)

    def _around_step(self, original: Method, *args: Any, **kwargs: Any) -> Any:
        seen = self._seen = SeenStep(batch=args[0] if args else None)
        output = original(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if isinstance(loss, Tensor):
            seen.loss = loss.detach()
        self._after_step(seen)
        return output

    def _around_backward(self, original: Method, loss: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(loss, *args, **kwargs)
        seen = self._seen
        seen.num_backward += 1
        if not self._trainer.lightning_module.automatic_optimization and isinstance(loss, Tensor):
            seen.loss = loss.detach()
        self._after_backward(seen)
        return output
