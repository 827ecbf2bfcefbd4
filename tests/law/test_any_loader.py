"""The law for loaders that are not a ``DataLoader`` and have no state, and for those that do more than torch's."""

from __future__ import annotations

import itertools
import queue
import random
import signal
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import NoisyDataset
from tests.object_states import slowly
from tests.runs import (
    Cut,
    Fetches,
    Net,
    TwoLoaders,
    assert_continues,
    each_cut,
    each_num_workers,
    fit_net,
    make_trainer,
)


def batch_of(number: int) -> Tensor:
    """Return a batch that contains its number, with noise."""
    return torch.full((4, 4), number / 8) + random.gauss(0, 1) + torch.randn(4, 4)


class Batches:
    """Starts over in each epoch, in another order."""

    def __init__(self, num_batches: int = 8) -> None:
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        for number in random.sample(range(self.num_batches), self.num_batches):
            yield batch_of(number)


class Unsized(Batches):
    """Does not know its length."""

    def __len__(self) -> int:
        raise TypeError("no length")


class Slice:
    """Yields a slice of one endless stream in each epoch, as gluonts does."""

    def __init__(self, length: int = 8) -> None:
        self.iterable = map(batch_of, itertools.count())
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self.iterable, self.length)


class ShiftedSlice(Slice):
    """Draws when an iteration starts."""

    def __iter__(self) -> Iterator[Any]:
        shift = torch.randn(())
        return (batch + shift for batch in super().__iter__())


class ItsOwnIterator:
    """Keeps its position and its generator in attributes."""

    def __init__(self) -> None:
        self.place, self.epoch = 0, 0
        self.rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        self.place = 0
        self.epoch += 1
        return self

    def __next__(self) -> Tensor:
        if self.place == 8:
            raise StopIteration
        self.place += 1
        return batch_of(self.place) + self.epoch + float(self.rng.normal())


class Sequence:
    """Has no ``__iter__``: Python indexes one item after the other."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        if index == 8:
            raise IndexError
        return batch_of(index)


@dataclass(slots=True)
class Graph:
    """A batch of a custom class."""

    nodes: Tensor

    def to(self, *_: Any) -> Graph:
        """Return itself; there is nothing to move."""
        return self


class Graphs(Batches):
    """Yields objects that only user code knows."""

    def __iter__(self) -> Iterator[Any]:
        return ({"graph": Graph(batch)} for batch in super().__iter__())


class GraphNet(Net):
    """Trains on graphs."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch["graph"].nodes, batch_idx)


class Wrapper:
    """Takes its batches from a torch loader that it holds."""

    def __init__(self, **arguments: Any) -> None:
        self.inner = DataLoader(NoisyDataset(), batch_size=4, shuffle=True, **arguments)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.inner:
            yield batch + torch.randn(())


class Queue(Dataset[Tensor]):
    """Fills itself from its own loader, as TorchIO's does."""

    def __init__(self) -> None:
        self.samples: list[Tensor] = []
        self.rest = iter(DataLoader(NoisyDataset(), batch_size=4, shuffle=True))

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        self.samples = self.samples or list(next(self.rest))
        return self.samples.pop() + torch.randn(4)


class EachPass:
    """Creates a queue and its loader in each pass."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(Queue(), batch_size=4))


KINDS: dict[str, Callable[[], Any]] = {
    "queue in each pass": EachPass,
    "class": Batches,
    "unsized": Unsized,
    "slice of a stream": Slice,
    "shifted slice": ShiftedSlice,
    "its own iterator": ItsOwnIterator,
    "sequence": Sequence,
    "wrapper": Wrapper,
    "wrapper with workers": lambda: Wrapper(num_workers=2),
    "wrapper with workers that live on": lambda: Wrapper(num_workers=2, persistent_workers=True),
}


@each_cut
@pytest.mark.parametrize("kind", KINDS)
def test_any_iterable(kind: str, cut: Cut) -> None:
    """Any iterable continues at its position and with the numbers that it draws, in training and in validation."""
    validation = Batches if "workers" in kind else KINDS[kind]
    assert_continues(cut, train=KINDS[kind], validation=validation, max_epochs=3)


def test_a_queue_is_refused_with_what_to_do(tmp_path: Path) -> None:
    """A data set that holds an iterator over a loader is refused at the start; "queue in each pass" does as told."""
    with pytest.raises(NotExactError, match=r"whose __iter__ creates the data set and its loader in each pass"):
        fit_net([FaultTolerance(tmp_path / "autosaves")], tmp_path, train=DataLoader(Queue(), batch_size=4))


@pytest.mark.slow
@pytest.mark.parametrize("kill", [1, 6, 7, 8, 9, 15, 16, 17, 23])
@pytest.mark.parametrize("kind", ["class", "unsized", "slice of a stream", "its own iterator"])
def test_every_place(kind: str, kill: int) -> None:
    """A run continues exactly when cut after the first batch, at the last one, or at the start of an epoch."""
    train = KINDS[kind]
    assert_continues(Cut(kill=kill, every=1, continues_at=divmod(kill, 8)), train=train, validation=train, max_epochs=3)


@pytest.mark.parametrize("kind", ["class", "slice of a stream"])
def test_first_batch_of_a_later_epoch(kind: str) -> None:
    """If the epoch has used no batch yet, the previous epoch is drawn again and compared."""
    assert_continues(Cut(kill=16, every=1, continues_at=(2, 0)), train=KINDS[kind], max_epochs=3)


@each_cut
def test_objects_as_batches(cut: Cut) -> None:
    """Batches may be of any class."""
    assert_continues(cut, train=Graphs, module=GraphNet)


def endless() -> Iterator[Tensor]:
    """Return an endless iterator of batches."""
    return map(batch_of, itertools.count())


@pytest.mark.parametrize("arguments", [{"limit_train_batches": 8, "max_epochs": 3}, {"max_steps": 20}])
def test_endless_generator(arguments: dict[str, Any]) -> None:
    """An endless generator continues, with epochs of a limited number of batches or with a limited number of steps."""
    continues_at = (1, 5) if "limit_train_batches" in arguments else (0, 13)
    assert_continues(Cut(kill=14, every=13, continues_at=continues_at), train=endless, **arguments)


class Generates(LightningDataModule):
    """Its ``train_dataloader`` is a generator function."""

    def train_dataloader(self) -> Any:
        yield from map(batch_of, range(8))

    def val_dataloader(self) -> Any:
        yield from map(batch_of, range(2))


@pytest.mark.parametrize(("every_n_epochs", "kill"), [(1, 14), (0, 5)])
def test_generator_function(every_n_epochs: int, kill: int) -> None:
    """A generator function is called again when loaders are reloaded; else one epoch exhausts it, as without us."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        trainer = make_trainer(callbacks, directory, reload_dataloaders_every_n_epochs=every_n_epochs)
        trainer.fit(Net(), datamodule=Generates())
        return trainer

    [cost] = assert_resumes_exactly(fit, [KillAt(kill)], options={"every_n_train_steps": 1})
    assert (cost.epoch, cost.batch) == divmod(kill, 8)


@each_cut
def test_tensors_as_loaders(cut: Cut) -> None:
    """Lightning treats a list of tensors as a list of loaders over their first dimension, and these continue, too."""
    assert_continues(cut, train=lambda: [torch.arange(128.0).reshape(8, 4, 4)], module=FirstOfList)


class FirstOfList(Net):
    """Trains on the batches of the first of several loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch[0], batch_idx)


@each_cut
@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_beside_another_loader(mode: Any, cut: Cut) -> None:
    """An iterable continues in a dict with a torch loader, the short one in its second cycle."""

    def train() -> Any:
        long = DataLoader(NoisyDataset(), batch_size=4, shuffle=True)
        return CombinedLoader({"long": long, "short": Batches(3 if mode == "max_size_cycle" else 8)}, mode)

    assert_continues(cut, train=train, module=TwoLoaders)


@each_cut
@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.parametrize("kind", ["class", "slice of a stream"])
def test_steps_that_fetch(kind: str, cut: Cut) -> None:
    """A step that takes the iterator continues with the batch that it would have fetched."""
    assert_continues(cut, train=KINDS[kind], module=Fetches)


class Kept:
    """Yields the same tensors in each epoch; training changes them in place."""

    def __init__(self) -> None:
        self.batches = [torch.full((4, 4), number / 8) for number in range(8)]

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class ChangesBatches(Net):
    """Adds noise to the loader's own tensors."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch += torch.randn(4, 4)
        return super().training_step(batch, batch_idx)


@each_cut
def test_batches_that_training_changes_in_place(cut: Cut) -> None:
    """The changes that training made to the loader's tensors are restored."""
    assert_continues(cut, train=Kept, module=ChangesBatches, max_epochs=3)


def test_one_loader_in_two_places() -> None:
    """One object that serves training and validation continues in both places."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        loader = Batches()
        return fit_net(callbacks, directory, train=loader, validation=loader, val_check_interval=4)

    [cost] = assert_resumes_exactly(fit, [KillAt(6)], options={"every_n_train_steps": 1})
    assert (cost.epoch, cost.batch) == (0, 6)


@pytest.mark.parametrize("kind", ["class", "slice of a stream"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_end_in_validation(kind: str, signum: int) -> None:
    """After a stop or a kill inside a validation run, the loaders of both continue."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        validation = KINDS[kind]()
        return fit_net(callbacks, directory, train=Batches(), validation=validation, val_check_interval=4)

    fault = KillAt(11, signum=signum, hook="validation")
    [cost] = assert_resumes_exactly(fit, [fault], options={"every_n_train_steps": 3})
    assert cost.epoch == 1


# Classes of ``DataLoader`` with their own ``__iter__``.


class Quiet(Dataset[Tensor]):
    """Draws nothing: a thread that fetches ahead draws at any time."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), index / 32)


class ReadsAhead(DataLoader[Any]):
    """Fetches two batches ahead in a thread, as MONAI's ThreadDataLoader does."""

    def __iter__(self) -> Iterator[Any]:
        fetched: queue.Queue[Any] = queue.Queue(2)

        def fetch(batches: Iterator[Any]) -> None:
            for batch in batches:
                fetched.put(batch)
            fetched.put(None)

        threading.Thread(target=fetch, args=(super().__iter__(),), daemon=True).start()
        while (batch := fetched.get()) is not None:
            yield batch


class Repeats:
    """Restarts its sampler again and again."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from iter(self.sampler)


class LivesOn(DataLoader[Any]):
    """Keeps one iterator for all epochs, as timm's MultiEpochsDataLoader and ultralytics' InfiniteDataLoader do."""

    iterator: Any = None

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        object.__setattr__(self, "batch_sampler", Repeats(self.batch_sampler))

    def __len__(self) -> int:
        return len(self.batch_sampler.sampler)

    def __iter__(self) -> Iterator[Any]:
        if self.iterator is None:
            self.iterator = super().__iter__()
        for _ in range(len(self)):
            yield next(self.iterator)


class MadeAtOnce(LivesOn):
    """Creates its iterator when it is built, as older versions do."""

    def __init__(self, *args: Any, **arguments: Any) -> None:
        super().__init__(*args, **arguments)
        self.iterator = DataLoader.__iter__(self)


class Counts(DataLoader[Any]):
    """Adds the number of the batch in its epoch, and skips every third batch."""

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if number % 3 != 2:
                yield batch + number

    def __len__(self) -> int:
        return 8


OWN_ITERS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "reads ahead": (ReadsAhead, Quiet),
    "lives on": (LivesOn, NoisyDataset),
    "made at once": (MadeAtOnce, NoisyDataset),
    "counts": (Counts, lambda: NoisyDataset(48)),
}


@each_cut
@each_num_workers
@pytest.mark.parametrize("kind", OWN_ITERS)
def test_own_iter(kind: str, num_workers: int, cut: Cut) -> None:
    """A batch counts as consumed when the trainer has used it, however far the loader reads ahead; none is lost."""
    kind_of_loader, data = OWN_ITERS[kind]

    def train() -> Any:
        torch.manual_seed(0)
        dataset = NoisyDataset() if kind == "reads ahead" and num_workers else data()
        return kind_of_loader(dataset, batch_size=4, shuffle=True, num_workers=num_workers)

    assert_continues(cut, train=train, max_epochs=3)


class Counted(Quiet):
    """Counts what it loads."""

    num_loaded = 0

    def __getitem__(self, index: int) -> Tensor:
        self.num_loaded += 1
        return super().__getitem__(index) + self.num_loaded


class Holding(Quiet):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + self.random.random()


class Drawing(Quiet):
    """Draws with torch."""

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + torch.rand(4)


@pytest.mark.parametrize("data", [slowly(Holding), slowly(Drawing), Counted])
def test_thread_that_changes_something_is_refused(data: Any, tmp_path: Path) -> None:
    """Where a thread draws or counts, the first batch is refused; with num_workers=1, as advised, the run continues."""
    with pytest.raises(NotExactError, match=r"a thread of it loads the next samples .* Pass num_workers=1"):
        fit_net([FaultTolerance()], tmp_path, train=ReadsAhead(data(), batch_size=4, shuffle=True))
    [aside] = tmp_path.rglob("autosave-*")
    assert "superseded-" in aside.parent.name, "the mended script would find the state of another one"

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, train=ReadsAhead(data(), batch_size=4, shuffle=True, num_workers=1))

    assert_resumes_exactly(fit, [KillAt(9)], options={"every_n_train_steps": 1})


def test_stop_of_a_loader_that_reads_ahead() -> None:
    """A stop by SIGTERM repeats nothing and skips nothing."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, train=ReadsAhead(Quiet(), batch_size=4, shuffle=True))

    [cost] = assert_resumes_exactly(fit, [KillAt(9, signum=signal.SIGTERM)])
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (143, 1, 2, 0)


# Loaders that can't be drawn again.


class Hidden:
    """Continues a stream whose position the package cannot see: it is in a C variable."""

    def __init__(self) -> None:
        self.position = zlib.compressobj(level=0)

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[Any]:
        for _ in range(8):
            self.position.compress(b".")
            yield batch_of(len(self.position.copy().flush()))


@pytest.mark.parametrize("kill", [14, 16])
def test_hidden_state_is_refused(kill: int) -> None:
    """A loader that yields other batches than before is refused with advice, even if the epoch has used none yet."""

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        return fit_net(callbacks, directory, train=Hidden(), max_epochs=3)

    with pytest.raises((NotExactError, AssertionError), match=r"yields others than the [58] batches that it yielded"):
        assert_resumes_exactly(fit, [KillAt(kill)], options={"every_n_train_steps": kill - 1 if kill == 14 else 8})


def test_loader_over_a_torch_loader_that_cant_be_followed(tmp_path: Path) -> None:
    """A loader over a torch loader that can't be followed is refused at the start, with the reason."""
    with pytest.raises(NotExactError, match=r"it takes its batches from loader\.inner, and with in_order=False"):
        fit_net([FaultTolerance()], tmp_path, train=Wrapper(num_workers=2, in_order=False))


@pytest.mark.parametrize("kind", [Batches, Slice, LivesOn])
def test_nothing_is_left_on_the_loader(kind: Any, tmp_path: Path) -> None:
    """After fit the user's loader has its own class and no attributes of ours."""
    loader = kind(NoisyDataset(), batch_size=4) if kind is LivesOn else kind()
    names = set(vars(loader))
    fit_net([FaultTolerance()], tmp_path, train=loader)
    assert type(loader) is kind
    assert set(vars(loader)) - {"iterator"} == names - {"iterator"}
