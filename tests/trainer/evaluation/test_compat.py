"""The contract with Lightning's validation runs: the installed version has each private name that we use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSamplerWrapper, _IndexBatchSamplerWrapper
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_faulttolerant.trainer.evaluation import compat
from lightning_faulttolerant.trainer.evaluation.compat import SEAMS
from tests.contract import missing, private_names
from tests.runs import fit_net

# Checked inside a run: its iterator and its fetcher are gone after a fit.
IN_A_RUN = {"_data_fetcher", "_combined_loader", "_iterator", "_iterator_idx", "_idx", "_load_current_iterator"}
ON_BARS = {"_current_eval_dataloader_idx"}
ON_SAMPLERS = {"_batch_sampler", "_sampler"}


class Inside(Callback):
    """Notes which names are missing in a validation run."""

    def __init__(self) -> None:
        self.missing: set[str] | None = None

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        owners = [loop, loop._combined_loader, loop._combined_loader._iterator]
        self.missing = {name for name in IN_A_RUN if not any(hasattr(owner, name) for owner in owners)}


@pytest.fixture(scope="module")
def inside() -> Inside:
    """Return the callback of the fit."""
    return Inside()


@pytest.fixture(scope="module")
def trainer(inside: Inside, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Return a real trainer after a short fit with validation."""
    directory: Path = tmp_path_factory.mktemp("evaluation")
    return fit_net([inside], directory, max_epochs=1, limit_train_batches=2, limit_val_batches=1)


@pytest.mark.parametrize("path", SEAMS)
def test_each_seam_exists(path: str, trainer: Trainer) -> None:
    """The name exists after a fit; if a new Lightning drops it, the failure names the feature that breaks."""
    found = missing(trainer, path, SEAMS)
    assert found is None, found


def test_names_in_a_run_exist(trainer: Trainer, inside: Inside) -> None:
    """The names of the iterator and of the loop exist while a run is under way."""
    assert inside.missing == set()


def test_names_on_other_objects_exist() -> None:
    """Bars note the loader that they show."""
    for bar in (TQDMProgressBar(), RichProgressBar()):
        assert all(hasattr(bar, name) for name in ON_BARS)


def test_names_on_samplers_exist() -> None:
    """Lightning's samplers of predict hold the user's ones, whose order is then known, and put in what is left."""
    sampler = UnrepeatedDistributedSamplerWrapper(SequentialSampler(range(7)), num_replicas=2, rank=1, shuffle=False)
    batches = _IndexBatchSamplerWrapper(BatchSampler(sampler, 2, drop_last=False))  # type: ignore[arg-type]
    loader: DataLoader[int] = DataLoader(range(7), batch_sampler=batches)  # type: ignore[arg-type]
    assert {*vars(batches), *vars(sampler.dataset)} >= ON_SAMPLERS
    assert compat.num_in_order(loader, rank=1, num_ranks=2) == 7
    assert compat.num_in_order(loader, rank=0, num_ranks=2) is None
    assert compat.num_in_order(DataLoader(range(7)), rank=0, num_ranks=1) is None
    compat.put_indices(loader, torch.tensor([6, 0, 3]))
    assert [batch.tolist() for batch in loader] == [[6, 0], [3]]
    assert batches.seen_batch_indices == [[6, 0], [3]]


def test_no_name_escapes_the_contract() -> None:
    """Some test of this file checks each private name that the source uses."""
    checked = {part for path in SEAMS for part in path.split(".")} | IN_A_RUN | ON_BARS | ON_SAMPLERS
    imported = {"_PrefetchDataFetcher", "_PredictionLoop", "_Sequential"}  # an import fails by itself
    assert private_names(compat) - checked - imported == set()
