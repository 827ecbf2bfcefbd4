"""The sort keys of elements, and the orders of names that a program produces without randomness."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_faulttolerant.state import orders
from lightning_faulttolerant.state.orders import bits_of, elements_of, is_sorted_by_name

NAMES = [f"{folder}/{'B' if i % 2 else 'b'}{i}.png" for folder in ("x", "x-1", "Y") for i in range(30)]


@pytest.mark.parametrize(
    "key",
    [
        lambda name: name,
        lambda name: name.casefold(),
        lambda name: name.rpartition("/")[::2],
        lambda name: name.split("/"),
        lambda name: (name.rpartition("/")[0], int(name.rpartition("/")[2][1:-4])),
    ],
    ids=["text", "any-case", "by-directory", "by-parts", "numbers"],
)
def test_orders_of_names(key: Callable[[str], Any]) -> None:
    """Names in a program's sort order were not drawn and are not kept; shuffled names are kept."""
    names = sorted((name.lower() for name in NAMES) if key(NAMES[0]) != NAMES[0] else NAMES, key=key)
    assert is_sorted_by_name(names)
    assert is_sorted_by_name([(name, i % 3) for i, name in enumerate(names)])
    assert orders.kept_order(names) is None
    random.Random(0).shuffle(names)
    assert not is_sorted_by_name(names)
    assert orders.kept_order(names) is not None
    assert not is_sorted_by_name([3, 1, 2])


def test_numbers_inside_names() -> None:
    """p2 comes before p10; a mapping whose values alone were shuffled gets both back."""
    names = [f"p{i}" for i in range(100)]
    assert orders.kept_order(names) is None
    values = random.Random(0).sample(range(100), 100)
    first, second = dict(zip(names, values, strict=True)), dict(zip(names, range(100), strict=True))
    kept = orders.kept_order(first)
    assert kept is not None
    assert list(orders.in_order(second, kept).items()) == list(first.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint16, torch.bool, torch.float32, torch.complex64])
def test_tensors_of_any_numbers(dtype: torch.dtype) -> None:
    """Each type of number gets its order back, even a type that NumPy or torch can't sort."""
    numbers = torch.arange(-50.0, 50.0) if dtype.is_floating_point else torch.arange(100)
    generator = torch.Generator().manual_seed(0)
    first, second = (numbers[torch.randperm(100, generator=generator)].to(dtype) for _ in range(2))
    kept = orders.kept_order(first)
    assert kept is not None
    assert orders.fill(second, orders.in_order(second, kept))
    assert torch.equal(first, second)
    assert orders.digest(first) == orders.digest(second)


def test_numbers_that_are_not_equal_to_themselves() -> None:
    """Not-a-numbers, negative numbers, and those of another byte order come back in the same order too."""
    numbers = np.array([2.5, np.nan, -1.0, 0.0, -7.0, np.nan, np.inf], dtype=">f4")
    kept = orders.kept_order(numbers)
    assert kept is not None
    other = numbers[::-1].copy()
    assert orders.digest(other) != orders.digest(numbers)
    assert orders.fill(other, orders.in_order(other, kept))
    assert bits_of(other).tolist() == bits_of(numbers).tolist()
    assert elements_of(np.array(["b", "a"])) == ["b", "a"]
