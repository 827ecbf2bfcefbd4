"""ResumableDataLoader under Fabric, which wraps loaders, rebuilds them for a sampler, and counts epochs from 0."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler

from lightning_faulttolerant import FingerprintMismatchError, ResumableDataLoader
from tests.groups import run_group
from tests.loader.loops import Drawing, listed, own_draws, seed


def make(**arguments: Any) -> ResumableDataLoader[Any]:
    """Return a loader of 5 batches; of 3 on each of two ranks."""
    return ResumableDataLoader(Drawing(9), batch_size=2, shuffle=True, **arguments)


def epochs(loader: Any, *, num_epochs: int, saved: list[Any] | None = None, first: int = 0) -> list[Any]:
    """Return the events of a loop that sets no epochs, and put the state after each batch into `saved`."""
    events = []
    for epoch in range(first, num_epochs):
        for batch in loader:
            events.append((epoch, listed(batch), *own_draws()))
            if saved is not None:
                saved.append((epoch, loader.state_dict()))
        if saved is not None:
            saved.append((epoch + 1, loader.state_dict()))
    return events


@pytest.mark.parametrize("kind", ["shuffled", "distributed sampler"])
def test_every_position_resumes_exactly_under_fabric(kind: str) -> None:
    """The state is available through the wrapper; the epochs that Fabric sets on the sampler continue too."""

    def wrapped() -> Any:
        if kind == "shuffled":
            loader = make()
        else:
            sampler = DistributedSampler(range(9), num_replicas=2, rank=1)
            loader = ResumableDataLoader(Drawing(9), batch_size=2, sampler=sampler)
        return Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)

    seed(1)
    saved: list[Any] = []
    reference = epochs(wrapped(), num_epochs=4, saved=saved)
    per_epoch = len(reference) // 4
    for number, (epoch, state) in enumerate(saved):
        loader = wrapped()
        seed(100 + number)
        loader.load_state_dict(state)
        done = number + 1 - number // (per_epoch + 1)
        done -= number % (per_epoch + 1) == per_epoch
        assert epochs(loader, num_epochs=4, first=epoch) == reference[done:], f"state {number}"


def test_fabric_saves_and_loads_it(tmp_path: Path) -> None:
    """`fabric.save` and `fabric.load` treat it as an object with a state."""
    fabric = Fabric(accelerator="cpu", devices=1)
    seed(1)
    loader = fabric.setup_dataloaders(make())
    next(batches := iter(loader))
    fabric.save(tmp_path / "state.ckpt", {"loader": loader})
    rest = [listed(batch) for batch in batches]
    resumed = fabric.setup_dataloaders(make())
    fabric.load(tmp_path / "state.ckpt", {"loader": resumed})
    assert [listed(batch) for batch in resumed] == rest


def on_two_ranks(directory: Path, rank: int) -> None:
    """Run all cases on one of two ranks."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    for arguments in ({}, {"num_workers": 2}):
        seed(1 + rank)
        saved: list[Any] = []
        loader = fabric.setup_dataloaders(make(**arguments))
        assert isinstance(loader.sampler, DistributedSampler)
        reference = epochs(loader, num_epochs=3, saved=saved)
        assert len(reference) == 9
        for number in (1, 3, 5, 7, 9) if not arguments else (5,):
            epoch, state = saved[number]
            done = number + 1 - (number + 1) // 4
            seed(50)
            resumed = fabric.setup_dataloaders(make(**arguments))
            resumed.load_state_dict(state)
            assert epochs(resumed, num_epochs=3, first=epoch) == reference[done:], number
            # A state that is loaded before Fabric rebuilds the loader is not lost.
            seed(51)
            early = make(**arguments)
            early.load_state_dict(state)
            assert epochs(fabric.setup_dataloaders(early), num_epochs=3, first=epoch) == reference[done:], number
    # If Fabric does not put in its sampler after all, the beginning of the iteration reports it.
    early = make(**arguments)
    early.load_state_dict(state)
    with pytest.raises(FingerprintMismatchError, match=r"over DistributedSampler' then, '.* over RandomSampler' now"):
        iter(early)
    states = [None, None]
    torch.distributed.all_gather_object(states, saved[1][1])
    with pytest.raises(FingerprintMismatchError, match=rf"rank {1 - rank} then, {rank} now"):
        loader.load_state_dict(states[1 - rank])
    (directory / str(rank)).write_text(str([event[1] for event in reference]))


def test_each_of_two_ranks_resumes_from_its_own_state(tmp_path: Path) -> None:
    """With Fabric's sampler, loaded before or after it is put in; the state of the other rank is refused."""
    os.environ.pop("PL_GLOBAL_SEED", None)
    codes, output = run_group(lambda rank: on_two_ranks(tmp_path, rank), num_ranks=2, directory=tmp_path)
    assert codes == [0, 0], output
    texts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert texts[0] != texts[1]


def test_other_loaders_are_left_as_they_are() -> None:
    """Fabric's wrapper of a plain loader still has no state."""
    wrapped = Fabric(accelerator="cpu", devices=1).setup_dataloaders(DataLoader(range(3)))
    assert not hasattr(wrapped, "state_dict")
