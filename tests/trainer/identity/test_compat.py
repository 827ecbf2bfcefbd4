"""The contract with Lightning and Optuna: the installed versions have the private names that identify fits."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch.utilities import CombinedLoader

from lightning_faulttolerant.trainer.identity import compat
from tests.contract import missing, private_names
from tests.runs import make_trainer


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
