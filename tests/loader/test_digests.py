"""Digests of index batches, of samples, and of steps tell any two apart, and are the same in each process."""

from __future__ import annotations

import subprocess
import sys
import types
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from torch.nested import nested_tensor

from lightning_faulttolerant.loader.digests import START, Digest, sample_digest, updated
from lightning_faulttolerant.trainer.steps.digests import digest as step_digest, exact, exact_metrics


@dataclass
class Clip:
    video: str
    start: int
    tags: Any = None


class Kind(Enum):
    LONG = 1
    SHORT = 2


Pair = namedtuple("Pair", ["a", "b"])


def digest(*batches: Any) -> Digest:
    """Return the digest of some comparable batches."""
    found, not_compared = START, set[str]()
    for batch in batches:
        found = updated(found, batch, not_compared)
    assert not not_compared
    return found


DIFFERENT: list[list[Any]] = [
    [[1, 2]], [[2, 1]], [[1], [2]], [[1, 2], []], [[1, 2, 0]], [1, 2], [(1, 2)], [[1.0, 2.0]], [["1", "2"]], [["12"]],
    [[10**30, 2]], [[(1, 2)]], [[[1, 2]]], [{"a": 1}], [{"a": 2}], [{"b": 1}], [{1, 2}], [frozenset({1, 2})], [None],
    [torch.tensor([1, 2])], [torch.tensor([1.0, 2.0])], [np.array([1, 2])], [np.array([2, 1])], [b"12"],
    [Clip("a", 1)], [Clip("a", 2)], [Clip("b", 1)], [Clip("a", 1, [1])], [[Clip("a", 1)]], [Kind.LONG], [Kind.SHORT],
    [Pair(1, 2)], [Pair(2, 1)], [PurePosixPath("a")], [PurePosixPath("b")], [slice(1, 2)], [range(3)], [range(4)],
    [len], [max],
]  # fmt: skip


def test_no_two_are_the_same() -> None:
    """Other values, another order, other batches, other types: each has another digest."""
    found = [digest(*batches) for batches in DIFFERENT]
    assert len(set(found)) == len(found)


def test_it_is_the_same_in_each_process() -> None:
    """It does not depend on hashes of texts or on addresses."""
    code = "import tests.loader.test_digests as t; print([t.digest(*batches) for batches in t.DIFFERENT])"
    variables = {"PYTHONHASHSEED": "1", "PYTHONPATH": "."}
    found = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert found.stdout == f"{[digest(*batches) for batches in DIFFERENT]}\n"


@pytest.mark.parametrize(
    ("value", "name"), [(lambda: 1, "<lambda>"), ((i for i in []), "generator"), ([1] * 60_000 + [None], "parts")]
)
def test_what_cant_be_compared_is_named(value: Any, name: str) -> None:
    """A lambda, a generator, and too many values are each named."""
    not_compared = set[str]()
    updated(START, [value], not_compared)
    assert name in str(not_compared)


@dataclass(slots=True)
class Graph:
    """A batch of a custom class."""

    nodes: torch.Tensor


class Loose:
    """An object that refers to itself, with a callable among its attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.itself = self
        self.function = lambda: value


# torch warns that these are prototypes.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", UserWarning)
    RAGGED = [nested_tensor([torch.ones(2), end]) for end in (torch.ones(3), torch.zeros(3))]
    JAGGED = [nested_tensor([torch.zeros(2), end], layout=torch.jagged) for end in torch.eye(2)]
    COMPRESSED = [(number * torch.eye(2)).to_sparse_csr() for number in (1, 2)]

PAIRS = {
    "last bit": (torch.tensor([1.0]), torch.nextafter(torch.tensor([1.0]), torch.tensor([2.0]))),
    "sign of zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "another type of tensor": (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32)),
    "another shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "shape without content": (torch.zeros(2, device="meta"), torch.zeros(3, device="meta")),
    "16 bits": (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16)),
    "complex": (torch.tensor([1j]), torch.tensor([2j])),
    "gradient": (torch.tensor([1.0], requires_grad=True), torch.tensor([2.0], requires_grad=True)),
    "not contiguous": (torch.arange(6).reshape(2, 3).T, torch.arange(6).reshape(3, 2)),
    "array": (np.arange(3), np.arange(3) + 1),
    "another shape of an array": (np.zeros((2, 3)), np.zeros((3, 2))),
    "another type of an array": (np.zeros(2), np.zeros(2, np.int64)),
    "type": (1, 1.0),
    "numbers": ((1, 2.0, None), (1, 2.5, None)),
    "key": ({"a": 1}, {"b": 1}),
    "text": ({"text": "a"}, {"text": "b"}),
    "last of many": ([*range(1000)], [*range(999), 0]),
    "last of a large tensor": (torch.zeros(1_000_001), torch.cat([torch.zeros(1_000_000), torch.ones(1)])),
    "middle of a large array": (np.zeros(1_000_001), np.eye(1, 1_000_001, 500_000)[0]),
    "order of a large tensor": (torch.arange(100_000), torch.arange(100_000).flip(0)),
    "end of a text": ("a" * 10_000, "a" * 9_999 + "b"),
    "array of objects": (np.array([1, "a"], dtype=object), np.array([1, "b"], dtype=object)),
    "attribute": (types.SimpleNamespace(x=torch.ones(2)), types.SimpleNamespace(x=torch.zeros(2))),
    "data class": (Graph(nodes=torch.ones(2)), Graph(nodes=torch.zeros(2))),
    "object with itself": (Loose(1), Loose(2)),
    "set": ({1, 2}, {1, 3}),
    "sparse": (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse()),
    "compressed": COMPRESSED,
    "ragged": RAGGED,
    "jagged": JAGGED,
    "where one list ends": (["a", ["b"]], ["a", "b"]),
    "nested": ({"x": [torch.ones(2)]}, {"x": [torch.zeros(2)]}),
}


def index_digest(value: Any) -> Digest:
    """Return the digest of an index batch; some of the values have a lambda, which is not compared."""
    return updated(START, [value], set())


@pytest.mark.parametrize("of", [sample_digest, step_digest, index_digest])
def test_digest_tells_values_apart(of: Callable[[Any], object]) -> None:
    """The same value always has the same digest, and another value has another one."""
    for name, (value, other) in PAIRS.items():
        assert of(value) == of(value), name
        assert of(value) != of(other), name
    for value in (torch.empty(0), torch.empty(2, device="meta"), object(), [object(), object()]):
        assert of(value) == of(value)


def test_objects_that_come_again() -> None:
    """An object that holds itself is read once; if objects occur twice, the digest shows which one does."""
    ring: list[object] = [1]
    ring.append(ring)
    assert sample_digest(ring) == sample_digest(ring)
    one, other = [1], [2]
    assert sample_digest([one, other, one]) != sample_digest([one, other, other])
    assert sample_digest([one, other, one]) == sample_digest([third := [1], [2], third])
    assert sample_digest("b", sample_digest("a")) != sample_digest("a", sample_digest("b"))


@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64, torch.bool],
    ids=str,
)
def test_digest_of_a_view_is_that_of_its_copy(dtype: torch.dtype) -> None:
    """The memory layout does not matter, whatever the type, the shape, and the size."""
    for shape in ((), (1,), (3, 5), (2, 0), (70_000,)):
        number = torch.Size(shape).numel()
        tensor = torch.arange(2 * number + 2).to(dtype)
        views = [tensor[1 : number + 1].reshape(shape), tensor[::2], tensor[:1].expand(3)]
        views += [tensor.conj(), tensor.conj().imag] if dtype.is_complex else []
        for view in views:
            copy = torch.tensor(view.tolist(), dtype=view.dtype).reshape(view.shape)
            assert sample_digest((view, {"a": view}), 7) == sample_digest((copy, {"a": copy}), 7)
            assert step_digest((view, {"a": view})) == step_digest((copy, {"a": copy}))


# Digests and texts of what a step computes


def test_same_values_have_one_digest() -> None:
    """An address, the order of a set, and the type of a mapping make no difference; the order of a mapping does."""
    same: list[tuple[Any, Any]] = [
        (Loose(1), Loose(1)),
        (print, print),
        ({"b", "a", Loose}, {Loose, "a", "b"}),
        (OrderedDict(a=1, b=2), {"a": 1, "b": 2}),
    ]
    assert [pair for pair in same if step_digest(pair[0]) != step_digest(pair[1])] == []
    assert step_digest({"a": 1, "b": 2}) != step_digest({"b": 2, "a": 1})


def test_numbers_lose_no_bit() -> None:
    """A float becomes text from which the same float comes back; integers, text, and None stay; any metric is taken."""
    assert float.fromhex(exact(0.1 + 0.2)) == 0.1 + 0.2
    assert exact(torch.tensor(0.1)) == exact(np.float32(0.1)) == float(np.float32(0.1)).hex()
    assert [exact(value) for value in (3, np.int64(3), "a", None, True)] == [3, 3, "a", None, True]
    assert (exact(float("nan")), exact([1.0]), exact(torch.zeros(2))) == (
        "nan",
        step_digest([1.0]),
        step_digest(torch.zeros(2)),
    )
    several, long = np.arange(3), np.longdouble(1)  # its item() is not a plain number
    expected = {"h": step_digest(several), "1": (2.0).hex(), "('a', 1)": step_digest(long)}
    assert exact_metrics({"h": several, 1: 2.0, ("a", 1): long}) == expected
    assert (exact_metrics([1.0]), exact_metrics(None)) == ({"": step_digest([1.0])}, {})
