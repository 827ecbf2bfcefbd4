"""The contract with Lightning that a ledger relies on: the installed version has its private names."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.ledger import compat
from lightning_faulttolerant.trainer.ledger.compat import SEAMS
from tests.contract import missing, private_names
from tests.runs import fit_net

OWN_NAMES = {"_fetched", "_seen"}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Return a real trainer after a short fit with validation."""
    directory: Path = tmp_path_factory.mktemp("ledger")
    return fit_net([], directory, max_epochs=1, limit_train_batches=2, limit_val_batches=1)


@pytest.mark.parametrize("path", SEAMS)
def test_each_seam_exists(path: str, trainer: Trainer) -> None:
    """The name exists after a fit; if a new Lightning drops it, the failure names the feature that breaks."""
    found = missing(trainer, path, SEAMS)
    assert found is None, found


def test_no_name_escapes_the_contract() -> None:
    """The test above checks each private name that the source uses."""
    checked = {part for path in SEAMS for part in path.split(".")} | OWN_NAMES | {"_DataLoaderIterDataFetcher"}
    assert private_names(compat) - checked == set()


def test_steps_and_values_are_those_of_loggers(trainer: Trainer) -> None:
    """Without a step, it is the number of batches that stepped, or a logged value of that name; the epoch is added."""
    assert compat.as_logged(trainer, {"a": 1.0}, None) == (2, {"a": 1.0, "epoch": 1})
    assert compat.as_logged(trainer, {"a": 1.0, "step": 7.0}, None) == (7, {"a": 1.0})
    assert compat.as_logged(trainer, {"a": 1.0}, 5) == (5, {"a": 1.0})
