"""The law if Lightning requests loaders again, uses a part of their batches, or a data module has state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import HoldingDataset, NoisyDataset, Stream
from tests.runs import SHORT_CUTS, Cut, Net, assert_continues, each_cut, each_num_workers, eight_batches, make_trainer

# Lightning's advice about things that these runs do on purpose.
pytestmark = [
    pytest.mark.filterwarnings("ignore:You requested to overfit but enabled"),
    pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning"),
]


# With workers an epoch has 8 batches, without them 5, as in `tests.runs.assert_loader_continues`.


def num_batches(num_workers: int) -> int:
    """Return the number of batches in an epoch."""
    return 8 if num_workers else 5


def cut_at(epoch: int, batch: int, num_workers: int) -> Cut:
    """Return a cut at the start of a batch, saved just before; a negative batch counts from the epoch's end."""
    batch %= num_batches(num_workers)
    return Cut(kill=epoch * num_batches(num_workers) + batch, every=1, continues_at=(epoch, batch))


EARLY = pytest.param(0, 3, id="early")
MIDDLE = pytest.param(1, -3, id="middle")
LAST = pytest.param(1, -1, id="last", marks=pytest.mark.slow)
FIRST = pytest.param(2, 0, id="first")


class Grows(LightningDataModule):
    """Counts the batches that were used and the loaders that it created; its loaders depend on both."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.num_workers = num_workers
        self.num_used = self.num_given = 0

    def train_dataloader(self) -> DataLoader[Any]:
        self.num_given += 1
        return self.make()

    def make(self) -> DataLoader[Any]:
        """Return a loader of rows, shifted by the number of loaders and of batches used so far."""
        data = NoisyDataset(4 * num_batches(self.num_workers))
        data.rows = data.rows + self.num_given + self.num_used / 8
        return DataLoader(data, 4, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(NoisyDataset(8), batch_size=4, num_workers=self.num_workers)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Count, and shift the batch."""
        self.num_used += 1
        return batch + self.num_used / 100

    def state_dict(self) -> dict[str, Any]:
        """Return both numbers."""
        return {"num_used": self.num_used, "num_given": self.num_given}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue counting."""
        self.num_used, self.num_given = state_dict["num_used"], state_dict["num_given"]


def hold(data_module: Callable[[], Any], cut: Cut, **arguments: Any) -> None:
    """Check that a fit with a data module obeys the law."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory, **arguments)
        trainer.fit(Net(), datamodule=data_module())
        return trainer

    [cost] = assert_resumes_exactly(fit, [KillAt(cut.kill)], options={"every_n_train_steps": cut.every})
    assert (cost.epoch, cost.batch) == cut.continues_at


class Counts(Grows):
    """Counts only batches: its rows are always the same."""

    def make(self) -> DataLoader[Any]:
        """Return a loader."""
        data = NoisyDataset(4 * num_batches(self.num_workers))
        return DataLoader(data, 4, shuffle=True, num_workers=self.num_workers)


class Keeps(Counts):
    """Returns the same loader each time, with persistent workers."""

    loader: DataLoader[Any] | None = None

    def make(self) -> DataLoader[Any]:
        """Return the loader."""
        if self.loader is None:
            self.loader = DataLoader(NoisyDataset(), 4, shuffle=True, num_workers=2, persistent_workers=True)
        return self.loader


@each_num_workers
@each_cut
def test_state_of_a_data_module(cut: Cut, num_workers: int) -> None:
    """A data module's count of used batches continues."""
    hold(lambda: Counts(num_workers), cut if num_workers else SHORT_CUTS[cut])


@each_num_workers
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize(("epoch", "batch"), [MIDDLE, LAST, FIRST])
def test_loaders_requested_again(epoch: int, batch: int, every: int, num_workers: int) -> None:
    """With ``reload_dataloaders_every_n_epochs`` loaders are requested in the same epochs."""
    cut = cut_at(epoch, batch, num_workers)
    hold(lambda: Counts(num_workers), cut, reload_dataloaders_every_n_epochs=every, max_epochs=4)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_kept_loader_requested_again(every: int) -> None:
    """A loader that is returned again continues with its workers."""
    cut = Cut(kill=20, every=1, continues_at=(2, 4))
    hold(lambda: Keeps(2), cut, reload_dataloaders_every_n_epochs=every, max_epochs=4)


def test_loader_that_depends_on_the_state() -> None:
    """A loader that a data module builds from its state is built from the state at the start of the epoch."""
    hold(lambda: Grows(0), cut_at(3, 0, 0), reload_dataloaders_every_n_epochs=1, max_epochs=4)


def test_first_loader_that_depends_on_the_state() -> None:
    """A first loader that depends on the state is refused: Lightning restores the state before it requests it."""
    with pytest.raises(AssertionError, match=r"train/0\.dataset\.rows: "):
        hold(lambda: Grows(0), cut_at(0, 3, 0), reload_dataloaders_every_n_epochs=1, max_epochs=4)


def shuffled(num_workers: int, length: int | None = None, **arguments: Any) -> Callable[[], DataLoader[Any]]:
    """Return a function that creates a loader with more batches than are used: twice as many, or `length` rows."""
    length = 8 * num_batches(num_workers) if length is None else length
    return lambda: DataLoader(HoldingDataset(length), batch_size=4, shuffle=True, num_workers=num_workers, **arguments)


def streamed(num_workers: int) -> Callable[[], DataLoader[Any]]:
    """Return a function that creates a loader of a stream with twice as many batches as are used."""
    return lambda: DataLoader(Stream(8 * num_batches(num_workers)), batch_size=4, num_workers=num_workers)


LIMITS: dict[str, tuple[Callable[[int], Any], Callable[[int], Any]]] = {
    "int": (shuffled, num_batches),
    "float": (shuffled, lambda _: 0.5),
    "iterable": (streamed, num_batches),
}


@each_num_workers
@pytest.mark.parametrize(("epoch", "batch"), [EARLY, LAST, FIRST])
@pytest.mark.parametrize("name", LIMITS)
def test_limited_training_batches(name: str, epoch: int, batch: int, num_workers: int) -> None:
    """The last batch of an epoch ends it, and the next epochs have all their batches."""
    make, limit = LIMITS[name]
    cut = cut_at(epoch, batch, num_workers)
    assert_continues(cut, train=make(num_workers), limit_train_batches=limit(num_workers), max_epochs=3)


@each_num_workers
@each_cut
@pytest.mark.parametrize("limit", [2, 0.5])
def test_limited_validation_batches(limit: float, cut: Cut, num_workers: int) -> None:
    """A validation run over a part of its loader stays limited to that part, and its workers continue."""
    validation = shuffled(num_workers, 16, persistent_workers=num_workers > 0)
    limits = {"limit_val_batches": limit, "val_check_interval": 4}
    assert_continues(cut, train=eight_batches, validation=validation, **limits)


@each_num_workers
@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize(("epoch", "batch"), [EARLY, LAST])
def test_overfit_batches(epoch: int, batch: int, kind: type[float], num_workers: int) -> None:
    """Every epoch has the same unshuffled batches, each with its own noise."""
    cut = cut_at(epoch, batch, num_workers)
    overfit = num_batches(num_workers) if kind is int else 0.5
    validation = shuffled(num_workers, 16)
    assert_continues(cut, train=shuffled(num_workers), validation=validation, overfit_batches=overfit, max_epochs=3)
