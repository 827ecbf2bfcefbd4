"""Which steps are incidents."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from lightning_faulttolerant import MeasuredStep
from lightning_faulttolerant.records.incidents import NUM_LOSSES, what_happened


def step(loss: float | None, losses: list[float] | None = None, **values: Any) -> MeasuredStep:
    """Return a step with this loss, after steps with these."""
    values = {"step": 7, "epoch": 0, "batch": 7, "gradient_norm": 1.0, **values}
    return MeasuredStep(**values, loss=loss, losses=tuple(losses or ()))


NOT_FINITE = [
    (step(math.nan), "the loss is nan"),
    (step(-math.inf), "the loss is -inf"),
    (step(1.0, not_finite=("a",)), "the gradient of a is not finite"),
    (step(None, not_finite=("a", "b", "c")), "the gradient of a and of 2 more is not finite"),
    (step(1e30), ""),
    (step(None), ""),
]


@pytest.mark.parametrize("rule", ["nan", "spike"])
def test_what_is_not_finite_is_an_incident(rule: str) -> None:
    """Both rules name the loss, or the gradients; a large loss alone is none."""
    assert [what_happened(one, rule) for one, _ in NOT_FINITE] == [what for _, what in NOT_FINITE]
    assert [one.is_finite for one, _ in NOT_FINITE] == [not what for _, what in NOT_FINITE]


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_spike_is_far_above_the_recent_losses(scale: float) -> None:
    """Noise of any scale is none, however long it lasts; ten times its width above the median is one."""
    noise = random.Random(1)
    losses = [scale * (2 + noise.gauss(0, 0.1)) for _ in range(2_000)]
    assert not any(what_happened(step(losses[at], losses[at - NUM_LOSSES : at]), "spike") for at in range(100, 2_000))
    found = [bool(what_happened(step(scale * by, losses[-NUM_LOSSES:]), "spike")) for by in (3.5, 2.5, 0.1)]
    assert found == [True, False, False]
    assert not what_happened(step(scale * 3.5, losses[-NUM_LOSSES:]), "nan")


def test_a_spike_needs_losses_to_compare_with() -> None:
    """With fewer than 20 losses there is none. Losses that are all equal have a width of a hundredth of them."""
    found = [
        bool(what_happened(step(loss, [1.0] * number), "spike")) for loss, number in ((9, 19), (9, 20), (1.05, 20))
    ]
    assert found == [False, True, False]
