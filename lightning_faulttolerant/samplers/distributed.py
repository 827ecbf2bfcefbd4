"""Torch's distributed sampler, with a position that can be saved and resumed, also by another number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Literal

from torch.utils.data import DistributedSampler

from lightning_faulttolerant.errors import FingerprintMismatchError
from lightning_faulttolerant.samplers.order import OrderName
from lightning_faulttolerant.samplers.progress import LenMode
from lightning_faulttolerant.samplers.samples import InterruptibleSamples
from lightning_faulttolerant.samplers.state import Position


class InterruptibleDistributedSampler(InterruptibleSamples, DistributedSampler[int]):  # type: ignore[misc]  # dataset: Sized
    """Deal the samples of a data set to ranks, in an order that can be continued with from any position.

    The order is a pure function of (seed, epoch, position), and all ranks consume it from its beginning: rank r takes
    every ``num_replicas``-th index from r on. So a state is one global count. Resumed with another number of ranks (or
    another batch size), the rest is dealt again: no sample is lost, and none repeated but for the padding at the end of
    the epoch, at most ``num_replicas - 1`` samples, taken from the beginning of the order as torch does.

    It is a ``DistributedSampler``: Lightning leaves it in its place and calls its ``set_epoch``. Under
    ``FaultTolerance`` the position is kept for it, and `advance` is not called. In a loop of one's own, call `advance`
    for what was consumed; all ranks are taken to have consumed as much as this one. A loader with ``drop_last=True``
    leaves samples over that are never consumed: end its epochs by `in_epoch`. A state from after its last full batch
    continues with no batch, and then with the next epoch.

    Args:
        dataset: The data set, of which only the length is asked for, or that length itself.
        num_replicas: How many ranks there are; by default as the process group says, else the environment
            (``WORLD_SIZE``), asked when an epoch begins.
        rank: Which one this is, from 0; by default found in the same way.
        shuffle: Whether each epoch comes in a random order of its own.
        seed: Of the orders; the same on all ranks.
        drop_last: Whether the last samples, too few to give each rank one, are left out rather than filled up.
        order: ``"torch"``: that of torch's ``DistributedSampler``, exactly, which takes 8 bytes a sample and the time
            to draw them all; ``"feistel"``: computed where it is needed, in constant memory and with a constant time to
            seek, for 10**12 samples as for 10**3.
        on_world_size_change: What to do with a state of another number of ranks: ``"reshard"``: deal the rest again;
            ``"error"``: a ``FingerprintMismatchError``.
        len_mode: What ``len`` is after a resume: ``"full"``: that of the whole epoch, on which Lightning counts;
            ``"remaining"``.

    Raises:
        ValueError: If an argument has no such value, or `rank` is not below `num_replicas`.

    Example:
        >>> sampler = InterruptibleDistributedSampler(range(10), num_replicas=2, rank=0, shuffle=False)
        >>> list(sampler)
        [0, 2, 4, 6, 8]
        >>> sampler.advance(3)
        >>> alone = InterruptibleDistributedSampler(range(10), num_replicas=1, rank=0, shuffle=False)
        >>> alone.load_state_dict(sampler.state_dict())
        >>> list(alone)
        [6, 7, 8, 9]
    """

    kind = "distributed"

    def __init__(
        self,
        dataset: Sized | int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        order: OrderName = "torch",
        on_world_size_change: Literal["reshard", "error"] = "reshard",
        len_mode: LenMode = "full",
    ) -> None:
        if on_world_size_change not in ("reshard", "error"):
            raise ValueError(f"on_world_size_change={on_world_size_change!r}: there are 'reshard' and 'error'.")
        self.on_world_size_change = on_world_size_change
        # Not torch's constructor: it asks for the ranks at once, and here they are asked for when they are needed.
        InterruptibleSamples.__init__(
            self,
            dataset,
            shuffle=shuffle,
            seed=seed,
            order=order,
            num_replicas=num_replicas,
            rank=rank,
            drop_last=drop_last,
            len_mode=len_mode,
        )

    @property
    def num_replicas(self) -> int:  # type: ignore[override]  # torch's is an attribute, filled by its constructor
        """How many ranks there are."""
        return self.place().num_replicas

    @property
    def rank(self) -> int:  # type: ignore[override]
        """Which one this is."""
        return self.place().rank

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """How many samples of a whole epoch come to each rank."""
        return self.deal(0).num_own

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """How many samples of a whole epoch come to all ranks, padding included."""
        return self.num_samples * self.num_replicas

    def _check_loadable(self, position: Position) -> None:
        if position.is_original:
            if self.shuffle and position.epoch and 0 < position.consumed < self.num_samples:
                _warn_of_one_order(position.epoch)
        elif self.on_world_size_change == "error" and position.num_replicas != self.num_replicas:
            raise FingerprintMismatchError(
                f"The state was saved by {position.num_replicas} ranks, this run has {self.num_replicas}. The rest of"
                f" the epoch would be dealt to others. Start with {position.num_replicas} ranks, or allow it by"
                ' on_world_size_change="reshard".'
            )


def _warn_of_one_order(epoch: int) -> None:
    warnings.warn(
        f"A state of cycling_utils in the middle of epoch {epoch} doesn't say in which order it was made: its versions"
        " from February 2025 on give every epoch the order of epoch 0. If it is of one of those, the rest of this epoch"
        " repeats samples and leaves others out. The next epochs are whole.",
        stacklevel=4,
    )
