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


def again(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint after packing, writing, loading with weights_only=True, and unpacking."""
    packed = pack(checkpoint)
    buffer = io.BytesIO()
    torch.save([packed.checkpoint, packed.pool], buffer)
    buffer.seek(0)
    loaded, pool = torch.load(buffer, weights_only=True)
    unpack(loaded, pool)
    return loaded


def test_all_kinds_come_back_in_their_order() -> None:
    """Objects come back also as keys, in tuples, and in nested dicts and lists; a dict keeps its order."""
    checkpoint = {
        "epoch": 1,
        "path": Path("/data"),
        "nested": {"list": [1, {"deep": Path("/deep")}], 3: Fraction(1, 3)},
        "tuple": (1, (2, Path("/in/a/tuple"))),
        "keys": {Color.RED: 1},
        "class": Fraction,
        "last": "plain",
    }
    assert again(checkpoint) == checkpoint
    assert list(again(checkpoint)) == list(checkpoint)


def test_objects_of_libraries_come_back() -> None:
    """Tables, encoders, arrays, metrics, and modules come back with their values."""
    metric = MeanMetric()
    metric.update(torch.tensor(3.0))
    found = again(
        {
            "table": pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}),
            "encoder": LabelEncoder().fit(["a", "b"]),
            "scaler": StandardScaler().fit(np.arange(6.0).reshape(3, 2)),
            "array": np.arange(3),
            "metric": metric,
        }
    )
    assert found["table"].equals(pd.DataFrame({"a": [1.0, 2.0], "b": ["x", "y"]}))
    assert found["encoder"].classes_.tolist() == ["a", "b"]
    assert found["scaler"].mean_.tolist() == [2.0, 3.0]
    assert found["array"].tolist() == [0, 1, 2]
    assert found["metric"].compute() == 3


def test_what_is_shared_stays_shared() -> None:
    """Objects share again with each other, with plain containers, and with tensors, whose memory is written once."""
    module, shared = nn.Linear(200, 200), [1, 2]
    encoder = LabelEncoder()
    checkpoint: dict[str, Any] = {
        "state_dict": module.state_dict(),
        "module": module,
        "plain": {"shared": shared},
        "one": Holds(shared, encoder),
        "two": encoder,
        "weight": Holds(module.weight),
    }
    packed = pack(checkpoint)
    buffer = io.BytesIO()
    torch.save([packed.checkpoint, packed.pool], buffer)
    assert buffer.tell() < 1.1 * 4 * 200 * 201 + 10_000
    found = again(checkpoint)
    assert found["one"].first is found["plain"]["shared"]
    assert found["one"].second is found["two"]
    assert found["weight"].first is found["module"].weight
    assert found["module"].weight.data_ptr() == found["state_dict"]["weight"].data_ptr()
    assert isinstance(found["module"].weight, nn.Parameter)


def test_the_users_own_containers_are_left_alone() -> None:
    """Objects are replaced in a copy of their container; a container that holds itself is copied as it is."""
    own: dict[str, Any] = {"path": Path("/data"), "plain": [1]}
    ring: list[Any] = [own]
    ring.append(ring)
    found = again({"own": own, "ring": ring})
    assert own == {"path": Path("/data"), "plain": [1]}
    assert found["ring"][1] is found["ring"]
    assert found["ring"][0] is found["own"]
    assert found["own"] == own


def test_nothing_is_copied_where_there_is_nothing_to_keep() -> None:
    """A checkpoint of plain values is unchanged."""
    inner = OrderedDict(weight=torch.zeros(2))
    packed = pack({"state_dict": inner, "epoch": 3})
    assert packed.checkpoint["state_dict"] is inner
    assert packed.pool == {}


def test_attributes_of_a_state_dict_are_kept() -> None:
    """The attribute with the versions of a module's state_dict is kept."""
    found = again({"state_dict": nn.BatchNorm1d(2).state_dict(), "path": Path("/data")})
    assert found["state_dict"]._metadata == nn.BatchNorm1d(2).state_dict()._metadata


def test_keys_that_read_alike_are_two() -> None:
    """The keys 1 and "1" have different places."""
    assert again({"a": {1: Path("/one"), "1": Path("/text")}}) == {"a": {1: Path("/one"), "1": Path("/text")}}


def test_what_can_not_be_pickled_stays_and_is_named() -> None:
    """An object that can't be pickled stays and is named; the others are still kept as bytes."""
    shared = Fraction(1, 3)
    packed = pack({"bad": Holds(shared, lambda: 1), "good": Holds(shared, Path("/data"))})
    assert list(packed.failures) == ["bad"]
    assert "Holds: " in packed.failures["bad"]
    assert classes_in(packed.pool) == {"good": f"{__name__}.Holds"}
    assert unsafe_paths(packed.checkpoint) == ["bad"]
    loaded = dict(packed.checkpoint)
    unpack(loaded, packed.pool)
    assert loaded["good"] == Holds(shared, Path("/data"))


def test_a_class_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the object's place and its class."""
    packed = pack({"here": {"mine": Holds(1)}})
    monkeypatch.delattr(f"{__name__}.Holds")
    with pytest.raises(
        CheckpointError, match=rf"here/mine, an object of the class {__name__}.Holds, can't be recreated"
    ):
        unpack(packed.checkpoint, packed.pool)


@pytest.mark.parametrize(
    "value",
    [
        pd.DataFrame({"a": [1.0], "b": ["x"]}),
        LabelEncoder().fit(["a", "b"]),
        StandardScaler().fit(np.arange(6.0).reshape(3, 2)),
        Path("/data"),
        Holds(Path("/data"), Fraction(1, 3)),
        MeanMetric(),
        nn.CrossEntropyLoss(),
        np.arange(3),
        np.float64(2),
        {Color.RED: 1},
    ],
    ids=lambda value: type(value).__name__,
)
def test_lines_that_allow_objects(value: Any) -> None:
    """With these lines in a script, the object loads with weights_only=True."""
    lines = lines_to_allow([value])
    assert lines is not None
    buffer = io.BytesIO()
    torch.save(value, buffer)
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        buffer.seek(0)
        with pytest.raises(Exception, match="Weights only load failed"):
            torch.load(buffer, weights_only=True)
        exec("\n".join(["import torch", *lines]), {})
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)


class Reaches:
    """Needs getattr to be recreated."""

    def __reduce__(self) -> Any:
        return getattr, ("", "upper")


def test_no_lines_where_none_is_safe_or_enough() -> None:
    """Allowing getattr would allow everything, and no line allows an object that can't be pickled."""
    assert lines_to_allow([Reaches()]) is None
    assert lines_to_allow([lambda: 1]) is None


def test_two_classes_of_one_name_get_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines name each class by its module."""
    theirs, ours = Fraction(1, 3), type("Fraction", (), {"__module__": __name__, "__qualname__": "Fraction"})
    monkeypatch.setattr(f"{__name__}.Fraction", ours)
    lines = lines_to_allow([theirs, ours()])
    assert lines is not None
    assert sum("import Fraction as " in line for line in lines) == 1
