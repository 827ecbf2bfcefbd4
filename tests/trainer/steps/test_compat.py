"""The contract with Lightning about single steps: the installed version has the private names that we use."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.steps import compat
from lightning_faulttolerant.trainer.steps.compat import SEAMS
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
    """The tests of this folder check each private name that the source uses."""
    seams = {part for path in SEAMS for part in path.split(".")} | {
        *compat.LOGGER_SEAMS,
        *compat.MODEL_CHECKPOINT_SEAMS,
    }
    of_fetchers = {"_DataLoaderIterDataFetcher", "_iterator", "_idx"}
    checked = seams | OWN_NAMES | of_fetchers
    assert private_names(compat) - checked == set()


def test_steps_and_values_are_those_of_loggers(trainer: Trainer) -> None:
    """Without a step, it is the number of batches that stepped, or a logged value of that name; the epoch is added."""
    assert compat.as_logged(trainer, {"a": 1.0}, None) == (2, {"a": 1.0, "epoch": 1})
    assert compat.as_logged(trainer, {"a": 1.0, "step": 7.0}, None) == (7, {"a": 1.0})
    assert compat.as_logged(trainer, {"a": 1.0}, 5) == (5, {"a": 1.0})
