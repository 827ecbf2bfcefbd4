"""The order in which DDP sums gradients: from three ranks on, the last bits of a sum depend on it.

DDP sums the gradients of many parameters together, in buckets, and each rank begins the sum of another part of a
bucket. So the order of summation of a gradient depends on its place. DDP lays its buckets out in the order in which
parameters were created. After its first backward, it lays them out again, in the order in which gradients come. A
process that continues would have the first layout again for its first batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, final

from lightning.pytorch import Trainer
from torch.nn.parallel import DistributedDataParallel

from lightning_faulttolerant.trainer.adapters import compat

BUCKETS: Final = "buckets"
_LAST_BITS = "the arithmetic may differ in the last bits"
_MIN_RANKS = 3  # a + b equals b + a


@final
class Buckets:
    """The layout of DDP's buckets in one fit.

    Args:
        trainer: The trainer of the fit; its strategy is set up.
    """

    def __init__(self, trainer: Trainer) -> None:
        model: object = trainer.strategy.model
        is_ddp = isinstance(model, DistributedDataParallel)
        self._hooks = compat.hooks_with_state(model) if is_ddp else []
        self._ddp: object = model if is_ddp and trainer.world_size >= _MIN_RANKS else None
        self._order: list[int] | None = None
        self._is_laid_out = False

    def state_dict(self) -> dict[str, object]:
        """Return the current order."""
        if self._ddp is None:
            return {}
        if self._is_laid_out:  # DDP would report it relative to that order
            return {"order": self._order}
        order = compat.reduction_order(self._ddp)
        is_lost = order is None and compat.is_after_its_first_backward(self._ddp)
        return {"order": order, "is_lost": True} if is_lost else {"order": order}

    def why_not_exact(self) -> list[str]:
        """Return what DDP keeps from batch to batch and no checkpoint holds."""
        reason = (
            "keeps a state from batch to batch, such as PowerSGD's errors. No checkpoint holds it, so it begins again"
        )
        return [f"DDP's communication hook {name} {reason}" for name in self._hooks]

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Lay the buckets out in the saved order; a collective that gets rank 0's state.

        Returns:
            Why the sums of some batches may differ in their last bits, if they may.
        """
        order = state.get("order")
        if self._ddp is None:
            return []
        if state.get("is_lost"):
            return [f"{_LAST_BITS}: with static_graph=True, DDP reports the order of gradients only after two batches"]
        reason = None if order is None else compat.why_not_reordered(self._ddp, order)
        if reason is not None:
            return [f"{_LAST_BITS}: DDP's buckets can't be restored: {reason}"]
        if order is not None:
            compat.set_reduction_order(self._ddp, order)
            self._order, self._is_laid_out = list(order), True
        return []
