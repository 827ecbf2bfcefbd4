"""Attributes that wrappers, such as DDP's, leave on a module are not changes of the user's."""

from __future__ import annotations

from types import MethodType

import torch
from lightning.pytorch.overrides.distributed import prepare_for_backward
from torch import Tensor, nn

from lightning_faulttolerant.state.objects.object_state import LOST, NODES, ObjectState


class Doubling(nn.Module):
    """Doubles what it gets."""

    def forward(self, value: Tensor) -> Tensor:
        return 2 * value

    def tripled(self, value: Tensor) -> Tensor:
        return 3 * value


def test_method_that_is_put_back() -> None:
    """The class's own method under its own name is not a change, nor is its removal; DDP leaves it there."""
    module = Doubling()
    state = ObjectState({"module": module})
    module.forward = module.forward  # type: ignore[method-assign]
    assert state.state_dict()[NODES] == {}
    later = ObjectState({"module": module})
    del module.forward
    assert later.state_dict()[NODES] == {}


def test_function_of_lightnings() -> None:
    """A function of Lightning's own, set for the time of a call, is not a change either."""
    module = Doubling()
    state = ObjectState({"module": module})
    module.forward = prepare_for_backward  # type: ignore[assignment]
    assert state.state_dict()[NODES] == {}


def test_method_of_the_users() -> None:
    """Another method, or another object's, is a change, and is restored."""
    module = Doubling()
    state = ObjectState({"module": module})
    module.forward = module.tripled  # type: ignore[method-assign]
    saved = state.state_dict()
    assert saved[LOST] == {}
    fresh = Doubling()
    assert ObjectState({"module": fresh}).load_state_dict(saved) == []
    assert fresh(torch.ones(())) == 3

    other = Doubling()
    module = Doubling()
    state = ObjectState({"module": module, "other": other})
    module.forward = MethodType(Doubling.forward, other)  # type: ignore[method-assign]
    assert "module" in state.state_dict()[NODES]
