"""The rest of an epoch of torch's and this package's samplers, without a walk over the batches before it.

This package's samplers compute the index at any position. The order of torch's samplers is created as torch creates it,
from the same generators. The unneeded indices are left out before they become Python numbers. With 10 million samples,
that saves most of the time. torch may change how it draws, so the caller must compare the batches with earlier ones.
Samplers with weights or with their own indices are run through: those may have changed, and all batches are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from lightning_faulttolerant.loader.draws import order_follows_from_start
from lightning_faulttolerant.loader.sampler_epochs import is_interruptible


def rest_of(sampler: Any, num_batches: int) -> Iterator[Any] | None:
    """Return the batches of `sampler` after the first `num_batches`, or ``None`` if it can't be skipped.

    The generators must be in the state for its first index. The first ``next`` advances them as `sampler` itself would.
    A sampler without batching counts indices.
    """
    if type(sampler) is not BatchSampler:
        return _rest(sampler, num_batches)
    inner = _rest(sampler.sampler, num_batches * sampler.batch_size)
    if inner is None:
        return None
    return iter(BatchSampler(_Once(inner), sampler.batch_size, sampler.drop_last))


class _Once(Iterable[int]):
    """A sampler that `BatchSampler` accepts."""

    def __init__(self, indices: Iterator[int]) -> None:
        self._indices = indices

    def __iter__(self) -> Iterator[int]:
        return self._indices


def _rest(sampler: Any, num_indices: int) -> Iterator[Any] | None:
    if is_interruptible(sampler):
        rest: Iterator[Any] = sampler.iter_from(num_indices)
        return rest
    skip = _SKIPS.get(type(sampler))
    if skip is None or not order_follows_from_start(sampler) or num_indices > len(sampler):
        return None
    return skip(sampler, num_indices)


def _sequential(sampler: SequentialSampler, num_indices: int) -> Iterator[int]:
    return iter(range(num_indices, len(sampler.data_source)))


def _random(sampler: RandomSampler, num_indices: int) -> Iterator[int]:
    generator = sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    length = len(sampler.data_source)
    yield from torch.randperm(length, generator=generator)[num_indices:].tolist()
    # torch draws once more for the leftover part of a pass, which is empty here. A user's generator advances by it.
    torch.randperm(length, generator=generator)


def _distributed(sampler: DistributedSampler[Any], num_indices: int) -> Iterator[int]:
    # Its order is a list, drawn from its own generator at the start. The list's iterator steps forward in C.
    return islice(iter(sampler), num_indices, None)


_SKIPS: dict[type, Callable[[Any, int], Iterator[Any]]] = {
    DistributedSampler: _distributed,
    RandomSampler: _random,
    SequentialSampler: _sequential,
}
