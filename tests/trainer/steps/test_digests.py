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

from lightning_faulttolerant.trainer.steps.digests import (
    digest,
    exact,
    exact_metrics,
)


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


class Wrapped(torch.Tensor):
    """A tensor without its own memory, as in libraries that quantize or mask."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*(value.inner if isinstance(value, cls) else value for value in args), **(kwargs or {}))
        return cls(out) if isinstance(out, torch.Tensor) else out


class Flattened(Wrapped):
    """A tensor that names the tensors it consists of."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None


PAIRS: dict[str, tuple[Any, Any] | Callable[[], tuple[Any, Any]]] = {
    "last-bit": (torch.tensor([1.0]), torch.tensor([math.nextafter(1, 2)], dtype=torch.float64).float() + 1.2e-7),
    "sign-of-zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "nesting": ([1, [2, 3]], [[1, 2], 3]),
    "long-indices": ([1, 2, 3], [1, 3, 2]),
    "key": ({"a": 1}, {"b": 1}),
    "text": ("ab", "ba"),
    "type": (1, 1.0),
    "bytes": (b"a", b"b"),
    "array": (np.arange(3), np.arange(3)[::-1]),
    "object-array": (np.array([{"a": 1}], dtype=object), np.array([{"a": 2}], dtype=object)),
    "dataclass": (Sample(torch.zeros(2), 1), Sample(torch.zeros(2), 2)),
    "object": (Loose(1), Loose(2)),
    "sparse": (torch.eye(2).to_sparse(), (2 * torch.eye(2)).to_sparse()),
    "compressed": lambda: (torch.eye(2).to_sparse_csr(), (2 * torch.eye(2)).to_sparse_csr()),
    "nested-tensor": lambda: (
        torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)], layout=torch.jagged),
    ),
    "half": (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.01], dtype=torch.bfloat16)),
    "no-memory": (Wrapped(torch.zeros(2)), Wrapped(torch.ones(2))),
    "no-memory-flattened": (Flattened(torch.zeros(2)), Flattened(torch.ones(2))),
    "no-content": (torch.zeros(2, device="meta"), torch.zeros(3, device="meta")),
    "nothing": (None, torch.empty(0)),
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


def test_layout_in_memory_is_no_difference() -> None:
    """A view, a transposed copy, and an unresolved conjugate have the digest of their values."""
    rows = torch.randn(3, 4)
    assert digest(rows.t().contiguous().t()) == digest(rows)
    assert digest(rows[1:]) == digest(rows[1:].clone())
    numbers = torch.randn(3, dtype=torch.complex64)
    assert digest(numbers.conj()) == digest(numbers.conj().resolve_conj())


def test_an_address_is_no_difference() -> None:
    """Objects that differ only in their memory address have the same digest."""
    assert digest(Loose(1)) == digest(Loose(1))
    assert digest([Slots(), Slots()]) == digest([Slots(), Slots()])
    assert digest(print) == digest(print)
    assert digest({"b", "a", Sample}) == digest({Sample, "a", "b"})


def test_mappings_are_compared_by_content() -> None:
    """The type of a mapping makes no difference; the order of its keys does."""
    assert digest(OrderedDict(a=1, b=2)) == digest({"a": 1, "b": 2})
    assert digest({"a": 1, "b": 2}) != digest({"b": 2, "a": 1})


def test_numbers_lose_no_bit() -> None:
    """A float becomes text from which the same float comes back; integers, text, and None stay."""
    assert float.fromhex(exact(0.1 + 0.2)) == 0.1 + 0.2
    assert exact(torch.tensor(0.1)) == float(torch.tensor(0.1)).hex()
    assert exact(np.float32(0.1)) == float(np.float32(0.1)).hex()
    assert exact(np.int64(3)) == 3
    assert [exact(value) for value in (3, "a", None, True)] == [3, "a", None, True]
    assert exact(torch.zeros(2)) == digest(torch.zeros(2))
    assert exact(float("nan")) == "nan"
    assert exact([1.0]) == digest([1.0])


def test_metrics_of_any_kind_are_written() -> None:
    """No value that a user gives to a logger ends a run: several values, odd names, no mapping at all."""
    several = np.arange(3)
    long = np.longdouble(1)  # its item() is not a plain number
    assert exact_metrics({"h": several, 1: 2.0, ("a", 1): long}) == {
        "h": digest(several),
        "1": (2.0).hex(),
        "('a', 1)": digest(long),
    }
    assert exact_metrics([1.0]) == {"": digest([1.0])}
    assert exact_metrics(None) == {}
