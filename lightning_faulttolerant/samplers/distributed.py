"""Torch's distributed sampler with a position that can be saved and resumed, even by another number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Sized
from typing import Literal

from torch.utils.data import DistributedSampler

from lightning_faulttolerant.errors import FingerprintMismatchError
from lightning_faulttolerant.samplers.order import OrderName
from lightning_faulttolerant.samplers.progress import LenMode
from lightning_faulttolerant.samplers.samples import InterruptibleSamples
from lightning_faulttolerant.samplers.state import SamplerPosition


class InterruptibleDistributedSampler(InterruptibleSamples, DistributedSampler[int]):  # type: ignore[misc]  # dataset: Sized
    """Deal the samples of a data set to ranks, in an order that can be continued from any position.

    The order is a pure function of (seed, epoch, position), and all ranks consume it from its beginning. Rank r takes
    every ``num_replicas``-th index, starting at r. A state is therefore one global count. If another number of ranks or
    another batch size resumes it, the rest is dealt again. No sample is lost. None repeats except for the padding at
    the end of the epoch: at most ``num_replicas - 1`` samples from the beginning of the order, as in torch.

    It is a ``DistributedSampler``, so Lightning keeps it in place and calls its ``set_epoch``. ``FaultTolerance`` keeps
    its position, and `advance` is not called. In your own loop, call `advance` with the number of samples consumed. All
    ranks are assumed to have consumed as much as this one. A loader with ``drop_last=True`` leaves over samples that
    are never consumed: end its epochs with `in_epoch`. A state saved after its last full batch continues without a
    batch, and then with the next epoch.

    Args:
        dataset: The data set, of which only the length is read, or that length itself.
        num_replicas: The number of ranks; by default read from the process group, else from the environment
            (``WORLD_SIZE``), when an epoch begins.
        rank: The rank of this process, from 0; by default found in the same way.
        shuffle: Whether each epoch has its own random order.
        seed: The seed of the orders; the same on all ranks.
        drop_last: Whether the last samples, too few to give each rank one, are left out and not filled up.
        order: ``"torch"``: exactly the order of torch's ``DistributedSampler``, which takes 8 bytes a sample and the
            time to draw them all. ``"feistel"``: computed on demand, in constant memory and with a constant time to
            seek, for 10**12 samples as for 10**3.
        on_world_size_change: The treatment of a state of another number of ranks. ``"reshard"`` deals the rest again;
            ``"error"`` raises a ``FingerprintMismatchError``.
        len_mode: The value of ``len`` after a resume. ``"full"`` is the length of the whole epoch, which Lightning
            expects. The other value is ``"remaining"``.

    Raises:
        ValueError: If an argument has an invalid value, or `rank` is not below `num_replicas`.

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
        # Not torch's constructor: it reads the ranks immediately, and here they are read when they are needed.
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
        """The number of ranks."""
        return self.place().num_replicas

    @property
    def rank(self) -> int:  # type: ignore[override]
        """The rank of this process."""
        return self.place().rank

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """The number of samples of a whole epoch for each rank."""
        return self.deal(0).num_own

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """The number of samples of a whole epoch for all ranks, including the padding."""
        return self.num_samples * self.num_replicas

    def _check_loadable(self, position: SamplerPosition) -> None:
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
