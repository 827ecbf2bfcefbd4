"""Code written for torchdata's StatefulDataLoader works with a ResumableDataLoader."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from lightning_faulttolerant import NotExactError, ResumableDataLoader
from lightning_faulttolerant.loader import resumable
from lightning_faulttolerant.loader.resumable_run import from_json, to_json
from tests.loader.loops import Drawing, listed, own_draws, seed


def small(**arguments: Any) -> ResumableDataLoader[Any]:
    """Return a loader of 3 batches."""
    return ResumableDataLoader(Drawing(6), batch_size=2, shuffle=True, **arguments)


def epoch_of(loader: ResumableDataLoader[Any]) -> list[Any]:
    """Return the events of a loop over one epoch."""
    return [(listed(batch), *own_draws()) for batch in loader]


@pytest.mark.parametrize("arguments", [{}, {"worker_rng": "per_sample", "seed": 3}])
def test_a_first_state_starts_over_with_living_workers(arguments: dict[str, Any]) -> None:
    """A state from before the first iteration continues with other workers than those that have drawn since."""
    seed(1)
    loader = small(num_workers=2, persistent_workers=True, **arguments)
    state = loader.state_dict()
    reference = epoch_of(loader)
    loader.load_state_dict(state)
    assert epoch_of(loader) == reference


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
    with pytest.raises(NotExactError, match="was loaded into a ResumableDataLoader after this iterator"):
        next(left)
    other = small(**arguments)
    other.load_state_dict(state)
    reference = (own_draws(), epoch_of(other))
    loader.load_state_dict(state)
    assert (own_draws(), epoch_of(loader)) == reference
    assert reference[0] == draws
    with pytest.raises(NotExactError, match="was loaded into a ResumableDataLoader after this iterator"):
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


def test_a_number_of_steps_between_snapshots_is_taken_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The argument of torchdata's changes nothing; the first loader that has it reports this."""
    resumable._say_no_snapshots.cache_clear()
    with caplog.at_level(logging.WARNING, logger="lightning_faulttolerant"):
        small()
        assert not caplog.messages
        seed(1)
        loader = small(snapshot_every_n_steps=3)
        small(snapshot_every_n_steps=5)
    assert [message.partition(" has")[0] for message in caplog.messages] == ["snapshot_every_n_steps"]
    next(iter(loader))
    assert loader.state_dict()["in_epoch"]


class Counting(IterableDataset[Any]):
    """Keeps tensors, tuples, and numbers as keys in its state."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        while self.place < 5:
            self.place += 1
            yield self.place, torch.rand(()).item()
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the place in several forms."""
        return {"n": {self.place: (torch.tensor([[self.place]], dtype=torch.int16), b"x", None)}, "blob": float("inf")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the place from its tensor."""
        [(number, (tensor, text, nothing))] = state["n"].items()
        assert (tensor.dtype, tensor.tolist(), text, nothing) == (torch.int16, [[number]], b"x", None)
        self.place = number


MADE = {
    "map": lambda: small(),
    "map, workers": lambda: small(num_workers=2),
    "iterable": lambda: ResumableDataLoader(Counting(), batch_size=2),
    "iterable, worker": lambda: ResumableDataLoader(Counting(), batch_size=2, num_workers=1),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_state_is_written_as_json_and_read_back(kind: str) -> None:
    """A state from before, in, or after an epoch continues exactly after it is read back."""
    seed(1)
    loader = MADE[kind]()
    states = [json.dumps(loader.state_dict())]
    events = []
    for _ in range(2):
        for batch in loader:
            events.append((batch, own_draws()))
            states.append(json.dumps(loader.state_dict()))
    for num_done in (0, 1, 3, 4):
        resumed = MADE[kind]()
        resumed.load_state_dict(json.loads(states[num_done]))
        assert json.dumps(resumed.state_dict()) == states[num_done]
        rest = [(batch, own_draws()) for _ in range(resumed.epoch, 2) for batch in resumed]
        assert str(rest) == str(events[num_done:])


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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stateful_stream_continues_from_its_state(num_workers: int) -> None:
    """It continues even after its first batch, in this process and in a worker."""
    loader = ResumableDataLoader(Counting(), batch_size=1, num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [str(batch) for batch in batches]
    resumed = ResumableDataLoader(Counting(), batch_size=1, num_workers=num_workers, state=state)
    assert [str(batch) for batch in resumed] == rest
