"""A value that is shorter than each data set does not hold its samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_faulttolerant.state.splits import length_of, may_be_samples, num_values


class OfTen(Dataset[int]):
    """Has ten samples."""

    def __len__(self) -> int:
        return 10


class Broken(Dataset[int]):
    """Can't report its length."""

    def __len__(self) -> int:
        raise RuntimeError("not connected")


class Endless(IterableDataset[int]):
    """Has no end; its length must not be requested."""

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        raise AssertionError("was asked")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ([0.1] * 9, False),
        ([0.1] * 10, True),
        ({"pid": 4711}, False),
        ({"train": [1] * 5, "test": [2] * 5}, True),
        (["a.png"], True),
        ([("a.png", 1)], True),
        (np.zeros(3), True),
        (torch.zeros(3), True),
    ],
    ids=str,
)
def test_may_be_samples(value: Any, expected: bool) -> None:
    """Times and process ids are not samples, names and arrays may be; with a data set without a length, all may be."""
    assert may_be_samples(value, [OfTen()]) is expected
    assert may_be_samples(value, [OfTen(), Broken()])
    assert may_be_samples(value, [])


def test_lengths() -> None:
    """A data set that raises has no length, and an iterable one is not asked."""
    assert [length_of(dataset) for dataset in (OfTen(), Broken(), Endless(), None)] == [10, None, None, None]


def test_num_values() -> None:
    """Values inside others are counted, and a text is one value."""
    assert num_values({"a": [1, (2, 3)], "b": "four", "c": np.zeros((2, 2)), "d": None}) == 9
