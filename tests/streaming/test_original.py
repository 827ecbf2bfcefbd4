"""A state of the original library continues here, from the next epoch."""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from pathlib import Path

import pytest

from lightning_faulttolerant import StreamingDataLoader, StreamingDataset
from tests.processes import run
from tests.streaming.foreign import mosaic
from tests.streaming.shard_files import batches, write


def _read_with_the_original(directory: str, answer: Path) -> None:
    """Write its states in the middle and at the end of an epoch."""
    warnings.simplefilter("ignore")
    tempfile.tempdir = str(answer.parent)  # it leaves lock files
    dataset = mosaic().StreamingDataset(local=directory, batch_size=8, shuffle=True, shuffle_seed=3)
    loader = mosaic().StreamingDataLoader(dataset, batch_size=8)
    states = [loader.state_dict() for _, _ in zip(range(5), loader, strict=False)]
    batches(loader)
    answer.write_text(json.dumps([states[-1], loader.state_dict()]))


def test_a_state_of_the_original_continues_from_the_next_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With its seed, and with a warning if it is in the middle of an epoch."""
    directory, answer = write(tmp_path / "data", 101), tmp_path / "answer.json"
    ended = run(functools.partial(_read_with_the_original, directory, answer))
    assert ended.exit_code == 0, ended.output
    for state, warning in zip(json.loads(answer.read_text()), ["in the middle of epoch 0", ""], strict=True):
        caplog.clear()
        loader = StreamingDataLoader(StreamingDataset(directory, shuffle=True), batch_size=8)
        loader.load_state_dict(state)
        assert warning in caplog.text
        assert bool(caplog.records) == bool(warning)
        assert loader.state_dict()["epoch"] == state["epoch"] + 1
        whole = StreamingDataLoader(StreamingDataset(directory, shuffle=True, shuffle_seed=3), batch_size=8)
        epochs = [batches(whole) for _ in range(3)]
        assert batches(loader) == epochs[loader.dataset.next_epoch - 1]
