"""The law with a seed for each sample: the number of workers may change between runs, and nothing else changes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_faulttolerant.loader.per_sample import LoaderSeeds
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.testing import Interruption, KillAt, NotTheSame, assert_resumes_exactly
from tests.data_sets import (
    BatchesDataset,
    DrawingSampler,
    HoldingDataset,
    LazyDataset,
    ManyAtOnceDataset,
    NoisyCollate,
    NoisyDataset,
    PythonShuffle,
    Squares,
    Unsized,
)
from tests.runs import FIRST_EPOCH, LATER_EPOCH, Cut, Net, TwoLoaders, fit_eight, fit_net

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")

OPTIONS = {"worker_rng": "per_sample"}
each_change = pytest.mark.parametrize(("before", "after"), [(2, 3), (2, 0), (0, 2)])


def assert_continues_with(
    make: Callable[..., Any],
    cut: Cut,
    before: int,
    after: int,
    *,
    module: Callable[[], LightningModule] = Net,
    **arguments: Any,
) -> Interruption:
    """Check that a run obeys the law if it has `before` workers until `cut`, and `after` workers after it.

    The uninterrupted run has `before`; the run with the callback, which is compared to it, has `after`.
    """

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        is_first = directory.name == "uninterrupted" or not list(directory.rglob("autosave-*.ckpt"))
        num_workers = after if directory.name == "with-callback" or not is_first else before
        validation = DataLoader(HoldingDataset(8), batch_size=4, num_workers=num_workers)
        train = make(num_workers=num_workers)
        return fit_net(callbacks, directory, train=train, validation=validation, module=module(), **arguments)

    options = {**OPTIONS, "every_n_train_steps": cut.every}
    [cost] = assert_resumes_exactly(fit, [KillAt(cut.kill)], options=options)
    assert (cost.exit_code, cost.epoch, cost.batch) == (-signal.SIGKILL, *cut.continues_at)
    return cost


def shuffled(*, num_workers: int) -> DataLoader:
    """Return a loader of a data set with generators of each kind."""
    return DataLoader(HoldingDataset(), batch_size=4, shuffle=True, num_workers=num_workers)


def subset(*, num_workers: int) -> DataLoader:
    """Return a loader for which torch fetches all samples of a batch together."""
    chosen = Subset(HoldingDataset(40), range(4, 36))
    return DataLoader(chosen, batch_size=4, shuffle=True, num_workers=num_workers)


def unbatched(*, num_workers: int) -> DataLoader:
    """Return a loader with whole batches as samples."""
    return DataLoader(BatchesDataset(), batch_size=None, shuffle=True, num_workers=num_workers)


@each_change
@pytest.mark.parametrize("make", [shuffled, subset])
def test_other_number_of_workers(make: Callable[..., DataLoader], before: int, after: int) -> None:
    """Cut in a later epoch and resumed with other workers, a run equals the uninterrupted one of either number."""
    assert_continues_with(make, LATER_EPOCH, before, after, max_epochs=3)


@each_change
def test_other_number_of_workers_in_the_first_epoch(before: int, after: int) -> None:
    """The same holds for a cut in the first epoch, and for samples that are batches."""
    assert_continues_with(unbatched, FIRST_EPOCH, before, after)


def test_persistent_workers_may_come_and_go() -> None:
    """Persistent workers yield the same batches as no workers at all."""

    def make(*, num_workers: int) -> DataLoader:
        return DataLoader(
            HoldingDataset(), batch_size=4, shuffle=True, num_workers=num_workers, persistent_workers=num_workers > 0
        )

    assert_continues_with(make, LATER_EPOCH, 2, 0, max_epochs=3)


def test_sampler_that_draws_at_its_start() -> None:
    """A sampler that shuffles with a global generator in ``__iter__`` keeps its order with other workers."""

    def make(*, num_workers: int) -> DataLoader:
        return DataLoader(BatchesDataset(), batch_size=None, sampler=PythonShuffle(8), num_workers=num_workers)

    assert_continues_with(make, LATER_EPOCH, 0, 2, max_epochs=3)


def test_made_when_first_used() -> None:
    """A generator that each worker creates at its first sample is seeded, too."""

    def make(*, num_workers: int) -> DataLoader:
        data, collate = LazyDataset(has_attribute=True), NoisyCollate()
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers, collate_fn=collate)

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        has_saved = bool(list(directory.rglob("autosave-*.ckpt")))
        return fit_net(callbacks, directory, train=make(num_workers=3 if has_saved else 2))

    assert_resumes_exactly(fit, [KillAt(14)], options={**OPTIONS, "every_n_train_steps": 3})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_of_one_request_are_seeded_one_by_one(num_workers: int) -> None:
    """A data set that returns whole batches is asked for one sample after the other."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        train = DataLoader(ManyAtOnceDataset(), batch_size=4, shuffle=True, num_workers=num_workers)
        return fit_net(callbacks, directory, train=train)

    assert_resumes_exactly(fit, [KillAt(5)], options={**OPTIONS, "every_n_train_steps": 2})


def test_killed_again_in_validation() -> None:
    """Killed in a validation run, and again with other workers, a run keeps every validation batch, too."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        num_workers = 2 if list(directory.rglob("autosave-*.ckpt")) else 0
        validation = DataLoader(HoldingDataset(8), batch_size=4, num_workers=num_workers)
        return fit_net(
            callbacks,
            directory,
            train=shuffled(num_workers=num_workers),
            validation=validation,
            val_check_interval=4,
            max_epochs=3,
        )

    faults = [KillAt(3, hook="validation"), KillAt(6), KillAt(3, signum=signal.SIGTERM)]
    assert_resumes_exactly(fit, faults, options={**OPTIONS, "every_n_train_steps": 1})


def test_capture_does_not_hide_a_change_of_workers() -> None:
    """Without per-sample seeds, the same change of workers is refused, so the comparison above could fail."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        num_workers = 3 if list(directory.rglob("autosave-*.ckpt")) else 2
        return fit_net(callbacks, directory, train=shuffled(num_workers=num_workers))

    with pytest.raises(NotTheSame, match=r"num_workers: 2 when it was saved, 3 now"):
        assert_resumes_exactly(fit, [KillAt(5)], options={"every_n_train_steps": 1})


def test_sampler_that_draws_while_it_runs_is_refused_with_other_workers() -> None:
    """A sampler whose order depends on when torch calls it is refused with other workers, with the reason."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        num_workers = 2 if list(directory.rglob("autosave-*.ckpt")) else 0
        train = DataLoader(NoisyDataset(), batch_size=4, sampler=DrawingSampler(), num_workers=num_workers)
        return fit_net(callbacks, directory, train=train)

    with pytest.raises(NotTheSame, match="draws random numbers in the middle of an epoch, and the number of workers"):
        assert_resumes_exactly(fit, [KillAt(5)], options={**OPTIONS, "every_n_train_steps": 1})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sampler_that_draws_while_it_runs_with_as_many_workers(num_workers: int) -> None:
    """With the same number of workers such a sampler continues exactly."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        train = DataLoader(NoisyDataset(), batch_size=4, sampler=DrawingSampler(), num_workers=num_workers)
        return fit_net(callbacks, directory, train=train)

    assert_resumes_exactly(fit, [KillAt(14)], options={**OPTIONS, "every_n_train_steps": 13})


@pytest.mark.parametrize("kills", [(7,), (7, 8)], ids=["once", "twice"])
def test_refused_in_the_next_epoch_too(kills: tuple[int, ...]) -> None:
    """The same holds if all indices of the epoch were drawn, and only those of the next one would differ."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        num_workers = 0 if list(directory.rglob("autosave-*.ckpt")) else 2
        train = DataLoader(NoisyDataset(), batch_size=4, sampler=DrawingSampler(), num_workers=num_workers)
        return fit_net(callbacks, directory, train=train)

    # Of three runs, the second leaves its own autosave, with as many workers as the third.
    faults = [KillAt(kill) for kill in kills]
    with pytest.raises(NotTheSame, match="draws random numbers in the middle of an epoch, and the number of workers"):
        assert_resumes_exactly(fit, faults, options={**OPTIONS, "every_n_train_steps": 1})


def pair(*, num_workers: int) -> dict[str, DataLoader]:
    """Return a long loader of 8 batches and a short one of 3 that is cycled."""
    return {
        "long": DataLoader(HoldingDataset(), batch_size=4, shuffle=True, num_workers=num_workers),
        "short": DataLoader(NoisyDataset(12), batch_size=4, shuffle=True, num_workers=num_workers),
    }


@each_change
def test_several_loaders(before: int, after: int) -> None:
    """With several loaders, one in its second cycle, every batch stays the same with other workers."""
    assert_continues_with(pair, LATER_EPOCH, before, after, module=TwoLoaders)


@pytest.mark.filterwarnings("ignore:Trying to infer the .batch_size.")
@pytest.mark.parametrize("mode", ["min_size", "max_size"])
def test_mode_of_a_combined_loader(mode: str) -> None:
    """The same holds if the short loader ends the epoch, and if it has run out."""
    cut = Cut(kill=5, every=4, continues_at=(1, 1) if mode == "min_size" else (0, 4))

    def make(*, num_workers: int) -> CombinedLoader:
        return CombinedLoader(pair(num_workers=num_workers), mode)

    assert_continues_with(make, cut, 2, 0, module=TwoLoaders)


@each_change
def test_loader_without_a_length(before: int, after: int) -> None:
    """A batch that Lightning fetches ahead is fetched again, and is the same with other workers."""

    def make(*, num_workers: int) -> DataLoader:
        return Unsized(HoldingDataset(), batch_size=4, shuffle=True, num_workers=num_workers)

    assert_continues_with(make, LATER_EPOCH, before, after)


@pytest.mark.parametrize("kill", [11, 12, 13])
def test_loader_without_a_length_beside_a_cycled_one(kill: int) -> None:
    """If the batch fetched ahead has started the short loader's next cycle, it is counted once."""

    def make(*, num_workers: int) -> dict[str, DataLoader]:
        long = Unsized(HoldingDataset(), batch_size=4, num_workers=num_workers)
        return {**pair(num_workers=num_workers), "long": long}

    cut = Cut(kill=kill, every=kill - 1, continues_at=(1, kill - 9))
    assert_continues_with(make, cut, 0, 2, module=TwoLoaders)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sampler_that_draws_while_it_runs_after_a_batch_fetched_ahead(num_workers: int) -> None:
    """With as many workers, such a sampler in a loader without a length continues exactly."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        train = Unsized(NoisyDataset(), batch_size=4, sampler=DrawingSampler(), num_workers=num_workers)
        return fit_net(callbacks, directory, train=train)

    assert_resumes_exactly(fit, [KillAt(3), KillAt(9)], options={**OPTIONS, "every_n_train_steps": 1})


# Iterable data sets decide themselves what comes next in each worker: they have no positions for seeds.


class NoisySquares(Squares):
    """Draws during iteration; each worker yields 3 batches."""

    def __iter__(self) -> Iterator[Tensor]:
        return (square + torch.randn(()) for square in islice(super().__iter__(), 12))


@pytest.mark.parametrize("iterable_workers", [0, 2])
def test_iterable_data_set_beside_a_seeded_one(iterable_workers: int) -> None:
    """An iterable data set with as many workers continues exactly, while the other loader's number changes."""

    def make(*, num_workers: int) -> dict[str, DataLoader]:
        stream = DataLoader(NoisySquares(), batch_size=4, num_workers=iterable_workers)
        return {"long": shuffled(num_workers=num_workers), "short": stream}

    assert_continues_with(make, LATER_EPOCH, 2 - iterable_workers, 3, module=TwoLoaders)


@each_change
@pytest.mark.parametrize("place", ["train", "validation"])
def test_iterable_data_set_is_refused_with_other_workers(place: str, before: int, after: int) -> None:
    """With a different number of workers an iterable data set is refused, also in validation."""

    def fit(callbacks: list[Any], directory: Path) -> Trainer:
        num_workers = after if list(directory.rglob("autosave-*.ckpt")) else before
        return fit_eight(callbacks, directory, **{place: DataLoader(Squares(), batch_size=4, num_workers=num_workers)})

    said = f"{place}/0.num_workers of an iterable data set: {before} when it was saved, {after} now"
    with pytest.raises(NotTheSame, match=said):
        assert_resumes_exactly(fit, [KillAt(5)], options={**OPTIONS, "every_n_train_steps": 4})


class _Seen(NoisyDataset):
    """Returns the numbers that it draws."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4)


def test_epochs_and_loaders_draw_different_numbers() -> None:
    """No two samples of a run draw the same numbers: not in one epoch, not in another, not in validation."""
    seeds, seen = LoaderSeeds(), []
    for place in ("train/0", "validation/0", "train/0"):  # created again, as Lightning may do every epoch
        loader = DataLoader(_Seen(), batch_size=4)
        tracked = TrackedLoader(loader, seeds=seeds.of(place)).copy_of(loader)
        seen += [row for _ in range(2) for batch in tracked for row in batch.tolist()]
    assert len({tuple(row) for row in seen}) == 3 * 2 * 32
