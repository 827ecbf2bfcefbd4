from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from collections.abc import Callable
from itertools import pairwise, permutations

import pytest
import torch
from torch import Tensor

from lightning_faulttolerant.samplers import order
from lightning_faulttolerant.samplers.order import MAX_LENGTH, FeistelPermutation

LENGTHS = sorted(
    {*range(40), *(2**k + d for k in range(2, 15) for d in (-1, 0, 1)), 97, 101, 997, 7919, 9973, 10_000, 10_007}
)


def numbers(length: int, *, seed: int = 0, epoch: int = 0) -> Tensor:
    """Return the whole permutation."""
    return FeistelPermutation(length, seed=seed, epoch=epoch).at(torch.arange(length))


@pytest.mark.parametrize("seed", [0, 1, -5, 2**80])
def test_it_is_a_bijection(seed: int) -> None:
    """Each number below any n comes once: for 0, 1, 2, primes, powers of two, and their neighbors."""
    for length in LENGTHS:
        assert torch.equal(numbers(length, seed=seed).sort().values, torch.arange(length)), length


@pytest.mark.parametrize("length", [10**12, 10**12 + 39, 2**60, 2**60 - 1, 3])
def test_it_can_be_undone_where_it_is_long(length: int) -> None:
    """Of numbers far beyond the size of memory, none comes twice, and none is out of range."""
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, length, (50_000,), generator=generator).unique()
    found = FeistelPermutation(length, seed=3, epoch=1).at(positions)
    assert len(found.unique()) == len(positions)
    assert found.min() >= 0
    assert found.max() < length


@pytest.mark.parametrize("length", [-1, MAX_LENGTH + 1])
def test_a_length_that_an_int64_can_not_serve_is_refused(length: int) -> None:
    """The error states the range of lengths."""
    with pytest.raises(ValueError, match=str(length)):
        FeistelPermutation(length, seed=0, epoch=0)


@pytest.mark.parametrize("length", [1000, 2**60])
def test_no_product_leaves_an_int64(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Computed with Python's unbounded integers, each number is the same, and no step is too large."""
    permutation = FeistelPermutation(length, seed=9, epoch=2)
    positions = [0, 1, length // 2, length - 2, length - 1]
    largest = 0

    def add(digit: int, base: int, of: int, key: int) -> int:
        nonlocal largest
        first = (of ^ key) * order._FIRST
        second = ((first ^ first >> 29) & order._MASK) * order._SECOND
        third = (second >> 31 & order._MASK) * base
        largest = max(largest, first, second, third)
        return (digit + (third >> 31)) % base

    def once(number: int) -> int:
        left, right = divmod(number, permutation._right)
        for i in range(0, len(permutation._keys), 2):
            left = add(left, permutation._left, right, permutation._keys[i])
            right = add(right, permutation._right, left, permutation._keys[i + 1])
        return left * permutation._right + right

    expected = []
    for position in positions:
        number = once(position)
        while number >= length:
            number = once(number)
        expected.append(number)
    assert permutation.at(torch.tensor(positions)).tolist() == expected
    assert largest < 2**63


def test_it_stays_what_it_is() -> None:
    """A permutation is the same in every version of the package, or a state would continue with another order."""
    assert numbers(12, seed=7, epoch=3).tolist() == [0, 5, 4, 11, 2, 10, 6, 7, 8, 3, 1, 9]
    beginning = FeistelPermutation(10**12, seed=7, epoch=3).at(torch.arange(3))
    assert beginning.tolist() == [664453804585, 931250670992, 203801429142]


def test_epochs_and_seeds_differ() -> None:
    """Of many epochs and seeds, no two have an order in common, and (seed + 1, epoch) is not (seed, epoch + 1)."""
    orders = {tuple(numbers(50, seed=seed, epoch=epoch).tolist()) for seed in range(8) for epoch in range(8)}
    assert len(orders) == 64


def faults_of(permutation: Tensor) -> list[str]:
    """Return the signs that a permutation is not random; chance crosses each bound once in 10,000 or less often."""
    n = len(permutation)
    x = permutation.double()
    y = torch.arange(n).double()
    bound = 4.5 / math.sqrt(n)
    return [
        name
        for name, is_bad in {
            "follows its position": abs(_correlation(x, y)) > bound,
            "follows its neighbour": abs(_correlation(x[1:], x[:-1])) > bound,
            "follows the one a root after": abs(_correlation(x[math.isqrt(n) :], x[: -math.isqrt(n)])) > bound,
            "blocks are not mixed": _chi_square(permutation, 16) > 225 + 4.5 * math.sqrt(2 * 225),
            "low bits are not mixed": _chi_square_of_bits(permutation) > 49 + 4.5 * math.sqrt(2 * 49),
            "fixed points": int((x == y).sum()) > 12,
            "steps repeat": _commonest_step(permutation) > 14,
        }.items()
        if is_bad
    ]


def _correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def _chi_square(permutation: Tensor, parts: int) -> float:
    """Return how far the counts of (part of the position, part of the number) are from being equal."""
    n = len(permutation)
    cells = (torch.arange(n) * parts // n) * parts + permutation * parts // n
    counts = torch.bincount(cells, minlength=parts * parts).double()
    return float(((counts - n / parts**2) ** 2 / (n / parts**2)).sum())


def _chi_square_of_bits(permutation: Tensor) -> float:
    """Return the same for the last digits, base 8."""
    n = len(permutation)
    counts = torch.bincount((torch.arange(n) % 8) * 8 + permutation % 8, minlength=64).double()
    return float(((counts - n / 64) ** 2 / (n / 64)).sum())


def _commonest_step(permutation: Tensor) -> int:
    steps = (permutation[1:] - permutation[:-1]) % len(permutation)
    return int(torch.bincount(steps, minlength=len(permutation)).max())


@pytest.mark.parametrize("length", [1000, 4096, 9973, 65536, 100_003])
def test_no_structure_is_visible(length: int) -> None:
    """Orders pass what torch's random permutations pass: correlations, counts in cells, last digits, steps."""
    for epoch in range(5):
        assert faults_of(numbers(length, seed=11, epoch=epoch)) == [], epoch


@pytest.mark.parametrize("length", [1000, 9973])
def test_the_measure_passes_random_permutations(length: int) -> None:
    """A permutation that torch draws has none of the tested faults."""
    for seed in range(5):
        assert faults_of(torch.randperm(length, generator=torch.Generator().manual_seed(seed))) == []


BAD: dict[str, Callable[[int], Tensor]] = {
    "as it is": torch.arange,
    "backwards": lambda n: torch.arange(n).flip(0),
    "a linear congruence": lambda n: torch.arange(n) * 7 % n,
    "shuffled blocks": lambda n: torch.cat([b[torch.randperm(len(b))] for b in torch.arange(n).split(500)]),
    "shuffled in place of their last digit": lambda n: _keep_last_digit(n),
}


def _keep_last_digit(n: int) -> Tensor:
    blocks = torch.randperm(n // 8)
    kept = (blocks[:, None] * 8 + torch.arange(8)).reshape(-1)
    return torch.cat([kept, torch.arange(len(kept), n)])


@pytest.mark.parametrize("name", BAD)
def test_the_measure_finds_bad_permutations(name: str) -> None:
    """Orders that are not random are distinguished from random ones."""
    assert faults_of(BAD[name](9973)) != []


def test_the_measure_finds_a_network_of_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network with too few rounds fails the same tests, so they are sharp enough to judge it."""
    monkeypatch.setattr(order, "_NUM_ROUNDS", 2)
    assert faults_of(numbers(65536, seed=11)) != []


@pytest.mark.parametrize("length", [2, 3, 5])
def test_all_orders_of_few_samples_come_equally_often(length: int) -> None:
    """Over many epochs each permutation of a tiny data set comes as often as any other."""
    num_orders, num_epochs = math.factorial(length), 1000
    counts = Counter(tuple(numbers(length, seed=1, epoch=epoch).tolist()) for epoch in range(num_epochs))
    expected = num_epochs / num_orders
    chi_square = sum((counts[order] - expected) ** 2 / expected for order in permutations(range(length)))
    assert chi_square < num_orders - 1 + 4.5 * math.sqrt(2 * (num_orders - 1))


def test_each_place_gets_each_sample_over_the_epochs() -> None:
    """The place of a sample in one epoch reveals nothing about its place in others."""
    counts = torch.zeros(10, 10)
    for epoch in range(500):
        counts[torch.arange(10), numbers(10, seed=5, epoch=epoch)] += 1
    assert float(((counts - 50) ** 2 / 50).sum()) < 81 + 4.5 * math.sqrt(2 * 81)


def test_neighbouring_epochs_are_not_alike() -> None:
    """The order of one epoch does not follow that of the epoch before."""
    orders = [numbers(10_000, seed=5, epoch=epoch).double() for epoch in range(6)]
    assert all(abs(_correlation(a, b)) < 0.045 for a, b in pairwise(orders))


def test_seeking_takes_no_memory_that_grows_with_the_length() -> None:
    """The end of 10**12 samples takes as much memory as the beginning of 1,000, in Python and in torch."""

    def peak(length: int) -> int:
        tracemalloc.start()
        FeistelPermutation(length, seed=0, epoch=0).at(torch.arange(length - 100, length))
        taken = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return taken

    peak(1000)
    assert peak(10**12) < 2 * peak(1000) + 10_000
