"""The contract with Lightning's combined loaders: the private name that skipping a batch needs exists."""

from __future__ import annotations

from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle, _MinSize, _Sequential


def test_names_beside_the_trainer_exist() -> None:
    """A batch that can't be loaded is counted by the iterators of combined loaders."""
    for kind in (_MaxSizeCycle, _MinSize, _Sequential):
        assert hasattr(kind([]), "_idx"), "a batch that can't be loaded would not be counted."
