"""Digests and texts of what a step computes: equal where values are equal bit for bit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from lightning_faulttolerant.loader.digests import sample_digest
from lightning_faulttolerant.trainer.steps.digests import digest, exact, exact_metrics


class Held:
    """An object with a callable among its attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.function = lambda: value


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_arrays_and_tensors_are_told_apart() -> None:
    """Arrays have a type and a shape, and tensors a layout; `tests/loader/test_digests.py` has all other values."""
    zeros = (np.zeros((2, 3)), np.zeros((3, 2)), np.zeros((2, 3), np.int64))
    assert len(set(map(digest, zeros))) == 3
    for of in (digest, sample_digest):
        assert of(torch.eye(2).to_sparse_csr()) != of((2 * torch.eye(2)).to_sparse_csr())
    jagged = [torch.nested.nested_tensor([torch.zeros(2), end], layout=torch.jagged) for end in torch.eye(2)]
    assert digest(jagged[0]) != digest(jagged[1])


def test_same_values_have_one_digest() -> None:
    """An address, the order of a set, and the type of a mapping make no difference; the order of a mapping does."""
    same: list[tuple[Any, Any]] = [
        (Held(1), Held(1)),
        (print, print),
        ({"b", "a", Held}, {Held, "a", "b"}),
        (OrderedDict(a=1, b=2), {"a": 1, "b": 2}),
    ]
    assert [pair for pair in same if digest(pair[0]) != digest(pair[1])] == []
    assert digest({"a": 1, "b": 2}) != digest({"b": 2, "a": 1})


def test_numbers_lose_no_bit() -> None:
    """A float becomes text from which the same float comes back; integers, text, and None stay; any metric is taken."""
    assert float.fromhex(exact(0.1 + 0.2)) == 0.1 + 0.2
    assert exact(torch.tensor(0.1)) == exact(np.float32(0.1)) == float(np.float32(0.1)).hex()
    assert [exact(value) for value in (3, np.int64(3), "a", None, True)] == [3, 3, "a", None, True]
    assert (exact(float("nan")), exact([1.0]), exact(torch.zeros(2))) == ("nan", digest([1.0]), digest(torch.zeros(2)))
    several, long = np.arange(3), np.longdouble(1)  # its item() is not a plain number
    expected = {"h": digest(several), "1": (2.0).hex(), "('a', 1)": digest(long)}
    assert exact_metrics({"h": several, 1: 2.0, ("a", 1): long}) == expected
    assert (exact_metrics([1.0]), exact_metrics(None)) == ({"": digest([1.0])}, {})
