"""Torch's distributed sampler with a position that can be saved and resumed, even by a different number of ranks.

A position in an order of samples: the base of the samplers that yield one index after another.

A sampler for a rank's own data set, with a position that can be saved and resumed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sized
from typing import Any, Literal

from torch.utils.data import DistributedSampler, Sampler

from lightning_faulttolerant.errors import FingerprintMismatchError
from lightning_faulttolerant.samplers.order import (
    OrderName,
    SampleOrder,
    indices_of,
    order_of,
)
from lightning_faulttolerant.samplers.progress import (
    Interruptible,
    LenMode,
    SamplerPosition,
    check_not_too_far,
    check_same,
    read_position,
)


class InterruptibleSamples(Interruptible):
    """An interruptible sampler of samples.

    Args:
        dataset: The data set, or its length.
        more: Arguments of `Interruptible`.
    """

    def __init__(self, dataset: Sized | int, **more: Any) -> None:
        self._order: tuple[tuple[object, ...], SampleOrder] | None = None
        super().__init__(dataset, unit="samples", **more)

    def _length(self) -> int:
        return len(self.dataset)

    def order(self, epoch: int | None = None) -> SampleOrder:
        """Return the order of an epoch, for all ranks together; by default of the current epoch."""
        epoch = self.epoch if epoch is None else epoch
        key = (self._length(), self.seed, epoch, self.shuffle, self.order_name)
        if self._order is None or self._order[0] != key:
            self._order = None  # one permutation at a time
            length, seed, shuffle = self._length(), self.seed, self.shuffle
            self._order = key, order_of(self.order_name, length=length, seed=seed, epoch=epoch, shuffle=shuffle)
        return self._order[1]

    def _iterate(self, skip: int) -> Iterator[int]:
        return indices_of(self.order(), self.deal(), skip=skip, at_end=self._note_end)

    def load_state_dict(self, state_dict: Mapping[str, object], *, strict: bool = True) -> None:
        """Continue from a state of `state_dict`, of this package or of the original library.

        Args:
            state_dict: A state of this kind of sampler, or the original's ``{"progress", "epoch"}``. The latter's count
                is assumed to be of the current number of ranks.
            strict: Whether other data, seed, shuffle, order, or drop_last are an error. Otherwise they are logged, and
                only the position is kept.

        Raises:
            FingerprintMismatchError: If one of these differs, and `strict`. Both values are shown.
            AdvancedTooFarError: If the position is after the epoch's end.
            ValueError: If it is not a state of this kind of sampler.
        """
        position = read_position(state_dict, kind=self.kind)
        if position.is_original:
            consumed = position.consumed * self.place().num_replicas
            check_not_too_far(position.consumed, self.deal(0).num_own, "samples of each rank")
        else:
            check_same(state_dict, self._order_arguments(), strict=strict)
            consumed = position.consumed
            check_not_too_far(consumed, -(-self._length() // position.num_replicas) * position.num_replicas, "samples")
        self._check_loadable(position)
        self._go_to(position.epoch, consumed)

    def _check_loadable(self, position: SamplerPosition) -> None:
        """Raise or warn about any other obstacle to continuing from there."""


class InterruptibleSampler(InterruptibleSamples, Sampler[int]):
    """Yield all samples of a data set, in an order that can be continued from any position.

    It deals nothing to ranks. Use it with one rank, or with a data set that holds only this rank's samples, as
    `DistributedShardedDataset` does. In your own loop, call `advance` with the number of samples consumed; with
    ``FaultTolerance``, don't call it. With several ranks, Lightning would wrap it in a distributed sampler: create the
    Trainer with ``use_distributed_sampler=False``.

    Args:
        dataset: The data set, of which only the length is read, or that length itself.
        num_replicas: No effect, as in the original library; a warning says so.
        rank: No effect, as in the original library; a warning says so.
        shuffle: Whether each epoch has its own random order.
        seed: The seed of the orders.
        drop_last: No effect, as in the original library; a warning says so. Nothing is dealt, so nothing is left over.
        order: ``"torch"``: a permutation of torch's, 8 bytes a sample. ``"feistel"``: computed on demand, in constant
            memory and with a constant time to seek.
        len_mode: The value of ``len`` after a resume. ``"full"``: the length of the whole epoch; or ``"remaining"``.

    Raises:
        ValueError: If an argument has an invalid value.

    Example:
        >>> sampler = InterruptibleSampler(range(5), shuffle=False)
        >>> sampler.advance(2)
        >>> again = InterruptibleSampler(range(5), shuffle=False)
        >>> again.load_state_dict(sampler.state_dict())
        >>> list(again)
        [2, 3, 4]
    """

    kind = "single"

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
        len_mode: LenMode = "full",
    ) -> None:
        given = {"num_replicas": num_replicas is not None, "rank": rank is not None, "drop_last": drop_last}
        without_effect = [name for name, is_given in given.items() if is_given]
        if without_effect:
            warnings.warn(
                f"InterruptibleSampler yields all samples of its data set: {', '.join(without_effect)} has no effect. "
                "To deal one data set to several ranks, use InterruptibleDistributedSampler.",
                stacklevel=2,
            )
        InterruptibleSamples.__init__(
            self,
            dataset,
            shuffle=shuffle,
            seed=seed,
            order=order,
            num_replicas=1,
            rank=0,
            drop_last=False,
            len_mode=len_mode,
        )


# torch has attributes where these samplers have properties: the ranks are read when they are needed.
class InterruptibleDistributedSampler(InterruptibleSamples, DistributedSampler[int]):  # type: ignore[misc,override]
    """Deal the samples of a data set to ranks, in an order that can be continued from any position.

    The order is a pure function of (seed, epoch, position), and all ranks consume it from its beginning. Rank r takes
    every ``num_replicas``-th index, starting at r. A state is therefore one global count. If a different number of
    ranks or another batch size resumes it, the rest is dealt again. No sample is lost. None repeats except for
    the padding at the end of the epoch: at most ``num_replicas - 1`` samples from the beginning of the
    order, as in torch.

    It is a ``DistributedSampler``, so Lightning keeps it in place and calls its ``set_epoch``. ``FaultTolerance`` keeps
    its position, and `advance` is not called. In your own loop, call `advance` with the number of samples consumed. All
    ranks are assumed to have consumed as much as this one. A loader with ``drop_last=True`` leaves over samples that
    are never consumed: end its epochs with `in_epoch`. From a state after its last full batch, a resumed epoch
    has no batches, and the next epoch follows.

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
        on_world_size_change: The treatment of a state of a different number of ranks. ``"reshard"`` deals the rest
            again; ``"error"`` raises a ``FingerprintMismatchError``.
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
            raise ValueError(f"on_world_size_change={on_world_size_change!r}: it must be 'reshard' or 'error'.")
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
                f"The state was saved by {position.num_replicas} ranks, but this run has {self.num_replicas}. The "
                f"rest of the epoch would be dealt to other ranks. Start with {position.num_replicas} ranks, or allow "
                'it with on_world_size_change="reshard".'
            )


def _warn_of_one_order(epoch: int) -> None:
    warnings.warn(
        f"A state of cycling_utils in the middle of epoch {epoch} doesn't name its order: versions since February "
        "2025 give every epoch the order of epoch 0. If it comes from one of those, the rest of this epoch repeats "
        "some samples and leaves others out. The next epochs are complete.",
        stacklevel=4,
    )
