"""No attribute stops a run: what can't be read is left alone, and what lies next to it is carried."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.nested import nested_tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.state.objects.object_state import ObjectState
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.trainer.run.fingerprint import loader_fingerprint
from tests.laws.data_sets import NoisyDataset


class HasNoClass:
    """Raises when anybody asks for its class, as a proxy does whose object can't be created."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError

    @__class__.setter
    def __class__(self, value: Any) -> None:
        raise RuntimeError


class HasNoLength(list[object]):
    """Raises in the methods of its base."""

    def __len__(self) -> int:
        raise RuntimeError

    def __iter__(self) -> Any:
        raise RuntimeError


class Forgets(nn.Module):
    """Does not call the constructor of its base."""

    def __init__(self) -> None:
        pass


class Missing:
    """Stands for a package that is not installed, as MONAI's ``optional_import`` returns it."""

    def __getattr__(self, name: str) -> None:
        raise ImportError(name)


def _deleted() -> object:
    return weakref.proxy(HasNoLength())


def _freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def _nested() -> object:
    found: list[Any] = []
    for _ in range(30_000):
        found = [found]
    return found


STRANGE: dict[str, Callable[[], Any]] = {
    "one element with stride 0": lambda: torch.zeros(1).expand(3)[:1],
    "stride 0": lambda: torch.zeros(1).expand(100_000),
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "freed": _freed,
    "lazy": lambda: nn.LazyBatchNorm1d(),
    "masked": lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    "large masked": lambda: np.ma.masked_array(np.zeros(30_000)),
    "deleted": _deleted,
    "no class": HasNoClass,
    "no length": HasNoLength,
    "not a module": Forgets,
    "mock": lambda: mock.MagicMock(spec=dict),
    "deep": _nested,
    "ragged": lambda: nested_tensor([torch.ones(2), torch.ones(3)]),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "missing": Missing,
    "library": lambda: ctypes.LibraryLoader(ctypes.CDLL),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("rules", [Rules(), Rules(max_items=1_000)], ids=["main", "worker"])
@pytest.mark.parametrize("make", STRANGE.values(), ids=STRANGE)
def test_strange_values_are_left_alone(make: Callable[[], Any], rules: Rules) -> None:
    """A strange value neither stops a state nor hides another attribute, and a fingerprint can be computed."""
    data = NoisyDataset(4)
    vars(data).update(value=make(), step=0, rng=np.random.default_rng(0))
    state, held = ObjectState({"data": data}, rules), HeldGenerators({"data": data})
    data.step = 1
    state.carry_copies([torch.zeros(3)])
    assert [*state.changed] == ["data"]
    assert ["step", 1] in state.state_dict()["nodes"]["data"]["attributes"]
    assert [*held.state_dict()] == ["data.rng"]
    assert loader_fingerprint(DataLoader(data)) is not None
    new = SimpleNamespace()
    state = ObjectState({"new": new}, rules)
    new.value = make()
    state.state_dict()
