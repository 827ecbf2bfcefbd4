"""The law of ResumableDataLoader, in a plain loop: wherever it is cut, the rest is that of the uninterrupted run."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

from lightning_faulttolerant import FingerprintMismatchError, InterruptibleSampler, NotExactError, ResumableDataLoader
from lightning_faulttolerant.loader.resumable_run import from_json, to_json
from tests.data_sets import PythonShuffle
from tests.laws.processes import run_ranks
from tests.loader.loops import Event, assert_resumable, listed, own_draws, resumable_loop, seed
from tests.loader.made import Drawing, Echo, OwnIterator, SampledRange, Stream, Tasks, generator


class CountingStream(IterableDataset[Any]):
    """Keeps tensors, tuples, and numbers as keys in its state."""

    place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < 5:
            self.place += 1
            yield torch.tensor([self.place, torch.rand(()).item()])
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place in several forms."""
        return {"n": {self.place: (torch.tensor([[self.place]], dtype=torch.int16), b"x", None)}, "blob": float("inf")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the place from its tensor."""
        [(number, (tensor, text, nothing))] = state["n"].items()
        assert (tensor.dtype, tensor.tolist(), text, nothing) == (torch.int16, [[number]], b"x", None)
        self.place = number


class Doubling(ResumableDataLoader[Any]):
    """Changes the batches, as subclasses of DataLoader do."""

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch * 2


def drawn(samples: list[Any]) -> Any:
    """Return a batch with a random number."""
    return torch.tensor([[x.item() for (x,) in samples], [torch.rand(()).item()] * len(samples)])


def small(**arguments: Any) -> ResumableDataLoader[Any]:
    """Return a loader of 5 batches."""
    return ResumableDataLoader(Drawing(5), batch_size=1, shuffle=True, **arguments)


ROWS: dict[str, Callable[..., Any]] = {
    "shuffled": lambda **more: ResumableDataLoader(Drawing(7), 2, shuffle=True, **more),
    "last dropped": lambda **more: ResumableDataLoader(Drawing(7), 2, shuffle=True, drop_last=True, **more),
    "generator": lambda **more: ResumableDataLoader(Drawing(7), 2, shuffle=True, generator=generator(), **more),
    "no batching": lambda **more: ResumableDataLoader(Drawing(5), None, sampler=RandomSampler(range(5)), **more),
    "distributed": lambda **more: ResumableDataLoader(
        Drawing(9), 2, sampler=DistributedSampler(range(9), 2, 1, seed=5), **more
    ),
    "drawn at its start": lambda **more: ResumableDataLoader(Echo(), None, sampler=PythonShuffle(9), **more),
    "own iterator": lambda **more: ResumableDataLoader(Echo(), None, sampler=OwnIterator(), **more),
    "sampler of ours": lambda **more: ResumableDataLoader(Drawing(7), 2, sampler=InterruptibleSampler(7), **more),
    "iterable": lambda **more: ResumableDataLoader(Stream(7), 2, **more),
    "sampler of an iterable": lambda **more: ResumableDataLoader(SampledRange(), 3, **more),
    "tasks": lambda **more: ResumableDataLoader(Tasks(), None, **more),
    "stateful stream": lambda **more: ResumableDataLoader(CountingStream(), 2, **more),
    "per_sample": lambda **more: ResumableDataLoader(Drawing(7), 2, worker_rng="per_sample", seed=3, **more),
    "subclass": lambda **more: Doubling(Drawing(5), 2, shuffle=True, **more),
}
WORKERS: dict[str, dict[str, Any]] = {
    "2 workers": {"num_workers": 2},
    "2 persistent workers": {"num_workers": 2, "persistent_workers": True},
}
FAST = {("shuffled", "2 persistent workers"), ("iterable", "2 workers")}


@pytest.mark.parametrize("row", ROWS)
def test_every_position_resumes_exactly(row: str) -> None:
    """Before the first iteration and after each batch, including the last ones, with states that JSON holds."""
    assert_resumable(ROWS[row], cuts=slice(None, None, 2), is_plain=row not in ("per_sample", "subclass"))


@pytest.mark.parametrize(
    ("row", "workers"),
    [
        pytest.param(*pair, marks=() if pair in FAST else pytest.mark.slow)
        for pair in itertools.product(ROWS, WORKERS)
        if pair[0] != "stateful stream"
    ],
)
def test_positions_resume_exactly_with_workers(row: str, workers: str) -> None:
    """The draws of the workers continue too, whether they live for one epoch or for all."""
    plain = row not in ("per_sample", "subclass")
    assert_resumable(partial(ROWS[row], **WORKERS[workers]), cuts=slice(None, None, 3), is_plain=plain)


def counted_loop(loader: Any, epoch: int, *, counts: bool) -> Iterator[Any]:
    """Yield the batches of an epoch of the sampler, which the loop may count in the sampler."""
    with loader.sampler.in_epoch(epoch):
        for batch in loader:
            if counts:
                loader.sampler.advance(len(batch))
            yield batch


def ended_loop(loader: Any, epoch: int) -> Iterator[Any]:
    """Yield two batches, and end the epoch."""
    for k, batch in enumerate(loader):
        if k == 1:
            loader.end_epoch()
        yield batch


@pytest.mark.parametrize("counts", [False, True])
def test_a_sampler_that_is_told_by_in_epoch_continues(counts: bool) -> None:
    """The sampler's own epochs and the loader's continue together, even if the loop counts in the sampler."""
    make, epoch_of = ROWS["sampler of ours"], partial(counted_loop, counts=counts)
    assert_resumable(make, epoch_of=epoch_of, num_epochs=3, is_plain=False)


@pytest.mark.parametrize("arguments", [{}, WORKERS["2 persistent workers"]])
def test_an_epoch_that_is_cut_short_on_purpose_is_ended(arguments: dict[str, Any]) -> None:
    """After `end_epoch` the loop ends, and a state begins the next epoch."""
    assert_resumable(
        partial(small, **arguments), epoch_of=ended_loop, num_epochs=3, cuts=slice(3, None, 3), is_plain=False
    )


def test_samples_seeded_one_by_one_resume_with_another_number_of_workers() -> None:
    """With worker_rng="per_sample" the draws of the samples continue alike with 0 workers and with 2."""

    def make(num_workers: int) -> ResumableDataLoader[Any]:
        data, more = TensorDataset(torch.arange(9.0)), {"worker_rng": "per_sample", "seed": 5, "collate_fn": drawn}
        return ResumableDataLoader(data, batch_size=2, shuffle=True, num_workers=num_workers, **more)

    seed(1)
    saved: list[Any] = []
    reference = resumable_loop(make(0), num_epochs=2, saved=saved)
    for number, num_workers in ((2, 2), (5, 0), (8, 2)):
        seed(number)
        position, state = saved[number]
        loader = make(num_workers)
        loader.load_state_dict(state)
        assert resumable_loop(loader, num_epochs=2) == reference[position:]


def with_states(loader: ResumableDataLoader[Any], states: list[Any] | None = None) -> list[Any]:
    """Return a loop's events up to the end of the second epoch; note the state before it, and after each batch."""
    events = []
    states = [] if states is None else states
    states.append(loader.state_dict())
    for epoch in range(loader.epoch, 2):
        for batch in loader:
            events.append((epoch, batch.tolist(), own_draws()))
            states.append(loader.state_dict())
    return events


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_the_state_that_was_loaded_last_is_continued_from(num_workers: int) -> None:
    """Nothing is left of the state that was loaded first, wherever in their epochs the two are."""

    def make() -> ResumableDataLoader[Any]:
        dataset = Drawing(2)
        dataset.lazy = random.Random(7)
        return ResumableDataLoader(dataset, shuffle=True, num_workers=num_workers)

    seed(1)
    states: list[Any] = []
    events = with_states(make(), states)
    for before, last in itertools.product(states[::2], range(0, len(states), 2)):
        loader = make()
        loader.load_state_dict(before)
        loader.load_state_dict(states[last])
        assert with_states(loader) == events[last:]


def test_a_state_before_the_first_batch_of_an_iteration_has_all_its_batches() -> None:
    """A state taken between ``iter`` and the first ``next``, here or after a resume, begins with batch 0."""
    for make in (small, ROWS["drawn at its start"], ROWS["own iterator"]):
        assert_begun_state_resumes(make)


def assert_begun_state_resumes(make: Callable[[], Any]) -> None:
    """Assert that it does."""
    seed(1)
    loader = make()
    batches = iter(loader)
    state = loader.state_dict()
    reference = [(listed(batch), *own_draws()) for batch in batches]
    for _ in range(2):
        seed(2)
        resumed = make()
        resumed.load_state_dict(state)
        batches = iter(resumed)
        random.random()
        state = resumed.state_dict()
        assert [(listed(batch), *own_draws()) for batch in batches] == reference


def test_a_loop_left_by_break_continues_after_its_last_batch() -> None:
    """A state taken after the loop, as for a stop, has the rest of the epoch."""
    seed(1)
    whole = [listed(batch) for batch in small()]
    seed(1)
    loader = small()
    for k, _ in enumerate(loader):
        if k == 2:
            break
    resumed = small()
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.epoch, [listed(batch) for batch in resumed]) == (0, whole[3:])
    assert resumed.epoch == 1


def test_a_loop_that_asks_for_so_many_batches_resumes_exactly() -> None:
    """An iterator that yields all its batches, but is never asked for its end, leaves no epoch unfinished."""

    def epochs(loader: ResumableDataLoader[Any], saved: list[Any], first: int = 0) -> list[Event]:
        events: list[Event] = []
        for epoch in range(loader.epoch, 3):
            batches = iter(loader)
            for k in range(first, 5):
                events.append((epoch, k, listed(next(batches)), *own_draws()))
                saved.append(loader.state_dict())
            first = 0
        return events

    seed(1)
    saved: list[Any] = []
    reference = epochs(small(), saved)
    for num_done in (3, 5, 15):
        loader = small()
        loader.load_state_dict(saved[num_done - 1])
        assert epochs(loader, [], first=(num_done - 1) % 5 + 1) == reference[num_done:]


def test_epochs_that_are_left_and_not_saved_there_are_as_with_any_loader() -> None:
    """Without a state at the place of the break, the next iteration is the next epoch."""
    seed(1)
    plain = DataLoader(Drawing(5), batch_size=1, shuffle=True)
    reference = [listed(next(iter(plain))) for _ in range(3)]
    seed(1)
    loader = small()
    assert [listed(next(iter(loader))) for _ in range(3)] == reference
    assert loader.epoch == 2


def test_a_copy_has_the_state_that_was_loaded() -> None:
    """A copy of a loader that has not begun continues where the loader would; its state is its own."""
    seed(1)
    loader = small()
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [listed(batch) for batch in batches]
    original = small(state=state)
    duplicate = copy.copy(original)
    assert [listed(batch) for batch in duplicate] == rest
    assert duplicate.state_dict()["epoch"] == 1
    assert original.state_dict()["epoch"] == 0


def test_a_sampler_whose_loader_was_given_a_state_can_be_pickled() -> None:
    """It then receives its epochs itself, and the original sampler doesn't."""
    sampler = DistributedSampler(range(6), num_replicas=1, rank=0)
    loader = ResumableDataLoader(list(range(6)), batch_size=2, sampler=sampler)  # type: ignore[arg-type]
    loader.load_state_dict(loader.state_dict())
    for again in (pickle.loads(pickle.dumps(sampler)), copy.deepcopy(sampler)):
        again.set_epoch(3)
        assert (again.epoch, sampler.epoch) == (3, 0)


def test_what_is_set_after_a_load_takes_effect() -> None:
    """An attribute that is set between a load and the first iteration takes effect, and the place stays loaded."""
    seed(1)
    loader = small()
    next(batches := iter(loader))
    state = loader.state_dict()
    rest = [batch[0, 0].item() for batch in batches]
    resumed = small(state=state)
    resumed.collate_fn = lambda samples: torch.stack(samples)[:, :1]
    assert [listed(batch) for batch in resumed] == [[[index]] for index in rest]


class Slow(Dataset[float]):
    """Loads one sample in 6 seconds, and can't load another one."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> float:
        if index == 6:
            raise OSError("a broken file")
        time.sleep(6 * (index == 2))
        return random.random()


class SlowStream(IterableDataset[float]):
    """Loads its second sample in 6 seconds."""

    def __iter__(self) -> Iterator[float]:
        for k in range(5):
            time.sleep(6 * (k == 1))
            yield random.random()


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [Slow(), SlowStream()], ids=["map-style", "iterable"])
def test_state_waits_for_a_slow_worker(dataset: Any) -> None:
    """A state that needs what persistent workers still fetch waits for it, however long that takes."""
    states, rests = [], []
    for _ in range(2):
        loader = ResumableDataLoader(
            dataset, num_workers=2, batch_size=None, prefetch_factor=1, persistent_workers=True
        )
        seed(1)
        if states:
            loader.load_state_dict(states[0])
        else:
            next(iter(loader))
            loader.end_epoch()
            states.append(loader.state_dict())
        rests.append([float(next(batches)) for batches in [iter(loader)] for _ in range(4)])
    assert rests[0] == rests[1]


@pytest.mark.slow
def test_state_does_not_wait_for_a_batch_that_failed() -> None:
    """A worker that could not fetch what it was given leaves no state: that is said at once."""
    loader = ResumableDataLoader(
        Slow(), sampler=[0, 1, 6, 6], num_workers=2, batch_size=None, prefetch_factor=2, persistent_workers=True
    )
    next(iter(loader))
    loader.end_epoch()
    with pytest.raises(NotExactError, match="no state after 2 batches"):
        loader.state_dict()


# Under Fabric, which wraps loaders, rebuilds them for a sampler, and counts epochs from 0.


def made(**arguments: Any) -> ResumableDataLoader[Any]:
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
            loader = made()
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
    loader = fabric.setup_dataloaders(made())
    next(batches := iter(loader))
    fabric.save(tmp_path / "state.ckpt", {"loader": loader})
    rest = [listed(batch) for batch in batches]
    resumed = fabric.setup_dataloaders(made())
    fabric.load(tmp_path / "state.ckpt", {"loader": resumed})
    assert [listed(batch) for batch in resumed] == rest


def on_two_ranks(directory: Path, rank: int) -> None:
    """Run all cases on one of two ranks."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    for arguments in ({}, {"num_workers": 2}):
        seed(1 + rank)
        saved: list[Any] = []
        loader = fabric.setup_dataloaders(made(**arguments))
        assert isinstance(loader.sampler, DistributedSampler)
        reference = epochs(loader, num_epochs=3, saved=saved)
        assert len(reference) == 9
        for number in (1, 7) if not arguments else (5,):
            epoch, state = saved[number]
            done = number + 1 - (number + 1) // 4
            seed(50)
            resumed = fabric.setup_dataloaders(made(**arguments))
            resumed.load_state_dict(state)
            assert epochs(resumed, num_epochs=3, first=epoch) == reference[done:], number
            # A state that is loaded before Fabric rebuilds the loader is not lost.
            seed(51)
            early = made(**arguments)
            early.load_state_dict(state)
            assert epochs(fabric.setup_dataloaders(early), num_epochs=3, first=epoch) == reference[done:], number
    # If Fabric does not put in its sampler after all, the beginning of the iteration reports it.
    early = made(**arguments)
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
    outputs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    codes = run_ranks(lambda rank: on_two_ranks(tmp_path, rank), outputs=outputs, seed=1)
    assert codes == [0, 0], [output.read_text() for output in outputs]
    texts = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert texts[0] != texts[1]


def test_other_loaders_are_left_as_they_are() -> None:
    """Fabric's wrapper of a plain loader still has no state."""
    wrapped = Fabric(accelerator="cpu", devices=1).setup_dataloaders(DataLoader(range(3)))
    assert not hasattr(wrapped, "state_dict")


# As torchdata's StatefulDataLoader.


def epoch_events(loader: ResumableDataLoader[Any]) -> list[Any]:
    """Return the events of a loop over one epoch."""
    return [(listed(batch), *own_draws()) for batch in loader]


@pytest.mark.parametrize("arguments", [{}, {"worker_rng": "per_sample", "seed": 3}])
def test_a_first_state_starts_over_with_living_workers(arguments: dict[str, Any]) -> None:
    """A state from before the first iteration continues with other workers than those that have drawn since."""
    seed(1)
    loader = small(num_workers=2, persistent_workers=True, **arguments)
    state = loader.state_dict()
    reference = epoch_events(loader)
    loader.load_state_dict(state)
    assert epoch_events(loader) == reference


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_an_iterator_that_was_left_is_not_in_the_way_of_a_state(arguments: dict[str, Any]) -> None:
    """A state is loaded while an old iterator exists; the old iterator's next raises, and the loop is exact."""
    seed(1)
    loader = small(**arguments)
    left = iter(loader)
    next(left)
    state = loader.state_dict()
    draws = own_draws()
    next(left)
    loader.load_state_dict(state)
    with pytest.raises(NotExactError):
        next(left)
    other = small(**arguments)
    other.load_state_dict(state)
    reference = (own_draws(), epoch_events(other))
    loader.load_state_dict(state)
    assert (own_draws(), epoch_events(loader)) == reference
    assert reference[0] == draws
    with pytest.raises(NotExactError):
        next(left)


def test_the_iterator_has_what_torchs_has() -> None:
    """Workers are found where torch has them, and an attribute that torch's iterator lacks is lacking."""
    batches = iter(small(num_workers=2))
    assert [worker.is_alive() for worker in batches._workers] == [True, True]
    assert not hasattr(batches, "nothing_of_that_name")
    assert not hasattr(iter(small()), "_workers")


class TooLong(IterableDataset[int]):
    """Has more samples than its length."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize("is_asked_late", [False, True])
def test_torch_warns_of_more_samples_than_the_length(is_asked_late: bool) -> None:
    """As with torch's loader, the warning comes once the length was used, before the first iteration or after it."""
    loader = ResumableDataLoader(TooLong(), batch_size=1)
    if is_asked_late:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(iter(loader))) == 4
    assert len(loader) == 2
    with pytest.warns(UserWarning, match="Length of IterableDataset"):
        assert len([batch for batch in loader]) == 4  # noqa: C416 - list() would use the length


@pytest.mark.parametrize(
    "value",
    [
        {"<tensor>": 1},
        {"blob": 2},
        {1: "a", "1": "b"},
        (1, (2, [3])),
        b"bytes",
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).t(),
        torch.empty(0, 3),
        torch.tensor([True, False]),
    ],
)
def test_what_json_lacks_comes_back(value: Any) -> None:
    """Tensors, tuples, bytes, numbers as keys, and dicts that look like their replacements come back."""
    [back] = from_json(json.loads(json.dumps(to_json({"value": value})))).values()
    assert type(back) is type(value)
    assert str(back) == str(value)
    if isinstance(value, torch.Tensor):
        assert (back.dtype, back.shape) == (value.dtype, value.shape)


SCRIPT = """
import torch
from lightning_faulttolerant import ResumableDataLoader

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return index, torch.rand(()).item()

loader = ResumableDataLoader(Data(), batch_size=2, shuffle=True, num_workers={num_workers})
states, sizes = [], []
for epoch in range(4):
    for batch in loader:
        state = loader.state_dict()
        checkpoint = {{"loader": state}}
        states.append(state)
        print(len(str(state)))
        last = [value.tolist() for value in batch]
resumed = ResumableDataLoader(Data(), batch_size=2, shuffle=True, num_workers={num_workers})
resumed.load_state_dict(states[-2])
assert [[value.tolist() for value in batch] for batch in resumed] == [last]
"""


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_state_in_a_global_of_the_script_is_no_part_of_the_next(num_workers: int, tmp_path: Path) -> None:
    """A loop at the top of a script keeps its states beside the data set's other globals; they do not grow."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(num_workers=num_workers))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    sizes = list(map(int, done.stdout.split()))
    assert max(sizes[4:]) < 1.2 * max(sizes[2:4])
