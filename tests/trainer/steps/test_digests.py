"""Digests are equal where values are equal bit for bit, and differ where they are not."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_faulttolerant.trainer.steps.digests import digest, exact, exact_metrics


@dataclass
class Sample:
    """A batch of a user's own class."""

    image: Any
    label: int


class Loose:
    """An object that refers to itself, with a callable among its attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.itself = self
        self.function = lambda: value


class Slots:
    """An object whose repr shows its memory address."""

    __slots__ = ()


PAIRS: dict[str, tuple[Any, Any] | Callable[[], tuple[Any, Any]]] = {
    "last-bit": (torch.tensor([1.0]), torch.tensor([math.nextafter(1, 2)], dtype=torch.float64).float() + 1.2e-7),
    "sign-of-zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "nesting": ([1, [2, 3]], [[1, 2], 3]),
    "key": ({"a": 1}, {"b": 1}),
    "type": (1, 1.0),
    "object-array": (np.array([{"a": 1}], dtype=object), np.array([{"a": 2}], dtype=object)),
    "dataclass": (Sample(torch.zeros(2), 1), Sample(torch.zeros(2), 2)),
    "object": (Loose(1), Loose(2)),
    "sparse": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    "compressed": lambda: (torch.eye(2).to_sparse_csr(), (2 * torch.eye(2)).to_sparse_csr()),
    "nested-tensor": lambda: (
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=torch.jagged),
    ),
    "no-content": (torch.zeros(2, device="meta"), torch.zeros(3, device="meta")),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("case", PAIRS)
def test_other_values_have_other_digests(case: str) -> None:
    """Two values that differ have different digests; the same value always has the same digest."""
    pair = PAIRS[case]
    one, other = pair() if callable(pair) else pair
    assert digest(one) != digest(other)
    assert digest(one) == digest(one)


def test_same_values_have_one_digest() -> None:
    """A view, a transposed copy, a conjugate, an address, and the type of a mapping make no difference."""
    rows, numbers = torch.randn(3, 4), torch.randn(3, dtype=torch.complex64)
    same: list[tuple[Any, Any]] = [
        (rows.t().contiguous().t(), rows),
        (rows[1:], rows[1:].clone()),
        (numbers.conj(), numbers.conj().resolve_conj()),
        (Loose(1), Loose(1)),
        ([Slots(), Slots()], [Slots(), Slots()]),
        (print, print),
        ({"b", "a", Sample}, {Sample, "a", "b"}),
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
