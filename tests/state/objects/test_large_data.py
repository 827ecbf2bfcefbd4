"""Large arrays and tensors: which of them are carried, and how long they are held."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.saved import LOST, NODES
from lightning_faulttolerant.state.objects.walk import Rules

_NUM = 500_000
IN_A_WORKER = Rules(max_items=1_000)


@pytest.mark.parametrize("mode", ["r+", "c"])
@pytest.mark.parametrize("wrap", [lambda a: a, np.asarray, lambda a: a[2:].reshape(-1, 2)], ids=["it", "base", "part"])
def test_mapped_file_is_no_state(tmp_path: Path, mode: Any, wrap: Any) -> None:
    """Data written into a mapped file is not state, nor is a mapped file that is opened later."""
    np.zeros(100, dtype=np.float32).tofile(tmp_path / "data")
    owner = SimpleNamespace(data=wrap(np.memmap(tmp_path / "data", dtype=np.float32, mode=mode)), late=None)
    state = ObjectState({"dataset": owner})
    owner.data[:] = 1
    owner.late = wrap(np.memmap(tmp_path / "data", dtype=np.float32, mode=mode))
    saved = state.state_dict()
    assert not saved[NODES]
    assert not saved[LOST]


@pytest.mark.parametrize("make", [lambda: np.zeros(_NUM), lambda: torch.zeros(_NUM)], ids=["array", "tensor"])
def test_large_data_in_a_worker(make: Any) -> None:
    """A few elements are read of an array that is too large to be carried, and all elements of a small one."""
    owner = SimpleNamespace(data=make(), counts=np.zeros(5_000))
    state = ObjectState({"dataset": owner}, IN_A_WORKER)
    assert not state.state_dict()[NODES]
    owner.data.fill(1) if isinstance(owner.data, np.ndarray) else owner.data.fill_(1)
    assert state.state_dict(max_bytes=65_536)[LOST].keys() == {"dataset.data"}
    owner.counts[4_321] += 1
    assert "dataset.counts" in state.state_dict(max_bytes=65_536)[NODES]


@pytest.mark.parametrize("make", [lambda: np.random.rand(_NUM), lambda: torch.rand(_NUM)], ids=["array", "tensor"])
def test_what_is_replaced_is_freed(make: Any) -> None:
    """A large array that training replaces is no longer held, and its replacement is carried."""
    owner, other = (SimpleNamespace(teacher=make(), features=[make()], known=None) for _ in range(2))
    state, restored = ObjectState({"module": owner}), ObjectState({"module": other})
    gone = [weakref.ref(owner.teacher), weakref.ref(owner.features[0])]
    owner.teacher = make()
    owner.features[0] = make()
    assert [ref() for ref in gone] == [None, None]
    assert restored.load_state_dict(state.state_dict()) == []
    assert bool((other.teacher == owner.teacher).all())
    assert bool((other.features[0] == owner.features[0]).all())


def test_another_tensor_in_the_same_place_is_seen() -> None:
    """A new tensor is a different one, even if it has the memory of the old one."""
    owner = SimpleNamespace(teacher=torch.zeros(_NUM))
    state = ObjectState({"module": owner})
    unchanged = state.unchanged(["module"])
    for _ in range(20):
        owner.teacher = None
        owner.teacher = torch.zeros(_NUM)
    assert unchanged.take_changed() == ["module"]
    assert list(state.state_dict()[NODES]) == ["module"]


def test_constant_is_no_copy_of_a_weight() -> None:
    """Ones that equal the weights of a norm are ignored, unless their holder also copies other weights."""
    weights = [torch.rand(4), torch.ones(64), torch.zeros(4)]
    owner = SimpleNamespace(ones=torch.ones(64), anchor=[weight.clone() for weight in weights], zeros=[torch.zeros(4)])
    state = ObjectState({"module": owner})
    state.carry_copies(weights)
    assert state.state_dict()[NODES].keys() == {f"module.anchor[{i}]" for i in range(3)}
