"""The smallest example does what its first lines say."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

MINIMAL = Path(__file__).parents[2] / "examples" / "minimal.py"


def autosaves(directory: Path) -> set[str]:
    """Return the names of the autosaves that are there."""
    return {path.name for path in directory.glob("fault_tolerance/*/fit-1/autosave-*.ckpt")}


def run_until(directory: Path, *, signum: int, log: Path) -> int:
    """Run the example, send it a signal soon after its second autosave, and return its exit code."""
    # One thread: two that wait for each other take a hundred times as long where other tests have the cores.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before = autosaves(directory)
    with open(log, "wb") as file:
        child = subprocess.Popen(
            [sys.executable, str(MINIMAL)], cwd=directory, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            while len(autosaves(directory) - before) < 2 and child.poll() is None:
                time.sleep(0.01)
            child.send_signal(signum)
            return child.wait(60)
        finally:
            child.kill()


@pytest.mark.slow
def test_killed_in_the_middle_and_run_again_it_goes_on(tmp_path: Path) -> None:
    """The example is killed, goes on, is interrupted as by Ctrl-C, and goes on again, to say so each time."""
    logs = [tmp_path / f"{i}.log" for i in range(3)]
    assert run_until(tmp_path, signum=signal.SIGKILL, log=logs[0]) == -signal.SIGKILL
    assert run_until(tmp_path, signum=signal.SIGINT, log=logs[1]) == 130
    assert run_until(tmp_path, signum=signal.SIGTERM, log=logs[2]) == 143
    texts = [log.read_text() for log in logs]
    assert ["Resumed exactly" in text for text in texts] == [False, True, True]
    assert "before batch 0 of epoch 0" not in texts[1] + texts[2]
