"""The law for Hugging Face data sets: their state is not trusted, so they are replayed and compared."""

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
from tests.data_sets import noise
from tests.runs import LATER_EPOCH, Cut, assert_continues, assert_loader_continues, each_cut, each_num_workers, fit_net

# torchdata 0.11 calls functions that torch 2.13 has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep caches inside this test, and use no network."""
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
    """Collate rows into a batch."""
    return torch.stack([torch.as_tensor(row["x"], dtype=torch.float32) for row in rows])


def rows(num_rows: int) -> Iterator[dict[str, list[float]]]:
    """Yield `num_rows` rows."""
    for row in np.linspace(-1, 1, num_rows * 4).reshape(num_rows, 4):
        yield {"x": row.tolist()}


def sharded_rows(shards: list[int], num_rows: int) -> Iterator[dict[str, list[float]]]:
    """Yield the rows of some shards; each shard has a quarter."""
    every, length = list(rows(num_rows)), num_rows // 4
    for shard in shards:
        yield from every[shard * length : (shard + 1) * length]


def table(num_rows: int) -> datasets.Dataset:
    """Return rows in memory."""
    return datasets.Dataset.from_dict({"x": [row["x"] for row in rows(num_rows)]})


def generated(num_rows: int) -> datasets.IterableDataset:
    """Return a stream of four shards."""
    kwargs = {"shards": [0, 1, 2, 3], "num_rows": num_rows}
    return datasets.IterableDataset.from_generator(sharded_rows, gen_kwargs=kwargs)


def drawn() -> np.random.Generator:
    """Return a generator that starts differently in each process, as for a stream without a seed."""
    return np.random.default_rng(int(torch.randint(1000, ())))


MAPS: dict[str, Callable[[int, Path], datasets.Dataset]] = {
    "dict": lambda num_rows, cache: table(num_rows).with_transform(noisy),
    "generator": lambda num_rows, cache: datasets.Dataset.from_generator(
        rows, cache_dir=str(cache), gen_kwargs={"num_rows": num_rows}
    ).with_transform(noisy),
    "shuffled": lambda num_rows, cache: (
        table(num_rows).shuffle(seed=1).select(range(num_rows - 2)).with_transform(noisy)
    ),
}


@each_num_workers
@pytest.mark.parametrize("name", MAPS)
def test_map_style(name: str, num_workers: int, tmp_path: Path) -> None:
    """A table continues in order, with the draws of its transform; it fetches all rows of a batch together."""

    def train(num_rows: int) -> DataLoader[Any]:
        data: Any = MAPS[name](num_rows, tmp_path)
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers, collate_fn=stacked)

    assert_loader_continues(LATER_EPOCH, num_workers, train=train)


STREAMS: dict[str, Callable[[int], datasets.IterableDataset]] = {
    "table": lambda num_rows: table(num_rows).to_iterable_dataset(num_shards=4).map(noisy_row),
    "table, shuffled": lambda num_rows: (
        table(num_rows).to_iterable_dataset(num_shards=4).shuffle(seed=3, buffer_size=6)
    ),
    "generator": lambda num_rows: generated(num_rows).map(noisy_row),
    "generator, shuffled": lambda num_rows: generated(num_rows).shuffle(seed=3, buffer_size=6).map(noisy_row),
}


def stream_loader(name: str, num_workers: int, kind: Any = DataLoader, **arguments: Any) -> Callable[[int], Any]:
    """Return a function that creates a loader of a stream of `num_rows` rows."""
    return lambda num_rows: kind(
        STREAMS[name](num_rows), batch_size=4, num_workers=num_workers, collate_fn=stacked, **arguments
    )


@each_num_workers
@each_cut
@pytest.mark.parametrize("name", STREAMS)
def test_stream(name: str, cut: Cut, num_workers: int) -> None:
    """A stream continues with the next row and the contents of its shuffle buffer."""
    assert_loader_continues(cut, num_workers, train=stream_loader(name, num_workers))


@each_num_workers
def test_stream_in_a_stateful_dataloader(num_workers: int) -> None:
    """A stream's state, from which torchdata would continue, lacks the buffer; so the stream is replayed there, too."""
    train = stream_loader("generator, shuffled", num_workers, StatefulDataLoader)
    assert_loader_continues(LATER_EPOCH, num_workers, train=train)


class TellsEpoch(Callback):
    """Sets the stream's epoch: each epoch has another order."""

    def on_train_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        trainer.train_dataloader.dataset.set_epoch(trainer.current_epoch)


@each_num_workers
def test_stream_that_is_told_its_epoch(num_workers: int) -> None:
    """With ``set_epoch`` the order of a later epoch continues."""
    train = stream_loader("generator, shuffled", num_workers, persistent_workers=num_workers > 0)
    users = lambda: [TellsEpoch()]  # noqa: E731 - a list of new callbacks for each run
    num_rows = 32 if num_workers else 20
    cut = Cut(kill=22, every=21, continues_at=(2, 5)) if num_workers else Cut(kill=14, every=13, continues_at=(2, 3))
    assert_continues(cut, train=lambda: train(num_rows), users=users, max_epochs=3)


class Wrapped(IterableDataset[Any]):
    """Passes on a stream and its state."""

    def __init__(self, num_rows: int) -> None:
        self.stream = STREAMS["generator, shuffled"](num_rows)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.stream)

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's state."""
        return self.stream.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Pass the state to the stream."""
        self.stream.load_state_dict(state_dict)


@each_num_workers
def test_stream_inside_a_data_set_of_the_users(num_workers: int) -> None:
    """State that a wrapper passes on is not trusted either: it lacks the shuffle buffer."""
    assert_loader_continues(
        LATER_EPOCH,
        num_workers,
        train=lambda num_rows: DataLoader(Wrapped(num_rows), 4, num_workers=num_workers, collate_fn=stacked),
    )


CHANGED: dict[str, tuple[Callable[[], Any], str]] = {
    "table": (lambda: table(20).shuffle(generator=drawn()), "indices"),
    "stream of a table": (
        lambda: table(20).to_iterable_dataset(num_shards=8).shuffle(buffer_size=6, generator=drawn()),
        "source 3 shards",
    ),
    "generator": (lambda: generated(20).shuffle(buffer_size=6, generator=drawn()), "source 2 shards"),
}


@pytest.mark.parametrize("kill", [3, 5])
@pytest.mark.parametrize("name", CHANGED)
def test_shuffled_without_a_seed(name: str, kill: int) -> None:
    """A data set with another order in the new process is refused, even at the edge of an epoch."""
    make, value = CHANGED[name]

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, train=DataLoader(make(), batch_size=4, collate_fn=stacked))

    with pytest.raises(AssertionError, match=f"train/0.dataset.{value}: "):
        assert_resumes_exactly(fit, [KillAt(kill)], options={"every_n_train_steps": 1})


@each_num_workers
def test_buffer_shuffled_without_a_seed(num_workers: int) -> None:
    """If the order of the shards is the same, the generator of the shuffle buffer continues."""

    def train(num_rows: int) -> DataLoader[Any]:
        stream = datasets.IterableDataset.from_generator(rows, gen_kwargs={"num_rows": num_rows})
        shuffled = stream.shuffle(buffer_size=6, generator=drawn())
        return DataLoader(shuffled, batch_size=4, num_workers=num_workers, collate_fn=stacked)

    assert_loader_continues(LATER_EPOCH, num_workers, train=train)


@each_num_workers
def test_stream_of_other_rows(num_workers: int) -> None:
    """A stream that yields other rows in the new process is refused."""
    num_rows = 32 if num_workers else 20

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        order = drawn().permutation(num_rows).tolist()
        stream: Any = datasets.IterableDataset.from_generator(lambda: ({"x": [n / num_rows] * 4} for n in order))
        train = DataLoader(stream, batch_size=4, num_workers=num_workers, collate_fn=stacked)
        return fit_net(callbacks, directory, train=train)

    with pytest.raises(AssertionError, match="does not yield the same"):
        assert_resumes_exactly(fit, [KillAt(3)], options={"every_n_train_steps": 1})
