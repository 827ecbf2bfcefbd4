"""The contract with Lightning's Timer: each private name that is touched exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Timer

from lightning_faulttolerant.trainer.monitors import compat


@pytest.mark.parametrize("name", compat.TIMER_SEAMS)
def test_each_seam_exists(name: str) -> None:
    """The name is there; if a new Lightning drops it, the failure says which feature breaks."""
    assert hasattr(Timer(), name), f"{name} is gone; what breaks: {compat.TIMER_SEAMS[name]}"


def test_no_name_escapes_the_contract() -> None:
    """Each private name that the source touches is in the table."""
    tree = ast.parse(Path(compat.__file__).read_text(encoding="utf-8"))
    touched = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert {name for name in touched if name.startswith("_") and not name.startswith("__")} == set(compat.TIMER_SEAMS)
