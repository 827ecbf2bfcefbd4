"""Samples that are seeded one by one depend only on their place, and no other code notices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from lightning_faulttolerant.loader.per_sample import SampleSeeds
from lightning_faulttolerant.loader.tracked import TrackedLoader
from lightning_faulttolerant.state.rng import rng_state
from tests.loader.loops import Drawing, seed


class Failing(Drawing):
    """Fails after its draws."""

    def __getitem__(self, index: int) -> Tensor:
        super().__getitem__(index)
        raise RuntimeError("no such sample")


def batches(num_workers: int, *, epochs: int = 2) -> list[list[list[float]]]:
    """Return the batches of some epochs."""
    seed(1)
    loader = DataLoader(Drawing(7), batch_size=2, shuffle=True, num_workers=num_workers)
    tracked = TrackedLoader(loader, seeds=SampleSeeds(seed=3)).copy_of(loader)
    return [batch.tolist() for _ in range(epochs) for batch in tracked]


def test_batches_do_not_depend_on_the_number_of_workers() -> None:
    """Two epochs yield the same batches with no, one and two workers."""
    assert batches(0) == batches(1) == batches(2)


def test_own_generator_moves_on_alike() -> None:
    """The draw of torch's sampler after its last index is kept, even if workers draw the epoch in one go."""

    def drawn(num_workers: int) -> tuple[list[Tensor], Tensor]:
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(
            Drawing(6), batch_size=2, sampler=RandomSampler(range(6), generator=generator), num_workers=num_workers
        )
        tracked = TrackedLoader(loader, seeds=SampleSeeds(seed=3)).copy_of(loader)
        return [batch for _ in range(3) for batch in tracked], generator.get_state()

    batches, state = drawn(0)
    for num_workers in (1, 2):
        others, state_then = drawn(num_workers)
        assert torch.equal(torch.stack(others), torch.stack(batches))
        assert torch.equal(state_then, state)


def test_a_fetch_in_the_process_leaves_the_generators() -> None:
    """Without workers, a fetch leaves the global and the held generators as they were, even if it fails."""
    for data in (Drawing(4), Failing(4)):
        loader = DataLoader(data, batch_size=2)
        tracked = TrackedLoader(loader, seeds=SampleSeeds(seed=3)).copy_of(loader)
        iterator = iter(tracked)
        assert tracked.dataset is data
        before = rng_state(), data.python.getstate(), data.numpy.bit_generator.state
        if isinstance(data, Failing):
            with pytest.raises(RuntimeError, match="no such sample"):
                next(iterator)
        else:
            assert isinstance(next(iterator), torch.Tensor)
        assert (rng_state(), data.python.getstate(), data.numpy.bit_generator.state) == before
