"""The example for torchrun does what its first lines say."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.harness import python

TRAIN = Path(__file__).parents[2] / "examples" / "torchrun" / "train.py"


def run(directory: Path, *arguments: str) -> str:
    """Run the example in two processes, and return its output."""
    directory.mkdir()
    # One thread: two that wait for each other take a hundred times as long while other tests use the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    words = [*command, str(TRAIN), *arguments]
    # Forked, and so are the ranks; tests/laws/test_launchers.py starts torchrun as a shell does.
    asked = python.Command(words=words, directory=str(directory), environment=environment)
    exit_code, output = python.run(asked, scratch=directory.with_name(f"{directory.name}-scratch"))
    assert exit_code == 0, output
    return output


def weights(output: str) -> str:
    """Return the digest of the trained weights."""
    [found] = re.findall(r"^weights (\w{16})$", output, flags=re.MULTILINE)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_one_rank_is_killed_and_all_continue(tmp_path: Path) -> None:
    """Torchrun restarts all, they resume from one autosave, and the trained weights are the uninterrupted run's."""
    expected = weights(run(tmp_path / "whole"))
    output = run(tmp_path / "killed", "--kill-rank", "0")
    assert output.count("Resumed exactly before batch 2 of epoch 2") == 1
    assert weights(output) == expected
