"""Samplers as the tests create them."""

from __future__ import annotations

from typing import Any

from lightning_faulttolerant import InterruptibleDistributedSampler


def sampler_of(length: int = 10, *, ranks: int = 1, rank: int = 0, **arguments: Any) -> InterruptibleDistributedSampler:
    """Return a sampler of one rank."""
    return InterruptibleDistributedSampler(range(length), ranks, rank, **arguments)
