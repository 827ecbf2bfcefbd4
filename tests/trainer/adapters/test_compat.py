"""The contract with Lightning's callbacks: the installed version has each private name that an adapter uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.fabric.utilities.throughput import Throughput
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, ThroughputMonitor, Timer

from lightning_faulttolerant.trainer.adapters import compat
from lightning_faulttolerant.trainer.adapters.compat import SEAMS, WEIGHT_AVERAGING
from tests.contract import missing, private_names
from tests.runs import Net, fit_net


class Plain(Net):
    """One optimizer without a scheduler, and a norm."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the objects that have the seams: a trainer after a short fit with averages, and its callbacks."""
    average = StochasticWeightAveraging(0.1, swa_epoch_start=1)
    arguments: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0}
    trainer: Trainer = fit_net([average], tmp_path_factory.mktemp("averages"), module=Plain(), **arguments)
    found = {
        "trainer": trainer,
        "StochasticWeightAveraging": average,
        "ModelPruning": ModelPruning("l1_unstructured"),
        "ThroughputMonitor": ThroughputMonitor(len),
        "Throughput": Throughput(),
        "Timer": Timer(),
    }
    return {**found, **{kind.__name__: kind() for kind in WEIGHT_AVERAGING}}


@pytest.mark.parametrize("path", SEAMS)
def test_each_seam_exists(path: str, owners: dict[str, Any]) -> None:
    """The name exists after a fit; if a new Lightning drops it, the failure names the feature that breaks."""
    owner = path.partition(".")[0]
    if owner in owners:
        found = missing(owners[owner], path, SEAMS)
        assert found is None, found
    else:
        assert (owner, WEIGHT_AVERAGING) == ("WeightAveraging", ())


def test_no_name_escapes_the_contract() -> None:
    """The tests of this folder check each private name that the source uses."""
    tables = (SEAMS, compat.RESULT_SEAMS)
    checked = {part for table in tables for path in table for part in path.split(".")}
    on_values = {"_forward_cache", "_update_count", "_computed", "_defaults", "_sync", "_should"}
    assert private_names(compat) - checked - on_values == set()
