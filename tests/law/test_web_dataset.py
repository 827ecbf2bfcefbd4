"""Pipelines of webdataset: exact with a seed, refused at the start if the clock shuffles."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import webdataset
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.testing import assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.faults import EVERY_STEP
from tests.object_states import EDGE, LATER_EPOCH, slowly
from tests.runs import Net, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:WebDataset.shardshuffle:UserWarning")

NUM_SHARDS, NUM_SAMPLES = 4, 5


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four tar files of 5 samples each."""
    directory = tmp_path_factory.mktemp("shards")
    for shard in range(NUM_SHARDS):
        with tarfile.open(directory / f"{shard:03d}.tar", "w") as file:
            for i in range(NUM_SAMPLES):
                buffer = io.BytesIO()
                torch.save(torch.full((4,), float(shard * NUM_SAMPLES + i)), buffer)
                member = tarfile.TarInfo(f"{shard}-{i}.pth")
                member.size = buffer.tell()
                buffer.seek(0)
                file.addfile(member, buffer)
    return sorted(map(str, directory.glob("*.tar")))


def decoded(dataset: Any) -> Any:
    """Return the pipeline with noise from an augmentation."""
    return dataset.map(lambda sample: torch.load(io.BytesIO(sample["pth"])) + torch.randn(4))


def fluid(shards: list[str]) -> Any:
    """Return a pipeline with seeds, as in webdataset's documentation."""
    return decoded(webdataset.WebDataset(shards, shardshuffle=4, seed=1).shuffle(8, seed=2))


def of_stages(shards: list[str]) -> Any:
    """Return a pipeline from its stages."""
    return webdataset.DataPipeline(
        webdataset.SimpleShardList(shards),
        webdataset.detshuffle(seed=3),
        webdataset.split_by_worker,
        webdataset.tarfile_to_samples(),
        webdataset.shuffle(8, 2, None, 5),
        webdataset.map(lambda sample: torch.load(io.BytesIO(sample["pth"])) + torch.randn(4)),
    )


def resampled(shards: list[str]) -> Any:
    """Return a pipeline that draws its shards with replacement."""
    return webdataset.DataPipeline(
        webdataset.ResampledShards(shards, nshards=4, seed=4, deterministic=True),
        webdataset.tarfile_to_samples(),
        webdataset.map(lambda sample: torch.load(io.BytesIO(sample["pth"])) + torch.randn(4)),
    )


def fit(callbacks: list[Callback], directory: Path, dataset: Any, num_workers: int = 0) -> Trainer:
    """Fit `Net` on the samples of a pipeline."""
    trainer = make_trainer(callbacks, directory)
    trainer.fit(Net(), DataLoader(dataset, 4, num_workers=num_workers), DataLoader(NoisyDataset(4), 4))
    return trainer


@pytest.mark.parametrize("num_workers", [0, slowly(pytest.param(2, id="2"))])
@pytest.mark.parametrize("make", [fluid, slowly(of_stages), slowly(resampled)])
@pytest.mark.parametrize("fault", [LATER_EPOCH, slowly(EDGE)])
def test_with_a_seed(fault: Callback, make: Callable[[list[str]], Any], num_workers: int, shards: list[str]) -> None:
    """A pipeline with a seed continues exactly."""
    assert_resumes_exactly(
        lambda callbacks, directory: fit(callbacks, directory, make(shards), num_workers), [fault], options=EVERY_STEP
    )


WITHOUT_SEED: dict[str, Callable[[list[str]], Any]] = {
    "fluid": lambda shards: decoded(webdataset.WebDataset(shards, shardshuffle=False).shuffle(8)),
    "in a pipeline": lambda shards: webdataset.DataPipeline(fluid(shards), webdataset.shuffle(8, initial=2)),
    "resampled": lambda shards: decoded(webdataset.WebDataset(shards, resampled=True)),
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files of an abandoned pipeline
@pytest.mark.parametrize("name", WITHOUT_SEED)
def test_without_a_seed(name: str, shards: list[str], tmp_path: Path) -> None:
    """A pipeline that the clock shuffles is refused before the first batch; with ``strict=False`` a warning says so."""
    reason = r"Loader train/0 can't be resumed exactly: its .* (shuffles without a seed|resamples its shards)"
    with pytest.raises(NotExactError, match=reason):
        fit([FaultTolerance(dirpath=tmp_path)], tmp_path, WITHOUT_SEED[name](shards))
    lenient = FaultTolerance(dirpath=tmp_path / "lenient", strict=False)
    trainer = make_trainer([lenient], tmp_path, limit_train_batches=2, max_epochs=1)
    trainer.fit(Net(), DataLoader(WITHOUT_SEED[name](shards), 4), DataLoader(NoisyDataset(4), 4))
    assert trainer.global_step == 2
