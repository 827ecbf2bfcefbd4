"""Parameters that several ranks hold alike: a checkpoint has each once, so a difference between them would be lost.

Under tensor parallelism, the gradients of parameters that are not sharded are not averaged over the ranks. These
parameters stay equal only as long as all ranks see the same batches and draw the same random numbers. Under DDP, a rank
may change weights by itself, or average them only now and then (``model_averaging_period``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, final

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

from lightning_faulttolerant.checkpoint.ranks import Ranks
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.state.tensors import shard_of, sums_of_bits
from lightning_faulttolerant.trainer.ranks.sharded import reshard

_log = logging.getLogger(__name__)

_MAX_SHOWN = 5


@final
class Replicas:
    """Compares a module's parameters between the ranks that hold them.

    Args:
        trainer: The trainer of the module.
        ranks: The ranks that compare.
        strict: Whether a difference is an error rather than a warning.
    """

    def __init__(self, trainer: Trainer, ranks: Ranks, *, strict: bool) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._strict = strict
        self._has_warned = False

    def check(self) -> None:
        """Compare; a collective.

        Raises:
            NotExactError: If `strict`, and ranks hold different values of the same parameter.
        """
        reason = self._difference()
        if not reason:
            return
        if self._strict:
            raise NotExactError(f"{reason}; or pass FaultTolerance(strict=False).")
        if not self._has_warned and self._ranks.rank == 0:
            _log.warning("%s.", reason)
        self._has_warned = True

    def why_not_exact(self) -> tuple[str, ...]:
        """Return why a checkpoint that user code requests can't be exact, if weights are the reason; a collective.

        Compare only where nothing is sharded: it may be the middle of a batch.
        """
        if isinstance(self._trainer.strategy, ModelParallelStrategy):
            return ()
        reason = self._difference()
        return (reason,) if reason else ()

    def _difference(self) -> str:
        """Return a sentence about the parameters that differ between ranks, or an empty string; a collective."""
        if self._ranks.num_ranks == 1 or isinstance(self._trainer.strategy, FSDPStrategy):
            return ""  # FSDPStrategy gives each rank its own part
        reshard(self._trainer)
        told = self._ranks.to_first("replicas", _sums(self._trainer.lightning_module))
        differing: list[str] = self._ranks.from_first("replicas differ", None if told is None else _differing(told))
        if not differing:
            return ""
        more = f" and {len(differing) - _MAX_SHOWN} more" if len(differing) > _MAX_SHOWN else ""
        return (
            f"The ranks hold different values of {', '.join(differing[:_MAX_SHOWN])}{more}. A checkpoint holds each"
            f" parameter that is not in shards once, so the run would not continue exactly. {self._advice()}"
        )

    def _advice(self) -> str:
        if isinstance(self._trainer.strategy, ModelParallelStrategy):
            return "Shard these too (fully_shard), or average their gradients in on_after_backward"
        return "Change weights in the same way on all ranks, and average them at each step"


def _sums(module: nn.Module) -> dict[str, int]:
    """Return a sum of the bits of each piece of a parameter that another rank may hold too."""
    places = {name: (_place(parameter), parameter) for name, parameter in module.named_parameters()}
    found = {f"{name} {place}".rstrip(): p for name, (place, p) in places.items() if place is not None}
    return sums_of_bits(found)


def _place(parameter: Any) -> str | None:
    """Return which piece of a parameter this rank has, or ``None`` if no other rank has it too."""
    if shard_of(parameter) is parameter:
        return ""
    placements, coordinate = parameter.placements, parameter.device_mesh.get_coordinate() or ()
    if not any(placement.is_replicate() for placement in placements):
        return None
    pieces = [at for at, placement in zip(coordinate, placements, strict=False) if placement.is_shard()]
    return f"(piece {pieces})" if pieces else ""


def _differing(told: Sequence[dict[str, int]]) -> list[str]:
    seen: dict[str, int] = {}
    differing: dict[str, None] = {}
    for sums in told:
        for name, value in sums.items():
            if seen.setdefault(name, value) != value:
                differing[name] = None
    return list(differing)
