"""What is read from a step."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_faulttolerant.trainer.steps.flight_recorder import loss_and_norm, not_finite


def norm_of(*gradients: Tensor) -> float:
    """Return the norm of gradients, with all their values in one tensor."""
    return float(torch.cat([gradient.to_dense().double().flatten() for gradient in gradients]).norm())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_value_that_is_not_finite_gets_lost(value: float) -> None:
    """One such value among many makes the norm not finite, and its parameter is named."""
    module = LightningModule()
    module.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    _, norm = loss_and_norm(None, [p.grad for p in module.parameters() if p.grad is not None])
    assert norm == pytest.approx(math.sqrt(24))
    assert not_finite(module) == ()
    assert module.layers[1].weight.grad is not None
    module.layers[1].weight.grad[2, 1] = value
    _, norm = loss_and_norm(None, [p.grad for p in module.parameters() if p.grad is not None])
    assert not math.isfinite(norm)
    assert not_finite(module) == ("layers.1.weight",)


def test_a_norm_that_overflows_names_no_gradient() -> None:
    """Large values whose squares overflow are finite."""
    module = LightningModule()
    module.layer = nn.Linear(2, 2)
    module.layer.weight.grad = torch.full((2, 2), 1e30)
    _, norm = loss_and_norm(None, [module.layer.weight.grad])
    assert math.isinf(norm)
    assert not_finite(module) == ()
