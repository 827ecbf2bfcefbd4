"""The law for data sets of Hugging Face's: their own state is not trusted, they are replayed and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.law.test_iterable import noise
from tests.runs import Cut, assert_goes_on, each_cut, each_num_workers, fit_net

# torchdata 0.11 calls what torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep caches to this test, and nothing from the network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def noisy(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Add noise to rows, from all three global generators."""
    return {"x": [torch.as_tensor(row) + noise() for row in rows["x"]]}


def noisy_row(row: dict[str, Any]) -> dict[str, Any]:
    """Add noise to a row."""
    return {"x": np.asarray(row["x"]) + noise()}


def stacked(rows: list[dict[str, Any]]) -> Tensor:
    """Make rows a batch."""
    return torch.stack([torch.as_tensor(row["x"], dtype=torch.float32) for row in rows])


def rows() -> Iterator[dict[str, list[float]]]:
    """Give 32 rows."""
    for row in np.linspace(-1, 1, 128).reshape(32, 4):
        yield {"x": row.tolist()}


def sharded_rows(shards: list[int]) -> Iterator[dict[str, list[float]]]:
    """Give the rows of some shards of 8."""
    every = list(rows())
    for shard in shards:
        yield from every[shard * 8 : shard * 8 + 8]


def table() -> datasets.Dataset:
    """Return 32 rows in memory."""
    return datasets.Dataset.from_dict({"x": [row["x"] for row in rows()]})


def generated() -> datasets.IterableDataset:
    """Return a stream of four shards."""
    return datasets.IterableDataset.from_generator(sharded_rows, gen_kwargs={"shards": [0, 1, 2, 3]})


def drawn() -> np.random.Generator:
    """Return a generator that starts elsewhere in each process, as it does where a stream is given no seed."""
    return np.random.default_rng(int(torch.randint(1000, ())))


MAPS: dict[str, Callable[[Path], datasets.Dataset]] = {
    "dict": lambda cache: table().with_transform(noisy),
    "generator": lambda cache: datasets.Dataset.from_generator(rows, cache_dir=str(cache)).with_transform(noisy),
    "shuffled": lambda cache: table().shuffle(seed=1).select(range(30)).with_transform(noisy),
}


@each_num_workers
@pytest.mark.parametrize("name", MAPS)
def test_map_style(name: str, num_workers: int, tmp_path: Path) -> None:
    """A table goes on in its order, with the draws of its transform; it gives all rows of a batch at once."""

    def train() -> DataLoader[Any]:
        data: Any = MAPS[name](tmp_path)
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers, collate_fn=stacked)

    assert_goes_on(Cut(kill=14, every=13, goes_on_at=(1, 5)), train=train)


STREAMS: dict[str, Callable[[], datasets.IterableDataset]] = {
    "table": lambda: table().to_iterable_dataset(num_shards=4).map(noisy_row),
    "table, shuffled": lambda: table().to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=6),
    "generator": lambda: generated().map(noisy_row),
    "generator, shuffled": lambda: generated().shuffle(seed=3, buffer_size=6).map(noisy_row),
}


def stream_loader(name: str, num_workers: int, kind: Any = DataLoader, **arguments: Any) -> Callable[[], Any]:
    """Return what makes a loader of a stream."""
    return lambda: kind(STREAMS[name](), batch_size=4, num_workers=num_workers, collate_fn=stacked, **arguments)


@each_num_workers
@each_cut
@pytest.mark.parametrize("name", STREAMS)
def test_stream(name: str, cut: Cut, num_workers: int) -> None:
    """A stream goes on with the row that is next, and with what is in its shuffle buffer."""
    assert_goes_on(cut, train=stream_loader(name, num_workers))


@each_num_workers
def test_stream_in_a_stateful_dataloader(num_workers: int) -> None:
    """The state of the stream, with which torchdata would go on, lacks the buffer; it is replayed there too."""
    train = stream_loader("generator, shuffled", num_workers, StatefulDataLoader)
    assert_goes_on(Cut(kill=14, every=13, goes_on_at=(1, 5)), train=train)


class TellsEpoch(Callback):
    """Tells the stream its epoch: each epoch has another order."""

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.train_dataloader.dataset.set_epoch(trainer.current_epoch)


@each_num_workers
def test_stream_that_is_told_its_epoch(num_workers: int) -> None:
    """With ``set_epoch`` the order of a later epoch goes on."""
    train = stream_loader("generator, shuffled", num_workers, persistent_workers=num_workers > 0)
    users = lambda: [TellsEpoch()]  # noqa: E731 - a list of new callbacks for each run
    assert_goes_on(Cut(kill=22, every=21, goes_on_at=(2, 5)), train=train, users=users, max_epochs=3)


class Wrapped(IterableDataset[Any]):
    """Passes a stream on, and its state."""

    def __init__(self) -> None:
        self.stream = STREAMS["generator, shuffled"]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's."""
        return self.stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give it to the stream."""
        self.stream.load_state_dict(state_dict)


@each_num_workers
def test_stream_inside_a_data_set_of_the_users(num_workers: int) -> None:
    """A state that is passed on is not trusted either: it lacks the shuffle buffer."""
    cut = Cut(kill=14, every=13, goes_on_at=(1, 5))
    assert_goes_on(cut, train=lambda: DataLoader(Wrapped(), 4, num_workers=num_workers, collate_fn=stacked))


CHANGED: dict[str, tuple[Callable[[], Any], str]] = {
    "table": (lambda: table().shuffle(generator=drawn()), "indices"),
    "stream of a table": (
        lambda: table().to_iterable_dataset(num_shards=8).shuffle(buffer_size=6, generator=drawn()),
        "source 3 shards",
    ),
    "generator": (lambda: generated().shuffle(buffer_size=6, generator=drawn()), "source 2 shards"),
}


@pytest.mark.parametrize("kill", [3, 8])
@pytest.mark.parametrize("name", CHANGED)
def test_shuffled_without_a_seed(name: str, kill: int) -> None:
    """What has another order in the process that resumes is refused, at the edge of an epoch too."""
    make, value = CHANGED[name]

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, train=DataLoader(make(), batch_size=4, collate_fn=stacked))

    with pytest.raises(AssertionError, match=f"train/0.dataset.{value}: "):
        assert_resumes_exactly(fit, [KillAt(kill)], options={"every_n_train_steps": 1})


@each_num_workers
def test_buffer_shuffled_without_a_seed(num_workers: int) -> None:
    """Where the order of the shards is the same, the generator of the shuffle buffer goes on."""

    def train() -> DataLoader[Any]:
        stream = datasets.IterableDataset.from_generator(rows).shuffle(buffer_size=6, generator=drawn())
        return DataLoader(stream, batch_size=4, num_workers=num_workers, collate_fn=stacked)

    assert_goes_on(Cut(kill=14, every=13, goes_on_at=(1, 5)), train=train)


@each_num_workers
def test_stream_of_other_rows(num_workers: int) -> None:
    """A stream that gives other rows in the process that resumes is refused."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        order = drawn().permutation(32).tolist()
        stream: Any = datasets.IterableDataset.from_generator(lambda: ({"x": [n / 32] * 4} for n in order))
        train = DataLoader(stream, batch_size=4, num_workers=num_workers, collate_fn=stacked)
        return fit_net(callbacks, directory, train=train)

    with pytest.raises(AssertionError, match="gives another sample"):
        assert_resumes_exactly(fit, [KillAt(3)], options={"every_n_train_steps": 1})
