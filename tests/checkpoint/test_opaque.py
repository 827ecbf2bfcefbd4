"""Objects that are kept as bytes come back in their places, and share what they shared."""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.preprocessing import LabelEncoder, StandardScaler
from torch import nn
from torchmetrics import MeanMetric

from lightning_faulttolerant.checkpoint.trust import classes_in, lines_to_allow, pack, unpack
from lightning_faulttolerant.checkpoint.verify import unsafe_paths
from lightning_faulttolerant.errors import CheckpointError


@dataclass
class Holds:
    """An object that refers to others."""

    first: Any
    second: Any = None


class Color(Enum):
    """A key that weights_only refuses."""

    RED = 1


def again(checkpoint):
    """Return a checkpoint after packing, writing, loading with weights_only=True, and unpacking."""
    packed, buffer = pack(checkpoint), io.BytesIO()
    torch.save([packed.checkpoint, packed.pool], buffer)
    buffer.seek(0)
    loaded, pool = torch.load(buffer, weights_only=True)
    unpack(loaded, pool)
    return loaded


def test_all_kinds_come_back_in_their_order():
    """Objects come back also as keys, in tuples, and in nested dicts and lists; a dict keeps its order."""
    checkpoint = {
        "epoch": 1,
        "path": Path("/data"),
        "nested": {"list": [1, {"deep": Path("/deep")}], 3: Fraction(1, 3)},
        "tuple": (1, (2, Path("/in/a/tuple"))),
        "keys": {Color.RED: 1},
        "alike": {1: Path("/one"), "1": Path("/text")},
        "class": Fraction,
        "last": "plain",
    }
    assert again(checkpoint) == checkpoint
    assert list(again(checkpoint)) == list(checkpoint)
    batch_norm = nn.BatchNorm1d(2).state_dict()
    assert again({"state_dict": batch_norm, **checkpoint})["state_dict"]._metadata == batch_norm._metadata


TABLE = pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]})
METRIC = MeanMetric()
METRIC.update(torch.tensor(3.0))
OF_LIBRARIES = {
    "table": (TABLE, lambda found: found.equals(TABLE)),
    "encoder": (LabelEncoder().fit(["a", "b"]), lambda found: found.classes_.tolist() == ["a", "b"]),
    "scaler": (StandardScaler().fit(np.arange(6.0).reshape(3, 2)), lambda found: found.mean_.tolist() == [2.0, 3.0]),
    "array": (np.arange(3), lambda found: found.tolist() == [0, 1, 2]),
    "scalar": (np.float64(2), lambda found: found == 2),
    "metric": (METRIC, lambda found: found.compute() == 3),
    "loss": (nn.CrossEntropyLoss(), lambda found: found.reduction == "mean"),
    "nested": (Holds(Path("/a"), Fraction(1, 3)), lambda found: found == Holds(Path("/a"), Fraction(1, 3))),
    "key": ({Color.RED: 1}, lambda found: found == {Color.RED: 1}),
}


@pytest.mark.parametrize(("value", "is_same"), OF_LIBRARIES.values(), ids=OF_LIBRARIES)
def test_objects_of_libraries_come_back_and_can_be_allowed(value, is_same):
    """Each object has its values again. With the lines for a script, it loads with weights_only=True."""
    assert is_same(again({"here": value})["here"])
    lines, buffer, before = lines_to_allow([value]), io.BytesIO(), torch.serialization.get_safe_globals()
    torch.save(value, buffer)
    torch.serialization.clear_safe_globals()
    try:
        buffer.seek(0)
        with pytest.raises(Exception, match="Weights only load failed"):
            torch.load(buffer, weights_only=True)
        exec("\n".join(["import torch", *lines]), {})
        buffer.seek(0)
        assert is_same(torch.load(buffer, weights_only=True))
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


def test_what_is_shared_stays_shared():
    """Objects share again with each other, with plain containers, and with tensors, whose memory is written once."""
    module, shared, encoder = nn.Linear(200, 200), [1, 2], LabelEncoder()
    checkpoint = {
        "state_dict": module.state_dict(),
        "module": module,
        "plain": {"shared": shared},
        "one": Holds(shared, encoder),
        "two": encoder,
        "weight": Holds(module.weight),
    }
    packed, buffer = pack(checkpoint), io.BytesIO()
    torch.save([packed.checkpoint, packed.pool], buffer)
    assert buffer.tell() < 1.1 * 4 * 200 * 201 + 10_000
    found = again(checkpoint)
    assert found["one"].first is found["plain"]["shared"]
    assert found["one"].second is found["two"]
    assert found["weight"].first is found["module"].weight
    assert found["module"].weight.data_ptr() == found["state_dict"]["weight"].data_ptr()
    assert isinstance(found["module"].weight, nn.Parameter)


def test_the_users_own_containers_are_left_alone():
    """Objects are replaced in a copy of their container, cycles too; where there is nothing to keep, none is copied."""
    own = {"path": Path("/data"), "plain": [1]}
    ring: list[Any] = [own]
    ring.append(ring)
    found = again({"own": own, "ring": ring})
    assert found["own"] == own == {"path": Path("/data"), "plain": [1]}
    assert found["ring"][1] is found["ring"]
    assert found["ring"][0] is found["own"]
    inner = OrderedDict(weight=torch.zeros(2))
    packed = pack({"state_dict": inner, "epoch": 3})
    assert packed.checkpoint["state_dict"] is inner
    assert packed.pool == {}


def test_what_can_not_be_pickled_or_recreated_is_named(monkeypatch):
    """It stays as it is, and the others are still kept as bytes; a class that is gone is named with its place."""
    shared = Fraction(1, 3)
    packed = pack({"bad": Holds(shared, lambda: 1), "good": Holds(shared, Path("/data"))})
    assert list(packed.failures) == ["bad"]
    assert "Holds: " in packed.failures["bad"]
    assert classes_in(packed.pool) == {"good": f"{__name__}.Holds"}
    assert unsafe_paths(packed.checkpoint) == ["bad"]
    loaded = dict(packed.checkpoint)
    unpack(loaded, packed.pool)
    assert loaded["good"] == Holds(shared, Path("/data"))
    packed = pack({"here": {"mine": Holds(1)}})
    monkeypatch.delattr(f"{__name__}.Holds")
    with pytest.raises(
        CheckpointError, match=rf"here/mine, an object of the class {__name__}.Holds, can't be recreated"
    ):
        unpack(packed.checkpoint, packed.pool)


class Reaches:
    """Needs getattr to be recreated."""

    def __reduce__(self) -> Any:
        return getattr, ("", "upper")


def test_lines_name_each_class_by_its_module_and_none_where_none_is_safe(monkeypatch):
    """Allowing getattr would allow everything, and no line allows an object that can't be pickled."""
    assert lines_to_allow([Reaches()]) is lines_to_allow([lambda: 1]) is None
    theirs, ours = Fraction(1, 3), type("Fraction", (), {"__module__": __name__, "__qualname__": "Fraction"})
    monkeypatch.setattr(f"{__name__}.Fraction", ours)
    assert sum("import Fraction as " in line for line in lines_to_allow([theirs, ours()])) == 1
