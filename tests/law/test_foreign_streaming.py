"""The law for streaming data sets of MosaicML Streaming and LitData: they keep their epochs, and we keep the draws."""

from __future__ import annotations

import contextlib
import random
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_faulttolerant.loader.exactness import why_not_exact
from lightning_faulttolerant.state.generators import HeldGenerators
from lightning_faulttolerant.streaming.format.writer import MDSWriter
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.foreign import mosaic
from tests.processes import in_child, run
from tests.runs import fit_net

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
    # These come from the libraries, in the reading processes.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

NUM_SAMPLES = 32


def row(n: int) -> Tensor:
    """Return a row of a sample, with noise."""
    return torch.linspace(-1, 1, 4) * (n / 16 - 1) + 0.1 * torch.randn(4)


@pytest.fixture(scope="module")
def mosaic_data() -> Iterator[str]:
    """A data set of small shards; the tests' leftovers in shared memory are removed afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        with MDSWriter(out=directory, columns={"n": "int"}, size_limit=128) as writer:
            for n in range(NUM_SAMPLES):
                writer.write({"n": n})
        yield directory
        for file in Path("/dev/shm").glob("*_locals"):
            with contextlib.suppress(FileNotFoundError):  # belongs to another process, which has just ended
                if directory.encode() in file.read_bytes():
                    for left in Path("/dev/shm").glob(f"{file.name.removesuffix('locals')}*"):
                        left.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def litdata_data() -> Iterator[str]:
    """A data set of small chunks."""
    with tempfile.TemporaryDirectory() as directory:

        def write() -> None:
            from litdata.streaming.cache import Cache

            cache = Cache(directory, chunk_size=5)
            for n in range(NUM_SAMPLES):
                cache[n] = n
            cache.done()
            cache.merge()

        assert in_child(write) == 0
        yield directory


def mosaic_loader(data: str, num_workers: int) -> DataLoader[Any]:
    """Return the original library's loader over a shuffled data set that draws."""
    streaming = mosaic()

    class Rows(streaming.StreamingDataset):  # type: ignore[misc]
        def __getitem__(self, at: Any) -> Tensor:
            return row(super().__getitem__(at)["n"])

    # Its lock files are here; each process has its own directory.
    tempfile.tempdir = tempfile.mkdtemp(dir=data)
    dataset = Rows(local=data, shuffle=True, batch_size=4)
    return streaming.StreamingDataLoader(dataset, batch_size=4, num_workers=num_workers)


def litdata_loader(data: str, num_workers: int) -> DataLoader[Any]:
    """Return LitData's loader over a shuffled data set that draws."""
    import litdata

    class Rows(litdata.StreamingDataset):
        def __getitem__(self, at: Any) -> Tensor:
            return row(super().__getitem__(at))

    return litdata.StreamingDataLoader(Rows(data, shuffle=True), batch_size=4, num_workers=num_workers)


def litdata_in_torchs_loader(data: str, num_workers: int) -> DataLoader[Any]:
    """Return torch's own loader over the same data set, which then counts the epochs itself."""
    return DataLoader(litdata_loader(data, num_workers).dataset, batch_size=4, num_workers=num_workers)


def assert_continues(make: Callable[[str, int], DataLoader[Any]], data: str, num_workers: int) -> None:
    """Check that a fit obeys the law, killed in the first epoch and in the second."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        warnings.simplefilter("ignore")
        return fit_net(callbacks, directory, train=make(data, num_workers))

    costs = assert_resumes_exactly(fit, [KillAt(3), KillAt(8)], options={"every_n_train_steps": 1})
    assert [(cost.epoch, cost.batch) for cost in costs] == [(0, 3), (1, 3)]


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_mosaic_continues(mosaic_data: str, num_workers: int) -> None:
    """The order and the workers' draws continue, in the first epoch and in a later one."""
    assert_continues(mosaic_loader, mosaic_data, num_workers)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_litdata_continues(litdata_data: str, num_workers: int) -> None:
    """The same holds for LitData."""
    assert_continues(litdata_loader, litdata_data, num_workers)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_litdata_in_torchs_loader_continues(litdata_data: str, num_workers: int) -> None:
    """And for LitData's data set in a loader of torch."""
    assert_continues(litdata_in_torchs_loader, litdata_data, num_workers)


class Jittered:
    """A transform that draws from its own generator."""

    def __init__(self) -> None:
        self.rng = random.Random(7)

    def __call__(self, n: int) -> Tensor:
        return torch.linspace(-1, 1, 4) * (n / 16 - 1) + self.rng.gauss(0, 1)


def test_the_generators_of_a_transform_of_litdata_are_kept(litdata_data: str) -> None:
    """The generator of a transform in LitData's data set is found; it would start over in a new process."""

    def look() -> None:
        import litdata

        dataset = litdata.StreamingDataset(litdata_data, shuffle=True, transform=Jittered())
        assert len(HeldGenerators({"dataset": dataset})) == 1

    ended = run(look)
    assert ended.exit_code == 0, ended.output


class PassedOn(IterableDataset[Any]):
    """Passes on the samples of another data set."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter(self.inner)


def test_data_sets_whose_epochs_cant_be_set_are_refused(litdata_data: str) -> None:
    """Mixtures and wrappers of streaming data sets are refused with the reason; the data sets themselves are not."""

    def refused() -> None:
        import litdata

        parts = [litdata.StreamingDataset(litdata_data) for _ in range(2)]
        mixture = litdata.CombinedStreamingDataset(parts)
        for loader in (litdata.StreamingDataLoader(mixture), DataLoader(mixture), DataLoader(PassedOn(parts[0]))):
            assert "passes on the samples of streaming data sets of LitData" in str(why_not_exact(loader))
        assert why_not_exact(litdata.StreamingDataLoader(parts[0], batch_size=2)) is None

    ended = run(refused)
    assert ended.exit_code == 0, ended.output
