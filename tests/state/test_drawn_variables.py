"""The names of parts in the script; reading a frame leaves no reference behind."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from lightning_faulttolerant.state.splits import names_of_parts

pytestmark = pytest.mark.skipif(sys.gettrace() is not None, reason="a frame that is traced keeps its variables")


def part() -> Subset[int]:
    """Return a part of a bare data set."""
    return Subset(Dataset[int](), [0])


def test_names() -> None:
    """A variable, a list item, and a variable of the outer function are found, each by its first name."""
    outer = part()

    def inner() -> dict[int, str]:
        test, parts, by_name = part(), [part()], {"test": part()}
        names = names_of_parts()
        assert names[id(test)] == "inner().test"
        assert names[id(parts[0])] == "inner().parts[0]"
        assert names[id(by_name["test"])] == "inner().by_name['test']"
        return names

    assert inner()[id(outer)] == "test_names().outer"


def test_deleted_variables_are_freed() -> None:
    """A variable that a function deletes after the reading is freed; a variable that it creates is in `locals`."""

    def script() -> tuple[weakref.ref[Tensor], dict[str, Any]]:
        big = torch.zeros(10)
        seen = weakref.ref(big)
        names_of_parts()
        del big
        new = 1
        assert seen() is None
        return seen, look(new)

    def look(new: int) -> dict[str, Any]:
        held = [new]
        names_of_parts()
        new += 1
        held.append(new)
        return vars()

    assert script()[1] == {"new": 2, "held": [1, 2]}


def test_locals_of_a_function_stay() -> None:
    """The earlier result of `locals` in a function stays unchanged; a module's variables are not cleared."""

    def script(a: int, b: int) -> None:
        arguments = locals()
        later = part()
        names_of_parts()
        assert arguments == {"a": 1, "b": 2}
        assert later

    script(1, 2)
    namespace: dict[str, Any] = {"__name__": "somewhere", "names_of_parts": names_of_parts, "part": part}
    exec("test = part()\nnames = names_of_parts()", namespace)
    assert namespace["names"][id(namespace["test"])] == "<module>().test"
