"""A script that is run whole, and killed and run again, in directories that can be compared."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.processes import run

# Receives the callbacks and the directory of a fit.
Main = Callable[[list[Callback], Path], Any]


@dataclass(frozen=True, kw_only=True)
class Runs:
    """The directories of the whole and the killed run, and the output of each process."""

    whole: Path
    killed: Path
    outputs: Sequence[str]


def run_whole_and_killed(main: Main, tmp_path: Path, kills: Sequence[Callback | int], **options: Any) -> Runs:
    """Run `main` once without our callback. Then run it with the callback, once for each of `kills` and once more.

    Args:
        main: The script.
        tmp_path: Where the directories are created.
        kills: The fault of each process: a callback, or the batch at which it is killed.
        options: Options of `FaultTolerance`; an autosave at each step by default.
    """
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    ended = run(lambda: main([], whole))
    assert ended.exit_code == 0, ended.output
    options = {"every_n_train_steps": 1, "dirpath": tmp_path / "autosaves", **options}
    outputs = []
    for number, kill in enumerate(kills):
        fault = KillAt(kill) if isinstance(kill, int) else kill
        ended = run(lambda fault=fault: main([FaultTolerance(**options), fault], killed), seed=1 + 10 * number)
        assert ended.exit_code in (-signal.SIGKILL, 143), ended.output
        outputs.append(ended.output)
    ended = run(lambda: main([FaultTolerance(**options)], killed), seed=99)
    assert ended.exit_code == 0, ended.output
    outputs.append(ended.output)
    assert all("Resumed exactly" in output for output in outputs[1:]), outputs
    return Runs(whole=whole, killed=killed, outputs=outputs)


def files_below(directory: Path) -> list[str]:
    """Return the files and links below a directory; for event files, only the part of the name that does not change."""
    paths = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(re.sub(r"(events\.out\.tfevents)\..*", r"\1", str(path.relative_to(directory))) for path in paths)


class StopInValidation(Callback):
    """Sends a signal in a validation batch, counted over all validation runs of this process."""

    def __init__(self, batch: int, signum: int = signal.SIGTERM) -> None:
        self.batch = batch
        self.signum = signum
        self.seen = -1

    def on_validation_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.seen += not trainer.sanity_checking
        if self.seen == self.batch and not trainer.sanity_checking:
            os.kill(os.getpid(), self.signum)


class StopAtTheStart(Callback):
    """Sends SIGTERM in the last hook before the first batch of a validation run."""

    def on_validation_epoch_start(self, trainer: Trainer, *_: Any) -> None:
        if not trainer.sanity_checking:
            os.kill(os.getpid(), signal.SIGTERM)
