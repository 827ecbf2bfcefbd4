"""Objects that are kept as bytes come back in their places, and share what they shared."""

from __future__ import annotations

import io
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.preprocessing import LabelEncoder
from torch import nn

from lightning_faulttolerant.checkpoint.trust import classes_in, pack, unpack
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
