"""The comparison of batches, with their types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def assert_same(found: Any, expected: Any) -> None:
    """Check that both have the same types, dtypes, shapes, and values, in the same order."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.is_contiguous() == expected.is_contiguous()
        assert torch.equal(found.nan_to_num(7) if found.is_floating_point() else found, expected.nan_to_num(7))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected
