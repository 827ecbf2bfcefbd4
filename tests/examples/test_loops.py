"""The examples without a Trainer do what their first lines say: killed and run again, they end with the same line."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.groups import run_group
from tests.processes import Ended, Script

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str, directory: Path) -> Any:
    """Return an example as a function that runs in `directory`."""

    def main(*_: Any) -> None:
        torch.set_num_threads(1)
        os.chdir(directory)
        runpy.run_path(str(EXAMPLES / name / "train.py"), run_name="__main__")

    return main


def num_saved(directory: Path) -> int:
    """Return the number of checkpoints, or a value that changes when the single one is replaced."""
    if (directory / "checkpoints").exists():
        # The numbers go up; the oldest are deleted.
        numbers = (path.name.rpartition("_")[2] for path in directory.glob("checkpoints/*_checkpoint_*"))
        return max((int(number) for number in numbers if number.isdigit()), default=0)
    file = directory / "checkpoint.pt"
    return file.stat().st_mtime_ns if file.exists() else 0


def kill_after_a_save(script: Script, directory: Path) -> Ended:
    """Kill an example once it has saved three times."""
    seen, before = 0, num_saved(directory)
    while seen < 3 and script.is_running():
        now = num_saved(directory)
        seen, before = seen + (now != before), now
        time.sleep(0.002)
    os.killpg(script.process_id, signal.SIGKILL)
    return script.wait()


@pytest.mark.parametrize("name", ["plain_loop", pytest.param("fabric", marks=pytest.mark.slow)])
def test_an_example_that_is_killed_ends_with_the_same_line(name: str, tmp_path: Path) -> None:
    """After a kill and a restart, the last line with the weights' sum is the uninterrupted run's."""
    (tmp_path / "whole").mkdir()
    whole = Script(example(name, tmp_path / "whole")).wait()
    assert whole.exit_code == 0, whole.output
    (tmp_path / "cut").mkdir()
    killed = kill_after_a_save(Script(example(name, tmp_path / "cut")), tmp_path / "cut")
    assert killed.exit_code == -signal.SIGKILL, killed.output
    last = Script(example(name, tmp_path / "cut"), seed=9).wait()
    assert "Resumed after step" in last.output
    assert last.output.splitlines()[-1] == whole.output.splitlines()[-1]
    assert "done: " in last.output.splitlines()[-1]


def die_after_a_save(directory: Path) -> None:
    """Kill this process once four checkpoints exist."""
    while num_saved(directory) < 4:
        time.sleep(0.0005)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_the_example_with_fabric_on_two_ranks(tmp_path: Path) -> None:
    """Both ranks are killed after a save and continue, each from its own state."""

    def run(directory: Path, *, dies: bool) -> str:
        def main(rank: int) -> None:
            sys.argv = ["train.py", "2"]
            if dies:
                threading.Thread(target=die_after_a_save, args=(directory,), daemon=True).start()
            example("fabric", directory)()

        codes, output = run_group(main, num_ranks=2, directory=tmp_path)
        assert (set(codes) == {0}) != dies, output
        return next((line for line in output.splitlines() if line.startswith("done: ")), output)

    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", dies=False)
    run(tmp_path / "cut", dies=True)
    assert run(tmp_path / "cut", dies=False) == whole
