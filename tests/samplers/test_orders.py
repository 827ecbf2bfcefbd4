"""The orders of samples: torch's, drawn, and the computed one, which costs no memory at any length."""

from __future__ import annotations

import random
import tracemalloc
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from lightning_faulttolerant import InterruptibleDistributedSampler
from lightning_faulttolerant.samplers.order import MAX_LENGTH, FeistelPermutation

LENGTHS = sorted({*range(40), *(2**k + d for k in range(6, 13) for d in (-1, 0, 1)), 97, 997, 9973, 10_007})


def numbers(length: int, *, seed: int = 0, epoch: int = 0) -> Tensor:
    """Return the whole computed permutation."""
    return FeistelPermutation(length, seed=seed, epoch=epoch).at(torch.arange(length))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_order_torch_is_that_of_torchs_sampler(shuffle: bool, drop_last: bool) -> None:
    """In every epoch, every rank gets exactly what torch's DistributedSampler gives it, and as many samples."""
    for length, ranks in ((1, 1), (1, 12), (2, 3), (3, 12), (7, 4), (10, 3), (10, 2), (70_000, 2)):
        for rank in range(ranks):
            arguments = {"num_replicas": ranks, "rank": rank, "shuffle": shuffle, "drop_last": drop_last, "seed": 5}
            ours = InterruptibleDistributedSampler(range(length), **arguments)
            theirs: Any = DistributedSampler(range(length), **arguments)
            for epoch in (0, 3):
                ours.set_epoch(epoch)
                theirs.set_epoch(epoch)
                assert list(ours) == list(theirs)
            for name in ("num_samples", "total_size", "num_replicas", "rank", "epoch", "seed", "shuffle"):
                assert getattr(ours, name) == getattr(theirs, name)
            assert len(ours) == len(theirs)


def test_no_global_generator_is_touched() -> None:
    """Creating, iterating, and seeking draw no number from Python's or torch's generators."""
    before = random.getstate(), torch.get_rng_state()
    for order in ("torch", "feistel"):
        list(InterruptibleDistributedSampler(3000, 1, 0, order=order).iter_from(100))  # type: ignore[arg-type]
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("seed", [0, -5, 2**80])
def test_the_computed_order_is_a_bijection(seed: int) -> None:
    """Each number below any n comes once: for 0, 1, 2, primes, powers of two, and their neighbors."""
    for length in LENGTHS:
        assert torch.equal(numbers(length, seed=seed).sort().values, torch.arange(length)), length


def test_it_is_a_bijection_where_it_is_long() -> None:
    """Of numbers far beyond the size of memory, none comes twice, none is out of range, and int64 is the limit."""
    for length in (10**12, 2**60, 2**60 - 1):
        positions = torch.randint(0, length, (50_000,), generator=torch.Generator().manual_seed(0)).unique()
        found = FeistelPermutation(length, seed=3, epoch=1).at(positions)
        assert len(found.unique()) == len(positions)
        assert 0 <= found.min() <= found.max() < length
    for length in (-1, MAX_LENGTH + 1):
        with pytest.raises(ValueError, match=str(length)):
            FeistelPermutation(length, seed=0, epoch=0)


LONG = {
    10**12: [664453804585, 931250670992, 203801429142, 673053635804, 428991337316],
    2**60: [140043568811069660, 1127376445322462344, 219229444685097731, 567948755011555793, 816858626955346838],
}


def test_it_stays_what_it_is() -> None:
    """A permutation is the same in every version of the package, or a state would continue with another order."""
    assert numbers(12, seed=7, epoch=3).tolist() == [0, 5, 4, 11, 2, 10, 6, 7, 8, 3, 1, 9]
    for length, expected in LONG.items():
        positions = torch.tensor([0, 1, 2, length // 2, length - 1])
        assert FeistelPermutation(length, seed=7, epoch=3).at(positions).tolist() == expected


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    """No two have an order in common: (seed + 1, epoch) is not (seed, epoch + 1)."""
    orders = {tuple(numbers(50, seed=seed, epoch=epoch).tolist()) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64


def test_seeking_takes_no_memory_that_grows_with_the_length() -> None:
    """The end of 10**12 samples takes as much memory as the beginning of 1,000, and a sampler asks for it in chunks."""

    def peak(length: int) -> int:
        tracemalloc.start()
        FeistelPermutation(length, seed=0, epoch=0).at(torch.arange(length - 100, length))
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return taken

    peak(1000)
    assert peak(10**12) < 2 * peak(1000) + 10_000
    sampler = InterruptibleDistributedSampler(10**12, 8, 3, order="feistel")
    for skip in (0, sampler.num_samples - 20_000):
        assert len(set(islice(sampler.iter_from(skip), 20_000))) == 20_000
    assert len(list(sampler.iter_from(sampler.num_samples - 5))) == 5
