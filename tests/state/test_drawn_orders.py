"""Orders that a script draws without a seed: of splits, lists, arrays, and mappings. The laws show their use."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, SubsetRandomSampler

from lightning_faulttolerant.state import orders
from lightning_faulttolerant.state.splits import Parts


class Numbers(Dataset[int]):
    """Its samples are numbers."""

    def __len__(self) -> int:
        return 10


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


@pytest.mark.parametrize("name", ["list", "names", "mapping", "array", "tensor", "tuple"])
def test_an_order_is_put_into_the_same_elements(name: str) -> None:
    """Another order of the same elements becomes the one that was kept; an order that was not drawn is not kept."""
    make: Any = {
        "list": lambda order: [order[k] / 7 for k in range(40)],
        "names": lambda order: [f"{k:02d}.png" for k in order],
        "mapping": lambda order: {f"key {k}": k for k in order},
        "array": lambda order: np.array(order, dtype=np.float32),
        "tensor": lambda order: torch.tensor(order, dtype=torch.bfloat16),
        "tuple": lambda order: tuple((f"{k:02d}", k) for k in order),
    }[name]
    first, second = (make(random.Random(seed).sample(range(40), 40)) for seed in (0, 1))
    kept = orders.kept_order(first)
    assert kept is not None
    assert orders.kept_order(make(range(40))) is None
    assert orders.digest(first) != orders.digest(second)
    found = orders.in_order(second, kept)
    assert orders.digest(found if name == "tuple" else first) == orders.digest(first)
    assert orders.fill(second, found) == (name != "tuple")
    assert orders.digest(second) == orders.digest(first) or name == "tuple"
