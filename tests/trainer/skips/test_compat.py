"""The contract with Lightning's loops: each private name that skipping a batch needs exists."""

from __future__ import annotations

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle, _MinSize, _Sequential

from lightning_faulttolerant.trainer.skips import compat
from tests.contract import missing, private_names


@pytest.mark.parametrize("path", compat.SEAMS)
def test_each_seam_exists(path: str) -> None:
    """The name exists; if a new Lightning drops it, the failure names the feature that breaks."""
    found = missing(Trainer(logger=False, enable_checkpointing=False, accelerator="cpu"), path, compat.SEAMS)
    assert found is None, found


def test_no_name_escapes_the_contract() -> None:
    """Some test of this file checks each private name that the source uses."""
    checked = {part for path in compat.SEAMS for part in path.split(".")} | {"_idx", "_iterator"}
    assert private_names(compat) - checked == set()


def test_names_beside_the_trainer_exist() -> None:
    """A batch that can't be loaded is counted by the iterators of combined loaders."""
    for kind in (_MaxSizeCycle, _MinSize, _Sequential):
        assert hasattr(kind([]), "_idx"), "a batch that can't be loaded would not be counted."
