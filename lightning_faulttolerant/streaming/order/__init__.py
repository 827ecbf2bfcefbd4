"""The order of the samples: mixing, shuffling, and dealing, as pure functions of seed, epoch, and position."""

from lightning_faulttolerant.streaming.order.batching import (
    BATCHING_METHODS,
    RemainingPositions,
    batched_deal,
    batched_order,
    normalised,
    positions_of_step,
)
from lightning_faulttolerant.streaming.order.epoch import EpochOrder, Shares, Weight, epoch_order, shares_of_streams
from lightning_faulttolerant.streaming.order.originals import (
    SHUFFLES,
    default_block_size,
    default_canonical_nodes,
    kept_nodes,
)

__all__ = [
    "BATCHING_METHODS",
    "SHUFFLES",
    "EpochOrder",
    "RemainingPositions",
    "Shares",
    "Weight",
    "batched_deal",
    "batched_order",
    "default_block_size",
    "default_canonical_nodes",
    "epoch_order",
    "kept_nodes",
    "normalised",
    "positions_of_step",
    "shares_of_streams",
]
