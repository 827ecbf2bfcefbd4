"""An object whose state goes through a checkpoint into a fresh one."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch

from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.saved import LOST, NODES, TABLE
from lightning_faulttolerant.state.packing import pack_blobs, unpack_blobs
from tests.damage import bytes_of


def through_a_file(state: Any) -> Any:
    """Return `state` as it comes out of a checkpoint that is loaded safely."""
    file = io.BytesIO(bytes_of(pack_blobs({"state": state})))
    return unpack_blobs(torch.load(file, weights_only=True))["state"]


def carried(make: Callable[[], Any], change: Callable[[Any], None]) -> tuple[Any, Any]:
    """Return an object that was changed, which is seen once, and a fresh one that got its state."""
    changed, fresh = make(), make()
    state = ObjectState({"root": changed})
    assert state.state_dict() == {NODES: {}, TABLE: [], LOST: {}}
    objects = state.unchanged(state.paths)
    assert objects.take_changed() == []
    change(changed)
    assert set(objects.take_changed()) == set(state.changed) != set()
    assert objects.take_changed() == []
    saved = through_a_file(state.state_dict())
    assert saved[NODES]
    assert saved[LOST] == {}
    there = ObjectState({"root": fresh})
    assert there.load_state_dict(saved) == []
    assert there.state_dict()[NODES].keys() == saved[NODES].keys()  # a second resume carries the same
    return changed, fresh
