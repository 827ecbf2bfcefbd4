"""Runs the unmodified examples in forked processes that have imported everything, and kills them."""

from __future__ import annotations

import functools
import hashlib
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch
import torch

import lightning_faulttolerant
from lightning_faulttolerant import FaultTolerance
from tests.processes import Ended, Script

EXAMPLES = Path(__file__).parents[1] / "examples"


class ShortTrainer(lightning.pytorch.Trainer):
    """Trains for a few epochs only, and draws nothing."""

    num_epochs = 0

    def __init__(self, **arguments: Any) -> None:
        own = {"max_epochs": self.num_epochs, "enable_progress_bar": False, "enable_model_summary": False}
        super().__init__(**{**arguments, **own})


def example(name: str, directory: Path, *arguments: str, num_epochs: int | None = 6) -> Callable[[], None]:
    """Return the example at `name` as a function that runs in `directory`, for `num_epochs` epochs unless ``None``."""

    def main() -> None:
        torch.set_num_threads(1)
        os.chdir(directory)
        sys.argv = [name, *arguments]
        if num_epochs is not None:
            ShortTrainer.num_epochs = num_epochs
            # Only in this process. The cost of a save would allow one a second, which is most of the run.
            lightning.pytorch.Trainer = ShortTrainer
            lightning_faulttolerant.FaultTolerance = functools.partial(FaultTolerance, every_n_train_steps=15)
        names = runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        if "trainer" in names and names["trainer"].is_global_zero:
            weights = [value.numpy().tobytes() for value in names["trainer"].model.state_dict().values()]
            print(f"digest {hashlib.sha256(b''.join(weights)).hexdigest()}")

    return main


def autosaves(directory: Path) -> set[str]:
    """Return the names of the existing autosaves."""
    return {path.name for path in directory.glob("**/fit-1/autosave-*.ckpt")}


def strike_after_saves(script: Script, directory: Path, *, num_saves: int = 2, signum: int = signal.SIGKILL) -> Ended:
    """Send a signal to an example and its workers after it has written `num_saves` more autosaves."""
    before = autosaves(directory)
    seen: set[str] = set()
    while len(seen) < num_saves and script.is_running():
        seen |= autosaves(directory) - before
        time.sleep(0.002)
    with suppress(ProcessLookupError):
        os.killpg(script.process_id, signum)
    return script.wait()


def assert_ends_the_same(
    run: Callable[[Path], Callable[[], None]], tmp_path: Path, *, line: str, signum: int | None = None
) -> None:
    """Check that an example that is killed midway and run again prints the same last line as the uninterrupted run.

    Args:
        run: Returns the example in a directory.
        tmp_path: Where the directories are created.
        line: How the line begins.
        signum: The signal that stops it a second time; the first time it is killed.
    """
    (tmp_path / "whole").mkdir()
    whole = Script(run(tmp_path / "whole")).wait()
    assert whole.exit_code == 0, whole.output
    cut = tmp_path / "cut"
    cut.mkdir()
    killed = strike_after_saves(Script(run(cut)), cut)
    assert killed.exit_code == -signal.SIGKILL, killed.output
    if signum is not None:
        stopped = strike_after_saves(Script(run(cut), seed=2), cut, signum=signum)
        assert stopped.exit_code == 128 + signum, stopped.output
        assert_went_on(stopped)
    last = Script(run(cut), seed=3).wait()
    assert last.exit_code == 0, last.output
    assert_went_on(last)
    assert _line(last, line) == _line(whole, line)


def assert_went_on(ended: Ended) -> None:
    """Check that a process has resumed after the first batch."""
    assert "Resumed exactly before batch" in ended.output
    assert "before batch 0 of epoch 0" not in ended.output


def _line(ended: Ended, line: str) -> str:
    [found] = [each for each in ended.output.splitlines() if each.startswith(line)]
    return found
