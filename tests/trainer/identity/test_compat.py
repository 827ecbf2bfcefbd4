"""The contract with Lightning and Optuna: the installed versions have the private names that identify fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_faulttolerant.trainer.identity import compat
from tests.contract import missing, private_names
from tests.data_sets import NoisyDataset
from tests.runs import Net, make_trainer


@pytest.mark.parametrize("path", compat.SEAMS)
def test_each_name_is_there(path: str) -> None:
    """Without the name something breaks, and the message says what."""
    assert missing(make_trainer([], Path("unused")), path, compat.SEAMS) is None
    assert compat.SEAMS[path] in str(missing(object(), path, compat.SEAMS))


def test_optuna_has_its_own() -> None:
    """A study gives the place of its storage."""
    optuna = pytest.importorskip("optuna")
    study = optuna.create_study()
    [path] = compat.STUDY_SEAMS
    assert missing(study, path, compat.STUDY_SEAMS) is None
    assert isinstance(compat.storage_of(study), optuna.storages.InMemoryStorage)


def test_no_other_name_is_touched() -> None:
    """Each private name is in the table."""
    paths = [*compat.SEAMS, *compat.STUDY_SEAMS]
    assert private_names(compat) - {part for path in paths for part in path.split(".")} - {"_loaders"} == set()


def test_loaders_by_place() -> None:
    """All loaders that were passed are found, however they are nested."""
    found = dict(compat._loaders({"a": [1, CombinedLoader({"b": 2})], "c": None}, "train"))
    assert found == {"train.a.0": 1, "train.a.1.b": 2}


class Asks(Callback):
    """Asks for the loaders in a validation run."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ask."""
        self.found = compat.given_loaders(trainer)


def test_loaders_of_an_evaluation(tmp_path: Path) -> None:
    """In an evaluation they are those that it was given, and not those of a fit before it."""
    asks = Asks()
    trainer = make_trainer([asks], tmp_path, max_epochs=1)
    of_fit, other = (DataLoader(NoisyDataset(4), batch_size=4) for _ in range(2))
    trainer.fit(Net(), of_fit, other)
    assert asks.found == {"train": of_fit}
    trainer.validate(Net(), other)
    assert asks.found == {"validate": other}
