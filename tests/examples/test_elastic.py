"""The elastic example does what its first lines say: killed with two ranks, it resumes with one, and with two again."""

from __future__ import annotations

import functools
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from tests.example_runs import example
from tests.groups import run_group

NUM_EPOCHS = 3


def die_after(name: str, directory: Path) -> None:
    """Kill all ranks, by rank 0, right after it has written the autosave of that name."""
    (directory / f"{os.getpid()}.rank").touch()
    save = AutosaveSeries.save

    def save_and_die(self: AutosaveSeries, *args: Any, **kwargs: Any) -> str:
        path = save(self, *args, **kwargs)
        if name in path:
            for rank in sorted(directory.glob("*.rank"), key=lambda path: path.stem == str(os.getpid())):
                os.kill(int(rank.stem), signal.SIGKILL)  # itself last
        return path

    AutosaveSeries.save = save_and_die  # type: ignore[method-assign]


def run(directory: Path, *, num_ranks: int, dies_after: str | None = None) -> str:
    """Run the example with a number of ranks, and return its output."""
    for rank in directory.glob("*.rank"):
        rank.unlink()

    def main(rank: int) -> None:
        if dies_after is not None:
            die_after(dies_after, directory)
        example("elastic/train.py", directory, num_epochs=NUM_EPOCHS)()

    codes, output = run_group(main, num_ranks=num_ranks, directory=directory)
    assert set(codes) == {-signal.SIGKILL if dies_after is not None else 0}, output
    return output


@pytest.mark.slow
def test_two_ranks_then_one_then_two(tmp_path: Path) -> None:
    """For any number of ranks, killed in the middle of two epochs, each epoch uses each image once."""
    go = functools.partial(run, tmp_path)
    first = go(num_ranks=2, dies_after="epoch=0-batch=40")
    second = go(num_ranks=1, dies_after="epoch=1-batch=44")
    third = go(num_ranks=2)
    assert "Resumed" not in first
    assert "Resumed" in second
    assert "before batch 0 of epoch 0" not in second
    assert "Resumed" in third
    assert "of epoch 1" in third
    ends = re.findall(r"^epoch (\d): 1792 images, each once: True$", first + second + third, flags=re.MULTILINE)
    assert set(ends) == {str(epoch) for epoch in range(NUM_EPOCHS)}
    assert "False" not in "".join(re.findall(r"^epoch .*$", first + second + third, flags=re.MULTILINE))
