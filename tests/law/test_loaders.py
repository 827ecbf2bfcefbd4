"""The law for map-style loaders: order, augmentations and dropout continue as if nothing had happened."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, RandomSampler, WeightedRandomSampler, random_split

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.data_sets import (
    BatchesDataset,
    DrawingSampler,
    ManyAtOnceDataset,
    MappingLoader,
    NoisyCollate,
    NoisyDataset,
    PythonShuffle,
    RaggedBatches,
    UnpackingLoader,
    drawing_worker_init,
)
from tests.runs import (
    Cut,
    assert_continues,
    assert_loader_continues,
    each_cut,
    each_num_workers,
    each_short_cut,
    fit_net,
)

# Lightning advises against shuffled validation; its randomness still has to continue.
pytestmark = pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled:UserWarning")


# The order.


@each_num_workers
@each_cut
def test_shuffled(cut: Cut, num_workers: int) -> None:
    """A shuffled loader resumes in the order of its epoch, and its validation loader draws as if uninterrupted."""
    assert_loader_continues(
        cut,
        num_workers,
        train=lambda num_rows: DataLoader(NoisyDataset(num_rows), batch_size=4, shuffle=True, num_workers=num_workers),
        validation=lambda: DataLoader(NoisyDataset(8), batch_size=4, shuffle=True, num_workers=num_workers),
    )


@each_num_workers
@each_cut
def test_sequential(cut: Cut, num_workers: int) -> None:
    """A sequential loader continues with the next batch, and so do its augmentations."""
    assert_loader_continues(
        cut,
        num_workers,
        train=lambda num_rows: DataLoader(NoisyDataset(num_rows - 1), batch_size=4, num_workers=num_workers),
    )


@each_num_workers
@each_cut
def test_own_generator(cut: Cut, num_workers: int) -> None:
    """A loader with its own generator continues in its order, also in the epochs after the cut."""

    def train(num_rows: int) -> DataLoader:
        data, generator = NoisyDataset(num_rows), torch.Generator().manual_seed(0)
        return DataLoader(data, batch_size=4, shuffle=True, generator=generator, num_workers=num_workers)

    assert_loader_continues(cut, num_workers, train=train, max_epochs=3)


@each_num_workers
@each_cut
def test_drop_last(cut: Cut, num_workers: int) -> None:
    """With ``drop_last`` the incomplete batch is dropped, whether or not the run was cut."""
    assert_loader_continues(
        cut,
        num_workers,
        train=lambda num_rows: DataLoader(
            NoisyDataset(num_rows + 2), batch_size=4, shuffle=True, drop_last=True, num_workers=num_workers
        ),
    )


@each_num_workers
@each_cut
def test_weighted_random_sampler(cut: Cut, num_workers: int) -> None:
    """A WeightedRandomSampler continues with the samples that it drew."""

    def train(num_rows: int) -> DataLoader:
        sampler = WeightedRandomSampler(torch.arange(1.0, num_rows + 1).tolist(), num_rows)
        return DataLoader(NoisyDataset(num_rows), batch_size=4, sampler=sampler, num_workers=num_workers)

    assert_loader_continues(cut, num_workers, train=train)


@each_num_workers
@each_cut
def test_own_batch_sampler(cut: Cut, num_workers: int) -> None:
    """A user's batch sampler continues with its own batches."""
    assert_continues(
        cut, train=lambda: DataLoader(NoisyDataset(), batch_sampler=RaggedBatches(), num_workers=num_workers)
    )


@each_num_workers
@each_cut
def test_sampler_that_shuffles_with_python(cut: Cut, num_workers: int) -> None:
    """A sampler that shuffles with Python's ``random`` continues in its order."""
    assert_loader_continues(
        cut,
        num_workers,
        train=lambda num_rows: DataLoader(
            NoisyDataset(num_rows), batch_size=4, sampler=PythonShuffle(num_rows), num_workers=num_workers
        ),
    )


@each_num_workers
@each_cut
def test_sampler_that_draws_at_every_index(cut: Cut, num_workers: int) -> None:
    """A sampler that draws from the global generator at every index continues exactly, with dropout in between."""
    assert_loader_continues(
        cut,
        num_workers,
        train=lambda num_rows: DataLoader(
            NoisyDataset(num_rows), batch_size=4, sampler=DrawingSampler(num_rows), num_workers=num_workers
        ),
    )


@each_num_workers
@each_cut
def test_without_batching(cut: Cut, num_workers: int) -> None:
    """With ``batch_size=None`` each index is a batch, and the order continues."""

    def train(num_rows: int) -> DataLoader:
        data = BatchesDataset()
        data.rows = data.rows[: num_rows // 4]  # each is a batch
        return DataLoader(data, batch_size=None, shuffle=True, num_workers=num_workers)

    assert_loader_continues(cut, num_workers, train=train)


@each_short_cut
def test_indices_in_batches_without_batching(cut: Cut) -> None:
    """A BatchSampler that is passed as ``sampler`` with ``batch_size=None`` continues."""

    class Rows(NoisyDataset):
        def __getitem__(self, index: list[int]) -> torch.Tensor:
            return torch.stack([super(Rows, self).__getitem__(i) for i in index])

    def train() -> DataLoader:
        sampler = BatchSampler(RandomSampler(range(20)), 4, drop_last=False)
        return DataLoader(Rows(20), batch_size=None, sampler=sampler)

    assert_continues(cut, train=train)


# The workers.


@each_cut
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_persistent_workers(cut: Cut, is_shuffled: bool) -> None:
    """Persistent workers, in training and validation, draw as if uninterrupted, also in later epochs."""

    def loader(length: int) -> DataLoader:
        data = NoisyDataset(length)
        return DataLoader(data, batch_size=4, shuffle=is_shuffled, num_workers=2, persistent_workers=True)

    assert_continues(cut, train=lambda: loader(32), validation=lambda: loader(12), max_epochs=3)


@pytest.mark.slow
def test_persistent_workers_interrupted_twice() -> None:
    """Persistent workers survive two interruptions, in one epoch or one epoch apart."""

    def fit(callbacks, directory):
        def loader(length: int) -> DataLoader:
            return DataLoader(NoisyDataset(length), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True)

        return fit_net(callbacks, directory, train=loader(32), validation=loader(12), max_epochs=3)

    options = {"every_n_train_steps": 1}
    near = assert_resumes_exactly(fit, [KillAt(11), KillAt(2)], options=options)
    assert [(cost.epoch, cost.batch) for cost in near] == [(1, 3), (1, 5)]
    far = assert_resumes_exactly(fit, [KillAt(3), KillAt(8)], options=options)
    assert [(cost.epoch, cost.batch) for cost in far] == [(0, 3), (1, 3)]


@each_cut
def test_persistent_workers_with_fewer_batches_than_the_loader_has(cut: Cut) -> None:
    """If ``limit_train_batches`` ends an epoch early, persistent workers that have fetched more still continue."""
    assert_continues(
        cut,
        train=lambda: DataLoader(
            NoisyDataset(56), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True, prefetch_factor=3
        ),
        limit_train_batches=8,
        max_epochs=3,
    )


@each_cut
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_prefetching_far_ahead(cut: Cut, num_workers: int) -> None:
    """With ``prefetch_factor=5`` the workers are past the cut already, and fetch the unused batches again."""
    assert_continues(
        cut,
        train=lambda: DataLoader(
            NoisyDataset(), batch_size=4, shuffle=True, num_workers=num_workers, prefetch_factor=5
        ),
    )


@pytest.mark.parametrize("batch", [0, 1, 2])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_three_workers_killed_before_each_has_delivered(batch: int, is_persistent: bool) -> None:
    """A run that is killed before each of its workers has delivered a batch of the epoch continues exactly."""
    assert_continues(
        Cut(kill=8 + batch, every=1, continues_at=(1, batch)),
        train=lambda: DataLoader(
            NoisyDataset(), batch_size=4, shuffle=True, num_workers=3, persistent_workers=is_persistent
        ),
        max_epochs=3,
    )


def test_three_workers_stopped_before_each_has_delivered() -> None:
    """A stop by SIGTERM before each worker has delivered repeats nothing, and the run continues exactly."""

    def fit(callbacks, directory):
        return fit_net(
            callbacks, directory, train=DataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=3)
        )

    [cost] = assert_resumes_exactly(fit, [KillAt(1, signum=signal.SIGTERM)])
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (143, 0, 2, 0)


@each_cut
def test_workers_seeded_by_lightning(cut: Cut) -> None:
    """Under ``seed_everything(workers=True)`` the workers, seeded by Lightning's own function, continue exactly."""

    def train() -> DataLoader:
        os.environ["PL_SEED_WORKERS"] = "1"
        return DataLoader(NoisyDataset(), batch_size=4, shuffle=True, num_workers=2)

    assert_continues(cut, train=train)


@each_cut
@pytest.mark.parametrize("is_persistent", [False, True])
def test_functions_of_the_users_that_draw(cut: Cut, is_persistent: bool) -> None:
    """A ``worker_init_fn`` and a ``collate_fn`` that draw are called as often, and draw the same."""
    assert_continues(
        cut,
        train=lambda: DataLoader(
            NoisyDataset(),
            batch_size=4,
            shuffle=True,
            num_workers=2,
            worker_init_fn=drawing_worker_init,
            collate_fn=NoisyCollate(),
            persistent_workers=is_persistent,
        ),
    )


@pytest.mark.slow
@each_cut
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_start_methods(cut: Cut, context: str) -> None:
    """Workers that are not forked get their states, too."""
    assert_continues(
        cut,
        train=lambda: DataLoader(
            NoisyDataset(),
            batch_size=4,
            shuffle=True,
            num_workers=2,
            collate_fn=NoisyCollate(),
            multiprocessing_context=context,
            persistent_workers=True,
        ),
    )


# User classes, and parts of data sets.


@each_num_workers
@each_cut
@pytest.mark.parametrize("kind", [UnpackingLoader, MappingLoader])
def test_subclass_with_its_own_iter(cut: Cut, num_workers: int, kind: type[DataLoader]) -> None:
    """A subclass whose ``__iter__`` unpacks batches, and draws, continues exactly."""
    assert_loader_continues(
        cut,
        num_workers,
        train=lambda num_rows: kind(NoisyDataset(num_rows), batch_size=4, shuffle=True, num_workers=num_workers),
    )


@pytest.mark.parametrize("is_persistent", [False, True])
@pytest.mark.parametrize("kind", [UnpackingLoader, MappingLoader])
def test_subclass_with_its_own_iter_before_its_first_batch(kind: type[DataLoader], is_persistent: bool) -> None:
    """If the run is killed after a generator ``__iter__`` is called but before it starts, the next epoch is right."""
    assert_continues(
        Cut(kill=8, every=1, continues_at=(1, 0)),
        train=lambda: kind(NoisyDataset(), batch_size=4, shuffle=True, num_workers=2, persistent_workers=is_persistent),
    )


@each_num_workers
@each_cut
def test_random_split(cut: Cut, num_workers: int) -> None:
    """The two parts of a ``random_split`` continue, one in training and one in validation."""
    num_rows = 32 if num_workers else 20

    def part(i: int) -> DataLoader:
        parts = random_split(NoisyDataset(num_rows + 8), [num_rows, 8], generator=torch.Generator().manual_seed(0))
        return DataLoader(parts[i], batch_size=4, shuffle=i == 0, num_workers=num_workers)

    assert_loader_continues(cut, num_workers, train=lambda _: part(0), validation=lambda: part(1))


@each_num_workers
@each_cut
def test_concatenated(cut: Cut, num_workers: int) -> None:
    """A ConcatDataset continues."""

    def train(num_rows: int) -> DataLoader:
        data = ConcatDataset([NoisyDataset(num_rows - 12), NoisyDataset(12)])
        return DataLoader(data, batch_size=4, shuffle=True, num_workers=num_workers)

    assert_loader_continues(cut, num_workers, train=train)


@each_num_workers
@each_cut
def test_samples_fetched_all_at_once(cut: Cut, num_workers: int) -> None:
    """A data set with ``__getitems__`` still fetches whole batches, and continues."""
    assert_loader_continues(
        cut,
        num_workers,
        train=lambda num_rows: DataLoader(
            ManyAtOnceDataset(num_rows), batch_size=4, shuffle=True, num_workers=num_workers
        ),
    )
