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

__all__ = [
    "BATCHING_METHODS",
    "EpochOrder",
    "RemainingPositions",
    "Shares",
    "Weight",
    "batched_deal",
    "batched_order",
    "epoch_order",
    "normalised",
    "positions_of_step",
    "shares_of_streams",
]
