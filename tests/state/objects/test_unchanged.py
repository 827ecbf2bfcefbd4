from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_faulttolerant.state.objects.kinds import Namespace
from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.walk import Unchanged


class Holder:
    total = 0

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Slotted:
    __slots__ = ("empty", "filled")

    def __init__(self) -> None:
        self.filled = 1


@dataclass(frozen=True, slots=True)
class Frozen:
    number: int


class Lists(list[Any]):
    pass


def unchanged(value: Any) -> tuple[ObjectState, Unchanged]:
    """Return the state of an object, and its objects as unchanged ones."""
    state = ObjectState({"root": value})
    return state, state.unchanged(state.paths)


def move_between_neighbors(root: Any) -> None:
    """Move the only item of a list to the front of its neighbor."""
    root.value[1].insert(0, root.value[0].pop())


def set_filled(root: Any) -> None:
    """Set a slot that has a value."""
    root.value.filled = 2


def move_between_slots(root: Any) -> None:
    """Fill the empty slot with the value of the other one, which is emptied."""
    root.value.empty = root.value.filled
    del root.value.filled


def counter() -> Callable[[], int]:
    """Return a function with its own variable."""
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


def replace_large(root: Any) -> None:
    """Replace a large tensor in a list by another one, which gets the ``id`` of the first."""
    freed = id(root.value[0])
    root.value.clear()
    kept = [torch.ones(1)]
    while id(kept[-1]) != freed:
        kept.append(torch.ones(1))
    root.value.append(kept[-1])


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], str]] = {
    "attribute": (lambda: 1, lambda root: vars(root).update(value=2), "root"),
    "new attribute": (lambda: 1, lambda root: vars(root).update(other=2), "root"),
    "attribute that is gone": (lambda: 1, lambda root: vars(root).pop("value"), "root"),
    "new name": (lambda: 1, lambda root: vars(root).update(other=vars(root).pop("value")), "root"),
    "item": (lambda: [1, 2], lambda root: root.value.__setitem__(0, 3), "root.value"),
    "order": (lambda: [1, 2], lambda root: root.value.reverse(), "root.value"),
    "long list": (lambda: [[0]] * 300, lambda root: root.value[7].append(1), "root.value"),
    "list that grows long": (list, lambda root: root.value.extend(range(1_000)), "root.value"),
    "list of a class": (lambda: Lists([1]), lambda root: root.value.append(2), "root.value"),
    "deque": (lambda: deque([1], maxlen=1), lambda root: root.value.append(2), "root.value"),
    "dict": (lambda: {1: 2}, lambda root: root.value.update({1: 3}), "root.value"),
    "key": (lambda: {1: 2}, lambda root: root.value.update({3: root.value.pop(1)}), "root.value"),
    "defaultdict": (lambda: defaultdict(int), lambda root: root.value["a"], "root.value"),
    "counter": (lambda: Counter("aab"), lambda root: root.value.update("a"), "root.value"),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda root: root.value.move_to_end("a"), "root.value"),
    "set": (lambda: {1, 2}, lambda root: root.value.add(3), "root.value"),
    "slot": (Slotted, set_filled, "root.value"),
    "empty slot": (Slotted, lambda root: setattr(root.value, "empty", 1), "root.value"),
    "emptied slot": (Slotted, lambda root: delattr(root.value, "filled"), "root.value"),
    "value moved to another slot": (Slotted, move_between_slots, "root.value"),
    "variable of a function": (counter, lambda root: root.value(), "root.value.number"),
    "large tensor in a list": (lambda: [torch.zeros(10_000_000)], replace_large, "root.value"),
    "frozen": (lambda: Frozen(1), lambda root: object.__setattr__(root.value, "number", 2), "root.value"),
    "tensor": (lambda: torch.zeros(2), lambda root: root.value.add_(1), "root.value"),
    "array": (lambda: np.zeros(2), lambda root: np.add(root.value, 1, out=root.value), "root.value"),
    "between neighbors": (lambda: [[1], [2]], move_between_neighbors, "root.value[0]"),
    "between neighbors, to the first": (
        lambda: [[1], [2]],
        lambda root: root.value[0].insert(0, root.value[1].pop()),
        "root.value[0]",
    ),
    "name in a dict": (lambda: {"a": 2}, lambda root: root.value.update(b=root.value.pop("a")), "root.value"),
    "whole dict of attributes": (lambda: 1, lambda root: setattr(root, "__dict__", {**vars(root), "value": 2}), "root"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_change_is_found_once(name: str) -> None:
    """A change is reported at the next check, and not again; the rest stays unchanged."""
    make, change, path = CHANGES[name]
    root = Holder(value=make(), last=Holder(number=0))
    state, objects = unchanged(root)
    assert objects.take_changed() == []
    change(root)
    assert path in state.changed
    assert set(objects.take_changed()) == set(state.changed)
    assert objects.take_changed() == []
    root.last.number = 1
    assert objects.take_changed() == ["root.last"]


def test_equal_value_is_no_change() -> None:
    """An attribute that gets an equal number is unchanged; later changes are found."""
    root = Holder(value=10**30, rows=[2.5])
    _, objects = unchanged(root)
    root.value, root.rows[0] = 10**20 * 10**10, float("2.5")
    assert objects.take_changed() == []
    root.rows[0] = 3.5
    assert objects.take_changed() == ["root.rows"]


def test_class_attribute() -> None:
    """The attributes of a class are compared too."""
    state = ObjectState({"Holder": Namespace(owner=Holder)})
    objects = state.unchanged(state.paths)
    try:
        Holder.total = 1
        assert objects.take_changed() == ["Holder"]
    finally:
        Holder.total = 0
