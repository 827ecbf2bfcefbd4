"""A run of the original library resumes here, in its order, and a state of ours works in the original."""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant import StreamingDataLoader, StreamingDataset
from tests.foreign import mosaic
from tests.processes import run
from tests.streaming.shard_files import batches, write

NUM_SAMPLES, BATCH_SIZE, NUM_BATCHES = 101, 8, 5
ORDERS: dict[str, dict[str, Any]] = {
    "py1e": {"shuffle": True, "shuffle_algo": "py1e"},
    "py1s": {"shuffle": True, "shuffle_algo": "py1s"},
    "py1br": {"shuffle": True, "shuffle_algo": "py1br", "shuffle_block_size": 30},
    "naive": {"shuffle": True, "shuffle_algo": "naive", "num_canonical_nodes": 2},
    "not shuffled": {"shuffle": False, "shuffle_algo": "py1e", "num_canonical_nodes": 3},
    "an epoch of some": {"shuffle": True, "shuffle_algo": "py1e", "epoch_size": 60},
}


def _original(directory: str, **options: Any) -> Any:
    dataset = mosaic().StreamingDataset(local=directory, batch_size=BATCH_SIZE, **options)
    return mosaic().StreamingDataLoader(dataset, batch_size=BATCH_SIZE)


def _read_with_the_original(directory: str, answer: Path) -> None:
    """Read two epochs in each order, with a state from the second, and the end of that epoch from a state of ours."""
    warnings.simplefilter("ignore")
    tempfile.tempdir = str(answer.parent)  # it leaves lock files
    found = {}
    for name, options in ORDERS.items():
        loader = _original(directory, **options)
        first, second = batches(loader), []
        for batch in loader:
            second.append(batch["n"].tolist())
            if len(second) == NUM_BATCHES:
                state = loader.state_dict()
        ours = StreamingDataLoader(StreamingDataset(directory, **options), batch_size=BATCH_SIZE)
        ours.load_state_dict(state)
        next(iter(ours))
        resumed = _original(directory, **options)
        resumed.load_state_dict(ours.state_dict())
        found[name] = {"first": first, "second": second, "state": state, "rest": batches(resumed)}
    answer.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Return a data set, and what the original reads of it in its own process."""
    directory = write(tmp_path_factory.mktemp("data"), NUM_SAMPLES)
    answer = tmp_path_factory.mktemp("answer") / "answer.json"
    ended = run(functools.partial(_read_with_the_original, directory, answer))
    assert ended.exit_code == 0, ended.output
    return directory, json.loads(answer.read_text())


@pytest.mark.parametrize("order", ORDERS)
def test_a_run_of_the_original_continues_here(read: tuple[str, dict[str, Any]], order: str) -> None:
    """The original's epochs are ours, batch for batch, and its state resumes at the next batch."""
    directory, found = read[0], read[1][order]
    loader = StreamingDataLoader(StreamingDataset(directory, **ORDERS[order]), batch_size=BATCH_SIZE)
    assert batches(loader) == found["first"]
    assert batches(loader) == found["second"]
    resumed = StreamingDataLoader(StreamingDataset(directory, **ORDERS[order]), batch_size=BATCH_SIZE)
    resumed.load_state_dict(found["state"])
    assert batches(resumed) == found["second"][NUM_BATCHES:]


@pytest.mark.parametrize("order", ORDERS)
def test_the_original_continues_from_a_state_of_ours(read: tuple[str, dict[str, Any]], order: str) -> None:
    """The original resumes at our state, with the batch after ours."""
    found = read[1][order]
    assert found["rest"] == found["second"][NUM_BATCHES + 1 :]
