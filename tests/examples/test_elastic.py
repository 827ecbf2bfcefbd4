"""The elastic example does what its first lines say: killed with two ranks, it goes on with one, and with two again."""

from __future__ import annotations

import functools
import os
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.example_runs import autosaves, example
from tests.groups import run_group

NUM_EPOCHS = 3


def die_in(directory: Path, name: str) -> None:
    """End this process by a kill once there is an autosave of that name."""
    while not any(name in found for found in autosaves(directory)):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGKILL)


def run(directory: Path, *, num_ranks: int, dies_in: str | None = None) -> str:
    """Run the example with so many ranks; return what it printed."""

    def main(rank: int) -> None:
        if dies_in is not None:
            threading.Thread(target=die_in, args=(directory, dies_in), daemon=True).start()
        example("elastic/train.py", directory, num_epochs=NUM_EPOCHS)()

    codes, output = run_group(main, num_ranks=num_ranks, directory=directory)
    assert set(codes) == {-signal.SIGKILL if dies_in is not None else 0}, output
    return output


@pytest.mark.slow
def test_two_ranks_then_one_then_two(tmp_path: Path) -> None:
    """However many ranks there are, killed in the middle of two epochs, each epoch uses each image once."""
    go = functools.partial(run, tmp_path)
    first = go(num_ranks=2, dies_in="epoch=0-batch=40")
    second = go(num_ranks=1, dies_in="epoch=1-batch=44")
    third = go(num_ranks=2)
    assert "Resumed" not in first
    assert "Resumed" in second
    assert "before batch 0 of epoch 0" not in second
    assert "Resumed" in third
    assert "of epoch 1" in third
    ends = re.findall(r"^epoch (\d): 1792 images, each once: True$", first + second + third, flags=re.MULTILINE)
    assert set(ends) == {str(epoch) for epoch in range(NUM_EPOCHS)}
    assert "False" not in "".join(re.findall(r"^epoch .*$", first + second + third, flags=re.MULTILINE))
