"""Records: a large list of similar objects is followed like any other objects, without a node for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.saved import LOST, NODES

_NUM = 300  # enough items to be noted together


@dataclass
class Category:
    """Shared by several records."""

    name: str


@dataclass
class Annotation:
    path: str
    label: int
    box: list[Any]
    category: Category
    more: dict[str, Any] = field(default_factory=dict)
    area: Any = None


def make_owner() -> Any:
    """Return a data set of many annotations."""
    owner = Dataset[Any]()
    categories = [Category("cat"), Category("dog")]
    owner.items = [
        Annotation(f"p{i}", i, [i, [1.5, i]], categories[i % 2], {"key": i}, np.full(3, i)) for i in range(_NUM)
    ]
    owner.other = {}
    return owner


def look(owner: Any) -> str:
    """Return everything that a data set holds, as a text."""
    return repr([vars(item) for item in owner.items]) + repr(owner.other)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda o: setattr(o.items[7], "label", -1),
    "other type": lambda o: setattr(o.items[1], "label", True),
    "new attribute": lambda o: setattr(o.items[7], "seen", 3),
    "gone": lambda o: delattr(o.items[7], "label"),
    "list": lambda o: o.items[9].box.append(4),
    "dict": lambda o: o.items[9].more.update(key=0),
    "array": lambda o: o.items[9].area.fill(0),
    "shared": lambda o: setattr(o.items[8].category, "name", "horse"),
    "swapped": lambda o: o.items.insert(0, o.items.pop()),
    "replaced": lambda o: o.items.__setitem__(3, Annotation("new", 1, [], o.items[0].category)),
    "referred to": lambda o: o.other.update(best=o.items[5], box=o.items[6].box[1]),
    "all": lambda o: [setattr(item, "label", -item.label) for item in o.items],
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_carried(name: str) -> None:
    """A change of one record is restored in place, and shared references stay shared."""
    owner, other = make_owner(), make_owner()
    state, restored = ObjectState({"dataset": owner}), ObjectState({"dataset": other})
    assert len(state) < 10
    kept = other.items[9]
    assert not state.state_dict()[NODES]
    CHANGES[name](owner)
    saved = state.state_dict()
    assert saved[NODES]
    assert not saved[LOST]
    assert restored.load_state_dict(saved) == []
    assert look(other) == look(owner)
    assert other.items[9 if name != "swapped" else 10] is kept
    assert other.items[0].category is other.items[2].category or name == "swapped"
    if name == "referred to":
        assert other.other["best"] is other.items[5]
        assert other.other["box"] is other.items[6].box[1]
    assert restored.state_dict()[NODES].keys() == saved[NODES].keys()


def test_copies_of_weights_in_records_are_carried() -> None:
    """A copy of the weights is carried even if it does not change."""
    owner, weight = make_owner(), torch.rand(3)
    for item in owner.items:
        item.area = torch.rand(3)
    owner.items[5].area = weight.clone()
    state = ObjectState({"dataset": owner})
    state.carry_copies([weight])
    assert list(state.state_dict()[NODES]) == ["dataset.items[5].area"]


def test_baseline_is_kept_where_a_loader_comes_again() -> None:
    """Objects that another root also leads to keep their baseline when the first root is replaced."""
    owner = make_owner()
    state = ObjectState({"train": owner})
    owner.items[5].label = -1
    state.add({"train": Dataset[Any](), "validation": owner})
    assert list(state.state_dict()[NODES]) == ["validation.items[5]"]


def test_record_that_is_met_before_the_list() -> None:
    """A change is found in a part of a record that another object also refers to."""
    owner, other = Dataset[Any](), Dataset[Any]()
    for one in (owner, other):
        items = make_owner().items
        one.best, one.other, one.items = items[5], {}, items
    state, restored = ObjectState({"dataset": owner}), ObjectState({"dataset": other})
    owner.best.box.append(3)
    owner.items[6].label = -1
    assert restored.load_state_dict(state.state_dict()) == []
    assert look(other) == look(owner)
    assert other.best is other.items[5]
