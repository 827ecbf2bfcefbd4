"""The strategies that are served; all others are refused at the start, before anything is written.

A strategy is served if it is one of these classes, or derives from one and saves and loads as that one does.
"""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy

from lightning_faulttolerant.errors import UnsupportedTrainerError
from lightning_faulttolerant.trainer.compat import callbacks
from lightning_faulttolerant.trainer.ranks.deepspeed import why_not_served

# The first that a strategy derives from counts: DeepSpeedStrategy derives from DDPStrategy.
SUPPORTED: tuple[type[Strategy], ...] = (
    SingleDeviceStrategy,
    DeepSpeedStrategy,
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)

_XLA = (
    "On XLA devices, steps run lazily and torch_xla writes the checkpoints. No test has shown that a run continues "
    "exactly there"
)
# These derive from supported strategies. What each does that autosaves can't handle, and what to use instead.
REFUSED: Mapping[type[Strategy], str] = {
    XLAStrategy: _XLA,
    SingleDeviceXLAStrategy: _XLA,
}
_INSTEAD_OF_DEEPSPEED = (
    "Use ZeRO 1 or 2 without offloading, strategy=ModelParallelStrategy(), or "
    'strategy=FSDPStrategy(state_dict_type="sharded"). The last two shard weights, too, as ZeRO 3 does'
)
_ADVICE = (
    "Use a strategy that docs/strategies.md lists, or leave the callback out. PL_FAULT_TOLERANT_TRAINING=0 leaves it "
    "out, too."
)
# Autosaves of one file are written without the strategy, and restored by Lightning's connector.
_OWN_FORMAT = ("save_checkpoint", "load_checkpoint")


def check_strategy(strategy: Strategy) -> None:
    """Raise if a strategy can't be served.

    Raises:
        UnsupportedTrainerError: With the reason, and what to do.
    """
    kind = type(strategy)
    for refused, reason in REFUSED.items():
        if isinstance(strategy, refused):
            raise UnsupportedTrainerError(f"FaultTolerance does not support {kind.__name__}. {reason}. {_ADVICE}")
    base = next((known for known in SUPPORTED if isinstance(strategy, known)), None)
    if base is None:
        raise UnsupportedTrainerError(
            f"FaultTolerance does not know the strategy {kind.__module__}.{kind.__name__}, which derives from none of "
            f"{', '.join(known.__name__ for known in SUPPORTED)}. We can't know how it saves, and what its ranks "
            f"hold. {_ADVICE}"
        )
    why_not = why_not_served(strategy) if isinstance(strategy, DeepSpeedStrategy) else None
    if why_not is not None:
        raise UnsupportedTrainerError(
            f"FaultTolerance does not support this {kind.__name__}. {why_not}. {_INSTEAD_OF_DEEPSPEED}. {_ADVICE}"
        )
    own = [name for name in _OWN_FORMAT if getattr(kind, name) is not getattr(base, name)]
    if own:
        raise UnsupportedTrainerError(
            f"FaultTolerance does not know how {kind.__module__}.{kind.__name__} saves: it derives from "
            f"{base.__name__} and has its own {' and its own '.join(own)}. An autosave would be written without it, "
            f"or in an unknown form. {_ADVICE}"
        )


def can_be_evaluated(trainer: Trainer) -> bool:
    """Return whether an evaluation of this trainer can be resumed. If not, it runs as it is.

    It can't under DeepSpeed or a strategy that is not served, nor if a BatchSizeFinder runs the loop several times at
    its start.
    """
    has_finder = any(isinstance(callback, BatchSizeFinder) for callback in callbacks(trainer))
    if has_finder or isinstance(trainer.strategy, DeepSpeedStrategy):
        return False
    try:
        check_strategy(trainer.strategy)
    except UnsupportedTrainerError:
        return False
    return True
