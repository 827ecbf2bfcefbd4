"""The law for iterable data sets: they continue with the next sample, by their state or by a replay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.loader.exactness import share_a_state
from lightning_faulttolerant.testing import KillAt, NotTheSame, assert_resumes_exactly
from tests.data_sets import NoisyCollate, SizedStream, StatefulStream, Stream, UnevenStream, secret_count
from tests.runs import Cut, assert_continues, each_cut, each_num_workers, fit_net

pytestmark = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")


class StatefulIterator(Iterator[Tensor]):
    """Has a state, and can't be started again: its samples depend on a number that it drew."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.next, self.shift = stream, 0, random.random()

    def __next__(self) -> Tensor:
        numbers = self.stream.numbers()
        if self.next >= len(numbers):
            raise StopIteration
        self.next += 1
        return self.stream.sample(numbers[self.next - 1]) + self.shift

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        return {"next": self.next, "shift": self.shift}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position."""
        self.next, self.shift = state_dict["next"], state_dict["shift"]


class StreamOfStatefulIterators(Stream):
    """Its iterators have a state."""

    def __iter__(self) -> Iterator[Tensor]:
        return StatefulIterator(self)


class SamplerStream(Stream):
    """Follows the protocol of Lightning 1.9: a sampler and its iterator as attributes, and ``__next__``."""

    def __init__(self) -> None:
        super().__init__()
        self.sampler = RandomSampler(range(16))

    def __iter__(self) -> SamplerStream:
        self.sampler_iter = iter(self.sampler)
        return self

    def __next__(self) -> Tensor:
        return self.sample(next(self.sampler_iter))


class CountingStream(Stream):
    """Has hidden state: its samples depend on how often it was started."""

    num_begun = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.num_begun += 1
        return (torch.full((4,), float(number * self.num_begun)) for number in self.numbers())


class SecretlyCountingStream(Stream):
    """Counts how often it was started, but in no attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.count, _ = secret_count()

    def __iter__(self) -> Iterator[Tensor]:
        num_begun = self.count()
        return (torch.full((4,), float(number * num_begun)) for number in self.numbers())


def loader(stream: Callable[[], Stream], num_workers: int, **arguments: Any) -> Callable[[], DataLoader]:
    """Return a function that creates a loader of a stream."""
    return lambda: DataLoader(stream(), **{"batch_size": 4, **arguments}, num_workers=num_workers)


@each_num_workers
@each_cut
@pytest.mark.parametrize("stream", [Stream, SizedStream, StatefulStream, StreamOfStatefulIterators])
def test_iterable(stream: Callable[[], Stream], cut: Cut, num_workers: int) -> None:
    """An iterable data set continues with the next sample, its shuffle buffer, and its draws."""
    assert_continues(cut, train=loader(stream, num_workers))


@each_num_workers
def test_sampler_protocol(num_workers: int) -> None:
    """A data set that exposes its sampler and its iterator continues in its order."""
    num_batches = 4 * max(1, num_workers)
    cut = Cut(kill=num_batches + 3, every=num_batches + 2, continues_at=(1, 2))
    assert_continues(cut, train=loader(SamplerStream, num_workers))


# The first worker has 2 batches, the second 7: they come in the order 0 1 0 1 1 1 1 1 1.
@pytest.mark.parametrize(("kill", "continues_at"), [(2, (0, 2)), (4, (0, 4)), (7, (0, 7)), (9, (1, 0)), (14, (1, 5))])
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_workers_run_out_at_different_times(kill: int, continues_at: tuple[int, int], persistent_workers: bool) -> None:
    """If one worker runs out before the other, the batches keep their turns."""
    train = loader(UnevenStream, 2, persistent_workers=persistent_workers)
    assert_continues(Cut(kill=kill, every=1, continues_at=continues_at), train=train)


@pytest.mark.parametrize("arguments", [{"drop_last": True}, {"batch_size": None}], ids=["drop-last", "no-batching"])
@each_num_workers
def test_other_batches(arguments: dict[str, Any], num_workers: int) -> None:
    """Without the incomplete batch, and without batching, an iterable data set continues exactly."""
    if "batch_size" in arguments:
        arguments = {**arguments, "collate_fn": lambda sample: sample.expand(4, 4) + torch.randn(4, 4)}
    train = loader(UnevenStream, num_workers, **arguments)
    assert_continues(Cut(kill=6, every=1, continues_at=(0, 6)), train=train, max_epochs=1)


@each_num_workers
def test_limited_epochs(num_workers: int) -> None:
    """With ``limit_train_batches`` each epoch starts over, and continues where it was cut."""
    train = loader(Stream, num_workers, collate_fn=NoisyCollate(), persistent_workers=num_workers > 0)
    assert_continues(Cut(kill=7, every=6, continues_at=(1, 2)), train=train, limit_train_batches=4, max_epochs=3)


@each_num_workers
def test_replay_that_differs(num_workers: int, tmp_path: Path) -> None:
    """A data set that yields other samples when started again is refused, with the reason and the remedy."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        train = DataLoader(
            SecretlyCountingStream(), batch_size=4, num_workers=num_workers, persistent_workers=num_workers > 0
        )
        return fit_net(callbacks, directory, train=train)

    with pytest.raises((NotExactError, AssertionError), match="It keeps its own state"):
        assert_resumes_exactly(fit, [KillAt(14)], options={"every_n_train_steps": 13})


@pytest.mark.parametrize("kill", [14, 16])
@each_num_workers
def test_count_of_iterations(num_workers: int, kill: int) -> None:
    """A data set that counts its starts in an attribute continues, even before its first sample."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        train = DataLoader(CountingStream(), batch_size=4, num_workers=num_workers, persistent_workers=num_workers > 0)
        return fit_net(callbacks, directory, train=train, max_epochs=3)

    assert_resumes_exactly(fit, [KillAt(kill)], options={"every_n_train_steps": kill - kill % 8 // 6})


@each_num_workers
def test_replay_that_differs_continues_if_not_strict(num_workers: int, tmp_path: Path) -> None:
    """With ``strict=False`` the run continues with other samples, and the report says so once, for workers too."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        train = DataLoader(
            SecretlyCountingStream(), batch_size=4, num_workers=num_workers, persistent_workers=num_workers > 0
        )
        trainer = fit_net(callbacks, directory, train=train)
        for callback in callbacks:
            if isinstance(callback, FaultTolerance) and callback.resume_report is not None:
                (tmp_path / "report.txt").write_text(str(callback.resume_report))
        return trainer

    options = {"every_n_train_steps": 13, "strict": False}
    with pytest.raises(NotTheSame, match=r"Event \d+ of the interrupted run differs"):
        assert_resumes_exactly(fit, [KillAt(14)], options=options, directory=tmp_path)
    report = (tmp_path / "report.txt").read_text()
    assert report.startswith("Resumed NOT EXACTLY")
    assert report.count(f"SecretlyCountingStream does not yield the same {8 if num_workers else 20} samples again") == 1


def test_one_stream_with_a_state_for_training_and_validation_is_refused(tmp_path: Path) -> None:
    """One stream with a state is refused in both places, since both would move it; workers' copies share none."""
    stream = StatefulStream()
    train, validation = (DataLoader(stream, batch_size=4, num_workers=num_workers) for num_workers in (2, 0))
    with pytest.raises(NotExactError, match=r"(validation|train)/0 reads the same data set"):
        fit_net([FaultTolerance()], tmp_path, train=train, validation=validation)
    assert not share_a_state(train, train)
