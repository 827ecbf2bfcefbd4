"""Contents of data sets: lists, mappings, and arrays with their digests, single numbers, and parts of splits."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_faulttolerant.state import splits
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.state.splits import contents_of


class Scale(nn.Module):
    """A transform that holds numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.deviations = 0.5, [1.0, 2.0]


class Images(Dataset[Tensor]):
    """Holds plain lists, and objects that hold more."""

    def __init__(self) -> None:
        names = ["b.png", "a.png"]
        self.names, self.labels, self.empty = tuple(names), {"b.png": 1, "a.png": 0}, list[int]()
        self.order, self.pixels = np.array([1, 0]), np.zeros((2, 3))
        self.transform = SimpleNamespace(steps=[Scale(), functools.partial(max, 3)], closure=lambda x: (x, names))
        self.generator, self.file = torch.Generator(), print

    def __len__(self) -> int:
        return 2


def test_paths() -> None:
    """Each is found by the path that a user would write."""
    found = contents_of({"train/0.dataset": Images()}, Rules())
    assert {path.removeprefix("train/0.dataset.") for path in found.lists} == {
        "names", "labels", "order", "transform.steps[0].deviations",
    }  # fmt: skip
    assert found.numbers["train/0.dataset.transform.steps[0].mean"] == "float 0.5"
    assert found.parts == {}


def test_parts_of_splits() -> None:
    """A part is found through whatever holds it; its indices belong to it and are not a list of the data set."""
    parts = [Subset(Images(), [1, 0]), Subset(Images(), [0])]
    holder = SimpleNamespace(wrapped=ConcatDataset(parts))
    found = contents_of({"root": holder}, Rules())
    assert found.parts == {f"root.wrapped.datasets[{i}]": part for i, part in enumerate(parts)}
    assert "root.wrapped.datasets[0].dataset.names" in found.lists
    assert not any(path.endswith("indices") for path in found.lists)


def test_elements_are_set() -> None:
    """A list is filled in place; a tuple is replaced in its attribute."""
    images = Images()
    found = contents_of({"root": images}, Rules()).lists
    labels = images.labels
    found["root.names"].set(["a.png", "b.png"])
    found["root.labels"].set({"a.png": 0, "b.png": 1})
    assert images.names == ("a.png", "b.png")
    assert images.labels is labels
    assert list(labels) == ["a.png", "b.png"]
    images.order.flags.writeable = False
    found["root.order"].set([0, 1])
    assert images.order.tolist() == [0, 1]


def test_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that are left out and live objects are not read, and only the nearest of many objects are."""
    images = Images()
    rules = Rules(left_out=lambda value: {"names"}, is_live=lambda value: value is images.transform)
    found = contents_of({"root": images}, rules)
    assert set(found.lists) == {"root.labels", "root.order"}
    monkeypatch.setattr(splits, "_MAX_OBJECTS", 1)
    chain: Any = SimpleNamespace(numbers=[1], inner=SimpleNamespace(numbers=[2]))
    assert set(contents_of({"root": chain}, Rules()).lists) == {"root.numbers"}
