"""A tracker and the copy that it follows: what each does besides a resume, which `test_resumable.py` shows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler

from lightning_faulttolerant.loader.per_sample import SampleSeeds
from lightning_faulttolerant.state.rng import rng_state
from tests.loader.loops import follow, resumable_loop, seed
from tests.loader.made import Drawing, Echo, Failing, Negative, generator
from tests.state.objects.round_trips import through_a_file


def test_a_long_epoch_is_not_walked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of an epoch of torch's own samplers is computed: a resume draws none of the samples before."""

    def batches() -> DataLoader[Any]:
        return DataLoader(Echo(50_000), None, sampler=RandomSampler(range(50_000), generator=generator()))

    reference = [index for _, index, _ in resumable_loop(batches(), num_epochs=1)]
    seed(1)
    tracker, loader = follow(batches())
    assert list(itertools.islice(iter(loader), 100)) == reference[:100]
    state = through_a_file(tracker.state_dict(100))
    fresh = batches()
    monkeypatch.setattr(RandomSampler, "__iter__", lambda self: pytest.fail("it was walked through"))
    assert list(follow(fresh, state)[1]) == reference[100:]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 2, "persistent_workers": True}])
@pytest.mark.parametrize("kind", [DataLoader, Negative])
def test_copy_is_of_the_users_class_and_the_loader_unchanged(kind: Any, workers: dict[str, Any]) -> None:
    """The copy has the user's class and samplers; the loader keeps all attributes but those that it counts itself."""
    loader: Any = kind(Drawing(6), batch_size=2, shuffle=True, generator=generator(0), **workers)
    before, state = dict(vars(loader)), loader.generator.get_state()
    tracker, tracked = follow(loader)
    assert isinstance(tracked, kind)
    assert (type(tracked).__name__, type(tracked).__module__) == (kind.__name__, kind.__module__)
    assert torch.equal(loader.generator.get_state(), state)
    iterator = iter(tracked)
    next(iterator)
    for name in ("dataset", "sampler", "batch_sampler", "batch_size"):
        assert getattr(tracked, name) is getattr(loader, name)
    assert len(tracked) == len(loader)
    assert tracker.num_handed_out > 0
    assert type(loader) is kind
    found = {name: value for name, value in vars(loader).items() if name != "num_iterations"}
    assert found == before
    assert getattr(loader, "num_iterations", 1) == 1
    other: Any = type(tracked)(tracked.dataset, batch_size=3)
    assert (len(other), len(tracked)) == (2, 3), "a loader that is made of the copy's class is its own"


# worker_rng="per_sample": samples that are seeded one by one depend only on their place.


def test_seeded_fetch_leaves_the_generators() -> None:
    """Without workers, a fetch leaves the global and the held generators as they were, even if it fails."""
    for data in (Drawing(4), Failing(4)):
        iterator = iter(follow(DataLoader(data, batch_size=2), seeds=SampleSeeds(seed=3))[1])
        before = rng_state(), data.python.getstate(), data.numpy.bit_generator.state
        if isinstance(data, Failing):
            with pytest.raises(RuntimeError, match="no such sample"):
                next(iterator)
        else:
            next(iterator)
        assert (rng_state(), data.python.getstate(), data.numpy.bit_generator.state) == before
