"""The contract with Lightning's logged values: the installed version has each private name that we use."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.adapters import compat
from lightning_faulttolerant.trainer.adapters.compat import RESULT_SEAMS
from tests.contract import missing
from tests.runs import fit_net

ON_VALUES = {"_forward_cache", "_update_count", "_computed", "_defaults"}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Return a real trainer after a short fit with validation."""
    directory: Path = tmp_path_factory.mktemp("logged")
    return fit_net([], directory, max_epochs=1, limit_train_batches=2, limit_val_batches=1)


@pytest.mark.parametrize("path", RESULT_SEAMS)
def test_each_seam_exists(path: str, trainer: Trainer) -> None:
    """The name exists after a fit; if a new Lightning drops it, the failure names the feature that breaks."""
    found = missing(trainer, path, RESULT_SEAMS)
    assert found is None, found


def test_names_on_values_exist(trainer: Trainer) -> None:
    """The installed Lightning has the names on logged values."""
    items = [item for found in compat.result_collections(trainer).values() for item in found.values()]
    assert items
    for name in (*ON_VALUES, "has_reset", "update_count", "is_tensor"):
        assert hasattr(items[0], name), f"Logged values have no {name}: results of an epoch would be lost."
    assert hasattr(items[0].meta, "_sync")
