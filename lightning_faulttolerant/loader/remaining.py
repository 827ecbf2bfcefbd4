"""The rest of an epoch, for a different number of ranks than the one that began it.

The order of an epoch is one permutation of the data set, of which each rank takes every n-th index. The samples that
all ranks together have consumed are therefore its beginning, for any number of ranks. The rest is split the same way.

Without padding, the ranks may have different numbers of batches. Of several loaders that come one after the other, one
rank may already be in the next one. What is left is then not one contiguous end of the order, but a list of samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from lightning_faulttolerant.loader.samplers import is_interruptible, order_follows_from_start
from lightning_faulttolerant.samplers.order import (
    EpochPart,
    FeistelPermutation,
    SampleOrder,
    SequentialOrder,
    TorchOrder,
    indices_of,
)

_CHUNK = 16_384


@dataclass(frozen=True, kw_only=True, slots=True)
class GlobalOrder:
    """The order in which all ranks together consume the samples of one epoch.

    Args:
        length: The number of samples in the data set.
        shuffles: Whether the samples are permuted.
        seed: The seed of the permutation.
        generator: The state of the generator that draws the permutation, unless `seed` seeds it.
        epoch: The epoch, if the permutation is computed from it and the seed instead of drawn.
    """

    length: int
    shuffles: bool
    seed: int = 0
    generator: bytes = b""
    epoch: int | None = None

    def samples(self) -> SampleOrder:
        """Return the sample at each position."""
        if not self.shuffles:
            return SequentialOrder(self.length)
        if self.epoch is not None:
            return FeistelPermutation(self.length, seed=self.seed, epoch=self.epoch)
        return TorchOrder(self.length, seed=self.seed, generator=self.generator)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """How the samples of an order are distributed to one rank, in batches.

    Args:
        rank: The rank.
        num_ranks: The number of ranks.
        batch_size: The number of samples in a batch; ``None`` if indices come one by one.
        drop_last: Whether a last batch that is not full is left out.
        cuts: Whether leftover samples, too few to give each rank one more, are left out. Otherwise they are filled up
            from the beginning of the order.
    """

    rank: int
    num_ranks: int
    batch_size: int | None
    drop_last: bool = False
    cuts: bool = False

    @property
    def samples_at_once(self) -> int:
        """The number of samples that all ranks consume with one batch each."""
        return (self.batch_size or 1) * self.num_ranks

    def num_batches(self, num_samples: int) -> int:
        """Return the number of batches per rank for `num_samples` in all."""
        own = num_samples // self.num_ranks if self.cuts else -(-num_samples // self.num_ranks)
        size = self.batch_size or 1
        return own // size if self.drop_last else -(-own // size)


@dataclass(frozen=True, kw_only=True, slots=True)
class RemainingBatches:
    """One rank's part of an epoch whose first samples are already consumed.

    Args:
        order: The order of the epoch.
        begin: The number of samples already consumed.
        end: The end of the epoch: all of its samples, or fewer if batches are limited.
        share: The share of this rank.
    """

    order: GlobalOrder
    begin: int
    end: int
    share: RankShare

    @property
    def num_batches(self) -> int:
        """The number of batches for each rank."""
        return self.share.num_batches(self.end - self.begin)

    @property
    def first_batch(self) -> int:
        """The index that the first of these batches would have if these ranks had run the whole epoch."""
        return self.share.num_batches(self.order.length) - self.num_batches

    def consumed_before(self, batch: int) -> int:
        """Return the number of samples that all ranks have consumed before batch `batch` of the epoch."""
        return min(self.end, self.begin + (batch - self.first_batch) * self.share.samples_at_once)

    def batches(self, *, skip: int = 0) -> Iterator[object]:
        """Yield the index batches after the first `skip`."""
        share, size = self.share, self.share.batch_size or 1
        part = EpochPart(
            length=self.end, begin=self.begin, rank=share.rank, num_replicas=share.num_ranks, drop_last=share.cuts
        )
        own = indices_of(self.order.samples(), part, skip=skip * size)
        if share.batch_size is None:
            yield from own
            return
        while batch := list(islice(own, size)):
            if len(batch) == size or not share.drop_last:
                yield batch

    def state_dict(self) -> dict[str, object]:
        """Return the deal as plain dicts."""
        return asdict(self)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> RemainingBatches:
        """Return the deal that `state` describes."""
        order, share = GlobalOrder(**state["order"]), RankShare(**state["share"])
        return cls(order=order, begin=state["begin"], end=state["end"], share=share)


def share_of(sampler: object, *, rank: int, num_ranks: int) -> RankShare | None:
    """Return the share of `sampler`, one of torch's or of this package's, for its rank; ``None`` if it is unknown."""
    batched = sampler if type(sampler) is BatchSampler else None
    inner: Any = sampler if batched is None else batched.sampler
    # One of this package's must have its epoch from the beginning.
    kind = inner.kind if is_interruptible(inner) and not inner.deal().begin else None
    is_dealt = type(inner) is DistributedSampler or kind == "distributed"
    is_torchs_pass = type(inner) in (RandomSampler, SequentialSampler) and order_follows_from_start(inner)
    if is_dealt:
        if (inner.rank, inner.num_replicas) != (rank, num_ranks):
            return None
    elif num_ranks > 1 or not (kind == "single" or is_torchs_pass):
        return None
    return RankShare(
        rank=rank,
        num_ranks=num_ranks,
        batch_size=None if batched is None else batched.batch_size,
        drop_last=batched is not None and batched.drop_last,
        cuts=is_dealt and inner.drop_last,
    )


def order_of(sampler: object, *, epoch: int | None, generator: bytes, is_own_generator: bool) -> GlobalOrder:
    """Return the order of an epoch that `sampler` began. `share_of` must return a share for the sampler.

    Args:
        sampler: The sampler.
        epoch: The epoch that it was set to, if it has one.
        generator: The state of torch's generator, or of the sampler's own, right before it drew.
        is_own_generator: Whether the generator is the sampler's own.
    """
    inner: Any = sampler.sampler if type(sampler) is BatchSampler else sampler
    if is_interruptible(inner):
        now = inner.epoch if epoch is None else epoch
        length, is_computed = len(inner.dataset), inner.shuffle and inner.order_name == "feistel"
        if is_computed:
            return GlobalOrder(length=length, shuffles=True, seed=inner.seed, epoch=now)
        return GlobalOrder(length=length, shuffles=inner.shuffle, seed=inner.seed + now)
    if type(inner) is DistributedSampler:
        seed = inner.seed + (inner.epoch if epoch is None else epoch)
        return GlobalOrder(
            length=len(inner.dataset),  # type: ignore[arg-type]  # it is sized: the sampler itself calls len
            shuffles=inner.shuffle,
            seed=seed,
        )
    length = len(inner.data_source)
    if type(inner) is SequentialSampler:
        return GlobalOrder(length=length, shuffles=False)
    if is_own_generator:
        return GlobalOrder(length=length, shuffles=True, generator=generator)
    drawn = torch.Generator()
    drawn.set_state(torch.frombuffer(bytearray(generator), dtype=torch.uint8))
    # torch's RandomSampler draws the seed of its own generator this way.
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=drawn).item())
    return GlobalOrder(length=length, shuffles=True, seed=seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """The rest of a loader's samples, of which each rank gets every n-th one.

    Args:
        length: The number of samples in the loader.
        consumed: For each earlier number of ranks, in order: how many of its own samples each rank has consumed.
    """

    length: int
    consumed: tuple[tuple[int, ...], ...] = ()

    def positions(self) -> Tensor:
        """Return the places of these samples in the loader's order, int64, ascending."""
        rest = torch.arange(self.length, dtype=torch.int64, device="cpu")
        for of_ranks in self.consumed:
            is_left = torch.ones(len(rest), dtype=torch.bool, device="cpu")
            for rank, num in enumerate(of_ranks):
                is_left[rank : rank + num * len(of_ranks) : len(of_ranks)] = False
            rest = rest[is_left]
        return rest

    def of_rank(self, rank: int, num_ranks: int) -> Tensor:
        """Return the places of those samples that one of `num_ranks` ranks gets."""
        return self.positions()[rank::num_ranks]

    @property
    def begin(self) -> int | None:
        """How many samples were consumed, if they are the beginning of the order; ``None`` if they are not."""
        rest = self.positions()
        begin = self.length - len(rest)
        return begin if not len(rest) or int(rest[0]) == begin else None


class ListedIndices(Sampler[int]):
    """A sampler that yields the indices it was given.

    Args:
        indices: The indices, int64.
    """

    def __init__(self, indices: Tensor) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, len(self._indices), _CHUNK):
            yield from self._indices[begin : begin + _CHUNK].tolist()

    def __len__(self) -> int:
        return len(self._indices)
