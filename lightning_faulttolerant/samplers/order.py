"""The order of the samples of an epoch, for all ranks together: a pure function of (seed, epoch, position)."""

from __future__ import annotations

import operator
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from lightning_faulttolerant.samplers.feistel import FeistelPermutation

OrderName = Literal["torch", "feistel"]
ORDERS = ("torch", "feistel")
_LEAST_SEED, _MOST_SEED = -(2**63), 2**64 - 1  # the range of torch's seeds; torch takes a negative one modulo 2**64


class SampleOrder(Protocol):
    """The order of one epoch: the sample at each position."""

    length: int
    """The number of samples."""

    def at(self, positions: Tensor) -> Tensor:
        """Return the indices of the samples at `positions`, both int64, the positions in ``range(length)``."""


class SequentialOrder:
    """The samples in the order of the data set.

    Args:
        length: The number of samples.
    """

    def __init__(self, length: int) -> None:
        self.length = length

    def at(self, positions: Tensor) -> Tensor:
        """Return the positions themselves."""
        return positions


class TorchOrder:
    """The order of ``torch.utils.data.DistributedSampler``: a permutation that is drawn whole, 8 bytes a sample.

    It is drawn when it is first needed, and is not pickled with the object.

    Args:
        length: The number of samples.
        seed: The seed of the permutation: torch's sampler takes its seed plus the epoch.
    """

    def __init__(self, length: int, *, seed: int) -> None:
        self.length = length
        self._seed = seed
        self._permutation: Tensor | None = None

    def at(self, positions: Tensor) -> Tensor:
        """Return the indices at `positions`."""
        if self._permutation is None:
            self._permutation = torch.randperm(self.length, generator=seeded(self._seed), device="cpu")
        return self._permutation[positions]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_permutation": None}


def order_of(name: str, *, length: int, seed: int, epoch: int, shuffle: bool) -> SampleOrder:
    """Return the order of an epoch.

    Args:
        name: The kind of shuffle: ``"torch"`` or ``"feistel"``.
        length: The number of samples.
        seed: The seed of all epochs.
        epoch: The epoch, from 0.
        shuffle: Whether it is shuffled at all.
    """
    if not shuffle:
        return SequentialOrder(length)
    if name == "feistel":
        return FeistelPermutation(length, seed=seed, epoch=epoch)
    return TorchOrder(length, seed=seed + epoch)


def check_order(name: str) -> None:
    """Raise a ``ValueError`` unless `name` names an order."""
    if name not in ORDERS:
        raise ValueError(f"order={name!r}: there are {', '.join(map(repr, ORDERS))}.")


def seeded(seed: int) -> torch.Generator:
    """Return a torch generator that starts from a seed. A seed plus epoch may exceed the range that torch accepts."""
    return torch.Generator().manual_seed(seed & _MOST_SEED)


def checked_seed(seed: int, *, order: str) -> int:
    """Return `seed` as Python's integer.

    Args:
        seed: The seed of an order.
        order: The name of that order.

    Raises:
        ValueError: If it is not an integer, or if torch draws the order and its generators don't accept the seed.
    """
    try:
        number = operator.index(seed)
    except TypeError as error:
        raise ValueError(f"seed={seed!r}: it must be a whole number.") from error
    if order == "torch" and not _LEAST_SEED <= number <= _MOST_SEED:
        raise ValueError(
            f"seed={seed!r}: torch's generators take seeds from -2**63 to 2**64 - 1. Take one of these; order='feistel'"
            " takes any whole number."
        )
    return number
