"""Any two index batches have different digests, and a digest is the same in each process."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from lightning_faulttolerant.loader.digests import START, Digest, updated


@dataclass
class Clip:
    """A part of a video."""

    video: str
    start: int
    tags: Any = None


class Kind(Enum):
    """A kind of video."""

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


def test_it_depends_on_all_batches() -> None:
    """A first batch that differs changes the digest, however many equal batches follow."""
    same = [[i] for i in range(100)]
    assert digest([7], *same) != digest([8], *same)
    assert digest([7], *same) == digest([7], *same)


def test_it_is_the_same_in_each_process() -> None:
    """It does not depend on hashes of texts or on addresses."""
    code = "import tests.loader.test_index_digest as t; print([t.digest(*batches) for batches in t.DIFFERENT])"
    outputs = set()
    for seed in ("1", "2"):
        variables = {"PYTHONHASHSEED": seed, "PYTHONPATH": "."}
        outputs.add(subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=True).stdout)
    assert len(outputs) == 1


class Slotted:
    """Has no ``__dict__``."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value


def test_objects_are_looked_into() -> None:
    """Slots, nested objects, and objects that hold themselves count."""
    assert digest(Slotted(1)) == digest(Slotted(1)) != digest(Slotted(2))
    one, other = Clip("a", 1), Clip("a", 2)
    one.tags, other.tags = [one], [other]
    assert digest(one) == digest(one) != digest(other)


@pytest.mark.parametrize(
    ("value", "name"), [(lambda: 1, "<lambda>"), ((i for i in []), "generator"), ([1] * 60_000 + [None], "parts")]
)
def test_what_cant_be_compared_is_named(value: Any, name: str) -> None:
    """A lambda, a generator, and too many values are each named."""
    not_compared = set[str]()
    updated(START, [value], not_compared)
    assert name in str(not_compared)
