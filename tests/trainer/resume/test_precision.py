"""The weights of a checkpoint that would lose bits when they are loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_faulttolerant.trainer.resume.parameters import rounded


@pytest.mark.parametrize(
    ("saved", "own", "is_rounded"),
    [
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.float32, False),
        (torch.float64, torch.float32, True),
        (torch.float16, torch.bfloat16, True),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, False),
        (torch.float8_e4m3fn, torch.bfloat16, False),
        (torch.bfloat16, torch.float8_e4m3fn, True),
        (torch.float8_e5m2, torch.float8_e4m3fn, True),
    ],
)
def test_weights_that_would_lose_bits_are_named(saved: torch.dtype, own: torch.dtype, is_rounded: bool) -> None:
    """A type that holds each value of the other loses nothing, even if torch has no common type for both."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(2).to(own), requires_grad=False)
    names = [str(dtype).removeprefix("torch.") for dtype in (saved, own)]
    expected = [f"weight is saved as {names[0]} and would be loaded as {names[1]}"] if is_rounded else []
    assert rounded(module, {"weight": torch.zeros(2).to(saved)}) == expected
