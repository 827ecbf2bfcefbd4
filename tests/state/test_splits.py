"""The parts of splits are found among all objects without a call into any of them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, SubsetRandomSampler

from lightning_faulttolerant.state import splits
from lightning_faulttolerant.state.splits import Parts


class Numbers(Dataset[int]):
    """Its samples are numbers."""

    def __len__(self) -> int:
        return 10


class Alone(Numbers):
    """No other test has parts of it."""


class Broken(Dataset[int]):
    """Can't report how many samples it has."""

    def __len__(self) -> int:
        raise RuntimeError("not connected")


class Lazy(Subset[int]):
    """Computes its indices at the first access."""

    @property
    def indices(self) -> Any:  # type: ignore[override]
        raise AssertionError("was asked")

    @indices.setter
    def indices(self, value: Any) -> None:
        pass


class Bare(Subset[int]):
    """Has no indices, and no data set."""

    def __init__(self) -> None:
        pass


def test_strange_parts_are_left_alone() -> None:
    """Parts with missing or computed indices, or of a data set without a length, do not disturb the search."""
    held = [Lazy(Numbers(), [0]), Bare(), Subset(Broken(), [1, 0]), SubsetRandomSampler("abc")]  # type: ignore[arg-type]
    test = Subset(Numbers(), [8, 7])
    parts = Parts()
    parts.note({"train": Subset(Numbers(), [2, 1, 0]), "bare": held[1], "lazy": held[0], "broken": held[2]})
    own = "test_strange_parts_are_left_alone()"
    assert parts.drawn == ["train", "broken", f"{own}.test"]
    assert parts.state_dict()[f"{own}.test"]["of"] == "Subset of Numbers [10]"
    assert parts.state_dict()["broken"]["of"] == "Subset of Broken [None]"
    assert test.indices == [8, 7]


@pytest.mark.parametrize(
    "indices",
    [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1], dtype=np.uint8), torch.tensor([2, 0, 1]), [np.int64(2), 0, True]],
    ids=lambda value: type(value).__name__,
)
def test_indices_of_any_kind(indices: Any) -> None:
    """Indices are whole numbers in any container that can hold them."""
    parts = Parts()
    parts.note({"part": Subset(Numbers(), indices)})
    assert splits._unpacked(parts.state_dict()["part"]["indices"]) == [2, 0, 1]


@pytest.mark.parametrize("indices", [["a", "b"], [1.5], {1: 2}, {1, 2}, None, [2**70], np.zeros((2, 2))], ids=str)
def test_what_is_no_indices(indices: Any) -> None:
    """An object with any other indices is not a part."""
    parts = Parts()
    parts.note({"part": Subset(Numbers(), indices)})
    assert parts.state_dict() == parts.digests == {}


def test_a_save_does_not_look_at_the_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a part was drawn is noted once: a save of a million indices takes no time."""
    parts = Parts()
    parts.note({"part": Subset(Alone(), [1, 0])})

    def refuse(data: bytes) -> bytes:
        raise AssertionError("looked at them")

    monkeypatch.setattr(zlib, "decompress", refuse)
    assert parts.drawn == ["part"]
    assert parts.state_dict()["part"]["same"] == "part"
