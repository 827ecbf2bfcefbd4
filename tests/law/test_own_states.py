"""The law for loaders with their own state: torchdata's loader, and user objects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import HoldingDataset, NoisyCollate, NoisyDataset, StatefulStream, Stream, UnevenStream
from tests.runs import (
    LATER_SHORT_EPOCH,
    Cut,
    Net,
    TwoLoaders,
    assert_continues,
    each_cut,
    each_num_workers,
    fit_net,
    make_trainer,
)

pytestmark = [
    # torchdata 0.11 calls functions that torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning"),
]

# torchdata's loader.


def stateful(data: Callable[[], Any], num_workers: int, **arguments: Any) -> Callable[[], StatefulDataLoader[Any]]:
    """Return a function that creates torchdata's loader."""
    return lambda: StatefulDataLoader(data(), **{"batch_size": 4, **arguments}, num_workers=num_workers)


@each_num_workers
@each_cut
def test_stateful_dataloader(cut: Cut, num_workers: int) -> None:
    """A torchdata loader continues in order, with its workers' draws, in training and in validation."""
    assert_continues(
        cut,
        train=stateful(HoldingDataset, num_workers, shuffle=True),
        validation=stateful(lambda: NoisyDataset(8), num_workers, shuffle=False),
    )


@each_cut
def test_workers_of_stateful_dataloaders_that_live_on(cut: Cut) -> None:
    """Persistent workers continue with their draws, also in later epochs."""
    train = stateful(NoisyDataset, 2, shuffle=True, persistent_workers=True, snapshot_every_n_steps=3)
    validation = stateful(lambda: NoisyDataset(8), 2, persistent_workers=True)
    assert_continues(cut, train=train, validation=validation, max_epochs=3)


class Seen(NoisyDataset):
    """Counts its samples in a state that torchdata saves; each sample depends on the count before it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_seen = 0

    def __getitem__(self, index: int) -> Tensor:
        self.num_seen += 1
        return super().__getitem__(index) + self.num_seen / 100

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"num_seen": self.num_seen}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue counting."""
        self.num_seen = state_dict["num_seen"]


@each_num_workers
@each_cut
def test_state_of_a_data_set(cut: Cut, num_workers: int) -> None:
    """The state of a map-style data set, which torchdata restores, continues in each worker."""
    is_persistent = num_workers > 0
    assert_continues(
        cut, train=stateful(Seen, num_workers, shuffle=True, persistent_workers=is_persistent), max_epochs=3
    )


@each_num_workers
@each_cut
@pytest.mark.parametrize("stream", [Stream, StatefulStream])
def test_iterable_data_sets_in_a_stateful_dataloader(cut: Cut, num_workers: int, stream: Callable[[], Any]) -> None:
    """Iterable data sets, with and without a state, continue as in torch's own loader."""
    assert_continues(cut, train=stateful(stream, num_workers))


def test_workers_of_a_stateful_dataloader_that_run_out() -> None:
    """If one worker runs out before the other, the batches keep their turns."""
    assert_continues(Cut(kill=7, every=1, continues_at=(0, 7)), train=stateful(UnevenStream, 2), max_epochs=1)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "with replacement": lambda: RandomSampler(range(32), replacement=True, generator=torch.Generator().manual_seed(0)),
    "distributed": lambda: StatefulDistributedSampler(NoisyDataset(), num_replicas=1, rank=0),
}


@each_num_workers
@pytest.mark.parametrize("name", SAMPLERS)
def test_samplers_of_torchdata(name: str, num_workers: int) -> None:
    """Samplers that have a state continue in their order, by a replay."""

    def train() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(NoisyDataset(), batch_size=4, sampler=SAMPLERS[name](), num_workers=num_workers)

    assert_continues(Cut(kill=14, every=13, continues_at=(1, 5)), train=train)


class UnpackingStateful(StatefulDataLoader[Any]):
    """Its ``__iter__`` is a generator that draws."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch + torch.randn(())


@each_num_workers
def test_subclass_of_a_stateful_dataloader(num_workers: int) -> None:
    """A user's subclass with a generator as ``__iter__`` continues."""

    def train() -> Any:
        return UnpackingStateful(NoisyDataset(), batch_size=4, collate_fn=NoisyCollate(), num_workers=num_workers)

    assert_continues(Cut(kill=14, every=13, continues_at=(1, 5)), train=train)


def test_stateful_dataloader_beside_another_loader() -> None:
    """A torchdata loader continues in a dict with a torch loader, as the short one in its second cycle."""

    def train() -> dict[str, Any]:
        return {
            "long": DataLoader(NoisyDataset(), batch_size=4, shuffle=True),
            "short": stateful(lambda: NoisyDataset(12), 0, shuffle=True)(),
        }

    assert_continues(Cut(kill=14, every=13, continues_at=(1, 5)), train=train, module=TwoLoaders)


class KeepsLoader(LightningDataModule):
    """Saves and restores its loader's state, as torchdata's documentation says."""

    def __init__(self, num_workers: int) -> None:
        super().__init__()
        self.loader = stateful(NoisyDataset, num_workers, shuffle=True)()

    def train_dataloader(self) -> Any:
        return self.loader

    def val_dataloader(self) -> Any:
        return DataLoader(NoisyDataset(8), batch_size=4)

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state."""
        return {"loader": self.loader.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        self.loader.load_state_dict(state_dict["loader"])


@each_num_workers
@each_cut
def test_data_module_that_keeps_the_state_of_its_loader(cut: Cut, num_workers: int) -> None:
    """The loader state that a data module saves does not move the loader a second time."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory)
        trainer.fit(Net(), datamodule=KeepsLoader(num_workers))
        return trainer

    [cost] = assert_resumes_exactly(fit, [KillAt(cut.kill)], options={"every_n_train_steps": cut.every})
    assert (cost.epoch, cost.batch) == cut.continues_at


def test_nothing_is_left_on_a_stateful_dataloader(tmp_path: Path) -> None:
    """After fit the user's loader has its own methods, and nothing else has changed."""
    loader = stateful(NoisyDataset, 0, shuffle=True)()
    before = dict(vars(loader))
    fit_net([FaultTolerance()], tmp_path, train=loader)
    assert vars(loader) == before
    assert type(loader) is StatefulDataLoader


def looked_at() -> StatefulDataLoader[Any]:
    """Return a loader with a call of its state_dict before fit."""
    loader = stateful(NoisyDataset, 0)()
    loader.state_dict()
    return loader


def told_where() -> StatefulDataLoader[Any]:
    """Return a loader with a state that was loaded before fit."""
    other, loader = stateful(NoisyDataset, 0)(), stateful(NoisyDataset, 0)()
    next(iter(other))
    loader.load_state_dict(other.state_dict())
    return loader


class Persistent(StatefulDataLoader[Any]):
    """Has its own state in addition to torchdata's."""

    def state_dict(self) -> dict[str, Any]:
        """Return both."""
        return {"theirs": super().state_dict(), "mine": 1}


class KeepsSet(Seen):
    """Has a state that a checkpoint can't contain."""

    def state_dict(self) -> dict[str, Any]:
        """Return a set."""
        return {"seen": {1, 2}}


class Prefetching:
    """A user's loader; its state is `ahead` batches ahead of those that it has yielded."""

    def __init__(self, *, ahead: int = 0) -> None:
        self.ahead, self.next, self.order = ahead, 0, list(range(8))

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Tensor]:
        if self.next % 8 == 0:
            self.next = 0
            random.shuffle(self.order)
        while self.next < 8:
            number = self.order[self.next]
            self.next += 1
            yield torch.full((4, 4), number / 8) + random.gauss(0, 1) + torch.randn(4, 4)

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"next": self.next + self.ahead, "order": self.order}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position."""
        self.next, self.order = state_dict["next"], state_dict["order"]


class WorkerState(DataLoader[Any]):
    """A torch loader with workers, and a state that the user has added."""

    def state_dict(self) -> dict[str, int]:
        """Return a useless state."""
        return {"a": 1}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Do nothing."""


class Numbers(Prefetching):
    """Has a state that a checkpoint can't contain."""

    def state_dict(self) -> dict[str, Any]:
        """Return a set."""
        return {"seen": {1}}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "asked before": (looked_at, "created by its state_dict before fit"),
    "told before": (told_where, "a state was loaded into it before fit"),
    "own methods": (lambda: Persistent(NoisyDataset()), "Persistent has its own state_dict"),
    "data set": (stateful(KeepsSet, 0), "the state_dict of its data set has a set as seen"),
    "own state and workers": (
        lambda: WorkerState(NoisyDataset(), num_workers=1),
        "lacks the random states of its workers",
    ),
    "not plain": (Numbers, "its state_dict has a set as seen"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_loader_with_a_state_that_cant_be_exact(case: str, tmp_path: Path) -> None:
    """A loader with a state that can't be exact is refused before training starts, with the reason."""
    make, reason = REFUSED[case]
    with pytest.raises(NotExactError, match=reason):
        fit_net([FaultTolerance()], tmp_path, train=make())


def test_state_loaded_by_the_script_at_a_restart() -> None:
    """If a script loads a state into a loader at a restart, the loader is not moved a second time."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        train = told_where() if any(directory.rglob("autosave-*.ckpt")) else stateful(NoisyDataset, 0)()
        return fit_net(callbacks, directory, train=train)

    [cost] = assert_resumes_exactly(fit, [KillAt(3)], options={"every_n_train_steps": 1})
    assert (cost.epoch, cost.batch) == (0, 3)


def test_state_loaded_in_the_middle_of_a_fit(tmp_path: Path) -> None:
    """Loading a state into a followed loader is refused: it would be restored twice."""

    class Loads(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.train_dataloader.load_state_dict({"_num_yielded": 3})

    with pytest.raises(NotExactError, match="It would be restored twice"):
        fit_net([FaultTolerance(), Loads()], tmp_path, train=stateful(NoisyDataset, 0)())


def test_checkpoint_from_before(tmp_path: Path) -> None:
    """A checkpoint with a loader's state but without our part is refused, or restored as Lightning does."""
    trained: list[int] = []

    class Notes(Callback):
        def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            trained.append(batch_idx)
            if batch_idx == 3:
                trainer.save_checkpoint(tmp_path / f"{len(trained)}.ckpt")

    def fit(*callbacks: Callback) -> list[int]:
        trained.clear()
        path = tmp_path / "4.ckpt"
        train = stateful(NoisyDataset, 0)()
        fit_net([Notes(), *callbacks], tmp_path, train=train, max_epochs=1, ckpt_path=path if path.exists() else None)
        return list(trained)

    assert fit() == list(range(8))
    as_lightning = fit()
    with pytest.raises(NotExactError, match="saved without FaultTolerance and holds a state"):
        fit(FaultTolerance(dirpath=tmp_path / "strict"))
    assert fit(FaultTolerance(strict=False)) == as_lightning


# User objects.


@each_cut
def test_own_loader(cut: Cut) -> None:
    """A loader that is not a DataLoader continues by its own state, and draws as if uninterrupted."""
    assert_continues(cut, train=Prefetching, validation=Prefetching, max_epochs=3)


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_own_loader_at_the_first_batches(batch: int) -> None:
    """If the run is cut at the start of an epoch, its order is not drawn twice."""
    assert_continues(Cut(kill=8 + batch, every=1, continues_at=(1, batch)), train=Prefetching)


def test_own_loader_in_two_places(tmp_path: Path) -> None:
    """One object for training and validation has one state for both: it is refused, and keeps its class."""
    loader = Prefetching()
    with pytest.raises(NotExactError, match=r"the same object is also (validation|train)/0"):
        fit_net([FaultTolerance()], tmp_path, train=loader, validation=loader)
    assert type(loader) is Prefetching


class Endless(Prefetching):
    """Does not know its length, and has its own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(0)

    def __len__(self) -> int:
        raise TypeError("no length")

    def __iter__(self) -> Iterator[Tensor]:
        return (batch + self.rng.gauss(0, 1) for batch in super().__iter__())


@each_cut
def test_own_loader_without_a_length(cut: Cut) -> None:
    """The batch that Lightning fetches ahead is fetched again, also from the loader's own generator."""
    assert_continues(cut, train=Endless)


class CountingLoader(DataLoader[Any]):
    """A torch loader without workers whose batches depend on a number in its state."""

    num_given = 0

    def __iter__(self) -> Iterator[Any]:
        skipped = self.num_given % 8
        for number, batch in enumerate(super().__iter__()):
            if number >= skipped:
                self.num_given += 1
                yield batch + self.num_given

    def state_dict(self) -> dict[str, int]:
        """Return the number."""
        return {"num_given": self.num_given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Continue counting."""
        self.num_given = state_dict["num_given"]


class Plain(Dataset[Tensor]):
    """Draws nothing."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / 32)


@each_cut
def test_dataloader_with_a_state_of_the_users(cut: Cut) -> None:
    """A subclass of torch's loader without workers continues by the user's state."""
    assert_continues(cut, train=lambda: CountingLoader(Plain(), batch_size=4))


class Forgets(Prefetching):
    """Has a state without its order."""

    def state_dict(self) -> dict[str, Any]:
        """Return only the position."""
        return {"next": self.next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position."""
        self.next = state_dict["next"]


@pytest.mark.parametrize("make", [lambda: Prefetching(ahead=1), Forgets], ids=["ahead", "forgets"])
def test_own_state_that_lies(make: Callable[[], Any]) -> None:
    """A state that leads to another batch is detected at the resume, and named."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, train=make())

    with pytest.raises(AssertionError, match=r"yields another batch 2 than before\. Its state_dict lacks something"):
        assert_resumes_exactly(fit, [KillAt(3)], options={"every_n_train_steps": 1})


def test_nothing_is_left_on_an_own_loader(tmp_path: Path) -> None:
    """After fit the user's object has its own class again."""
    loader = Prefetching()
    fit_net([FaultTolerance()], tmp_path, train=loader)
    assert type(loader) is Prefetching
    assert set(vars(loader)) == {"ahead", "next", "order"}


class ReturnsItsAttributes(Callback):
    """Returns all of its attributes as its state, as some do; Lightning has set ``log`` among them."""

    def __init__(self, *, holds: bool = False) -> None:
        self.holds = holds
        self.num_batches = 0

    def on_fit_start(self, trainer: Trainer, module: Net) -> None:  # type: ignore[override]
        self.held = [module.layers[0].weight] if self.holds else []

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1
        self.log("batches", float(self.num_batches))

    def state_dict(self) -> dict[str, Any]:
        return self.__dict__

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.__dict__.update(state_dict)


class ReturnsNothing(Callback):
    """Has no state, and says so."""

    def state_dict(self) -> Any:
        return None


def test_a_callback_that_returns_its_attributes() -> None:
    """It logs to the live module after a resume, not to the copy that was saved with its state."""
    assert_continues(LATER_SHORT_EPOCH, users=lambda: [ReturnsItsAttributes(), ReturnsNothing()])


def test_a_callback_that_returns_a_weight_is_refused(tmp_path: Path) -> None:
    """A resume would give it a copy of the weight."""
    with pytest.raises(NotExactError, match=r"ReturnsItsAttributes#0.*: its state_dict returns the module or a part"):
        fit_net([FaultTolerance(tmp_path), ReturnsItsAttributes(holds=True)], tmp_path)
