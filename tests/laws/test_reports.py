"""What a run says of itself: the report of a resume, and the history of all its processes."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from syrupy.assertion import SnapshotAssertion
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.cli import main
from tests.laws.cuts import Cut, Struck, ends_in
from tests.laws.data_sets import NoisyDataset
from tests.laws.rows import Group, Row, rows_of
from tests.laws.runs import Training

ROWS = (Row(name="shuffled", train=rows_of(24)),)


def report(root: Path, *arguments: str) -> str:
    """Return what the command says of the only run below a directory."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert main(["report", str(root / "fault_tolerance"), *arguments]) == 0
    return output.getvalue()


def chapters(root: Path) -> list[dict[str, Any]]:
    """Return the chapters of the only run below a directory."""
    return json.loads(report(root, "--json", "--all"))["chapters"]


def fits(root: Path) -> list[dict[str, Any]]:
    """Return the fits of all processes of its last chapter."""
    return [fit for process in chapters(root)[-1]["processes"] for fit in process["fits"]]


def as_a_script(main: Callable[[Trainer, LightningModule, Group], object] | None = None) -> Callable[..., None]:
    """Return a script that fits, or does something else, and ends as Python does."""

    def script(trainer: Trainer, module: LightningModule, group: Group) -> None:
        try:
            main(trainer, module, group) if main else trainer.fit(module, **group.data())
        except BaseException as error:
            sys.last_value = error  # as the interpreter does
            raise
        finally:
            atexit._run_exitfuncs()

    return script


def test_history_of_a_run_with_each_kind_of_end(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """The report has the way of each process and why it ended; the account of its time adds up."""
    training = Training(group=Group(rows=ROWS), root=tmp_path)
    for cut in [Cut(at=(0, 2)), Cut(at=(0, 4), by=signal.SIGTERM), Cut(at=(1, 1), by=0)]:
        assert training.start(cut).codes == [cut.exit_code]
    training.finished()
    table = training.told(report(tmp_path)).split("\n\n")[1]
    assert re.sub(r"TIME +(SOME s|\S+m \S+s|\S+ s)", "TIME SOME s", re.sub(r" +", " ", table)) == snapshot
    [chapter] = chapters(tmp_path)
    account = chapter["account"]
    assert account["total"] == pytest.approx(chapter["segments"][-1]["ended"] - chapter["segments"][0]["began"])
    assert not [
        kind for kind in ("training", "evaluation", "saving", "restoring", "restarting") if not account[kind] > 0
    ]
    found = {path.name: path.stat().st_size for path in tmp_path.rglob("autosave-*.ckpt")}
    told = {each["name"]: each["num_bytes"] for fit in fits(tmp_path) for each in fit["autosaves"]}
    assert found
    assert found.items() <= told.items()


def fit_and_fail(trainer: Trainer, module: LightningModule, group: Group) -> None:
    """Fit, and fail afterwards."""
    trainer.fit(module, **group.data())
    raise Struck


# What each start does, besides a fit that finishes, and its options; then the reasons of all ends in each chapter.
Does = Cut | Callback | Callable[..., None] | None
STORIES: dict[str, tuple[Sequence[tuple[Does, dict[str, Any]]], list[list[str | None]]]] = {
    "run again": ([(None, {}), (None, {})], [["finished"], ["finished"]]),
    "started over": ([(Cut(at=(0, 3)), {}), (None, {"auto_resume": False})], [[None], ["finished"]]),
    "never at a batch": (
        [(ends_in("on_fit_start", 0), {}), (ends_in("on_fit_start"), {}), (None, {})],
        [["Struck", None, "finished"]],
    ),
    "an error after the fit": ([(fit_and_fail, {}), (None, {})], [["finished", "finished"]]),
    "a deadline": ([(None, {"deadline": timedelta(seconds=0.01)})], [["stopped by the deadline"]]),
}


@pytest.mark.parametrize("name", STORIES)
def test_chapters_of_a_history(name: str, tmp_path: Path) -> None:
    """A start that does not continue begins a chapter; each end has its reason; a finished script ends the chapter."""
    starts, expected = STORIES[name]
    for does, options in starts:
        training = Training(group=Group(rows=ROWS), root=tmp_path, before=atexit._clear)
        training.starts = [training.start] * len(list(tmp_path.glob("start-*.jsonl")))
        training.more = (lambda does=does: [does]) if isinstance(does, Callback) else list
        training.stage = as_a_script(None if isinstance(does, (Cut, Callback)) else does)
        training.start(does if isinstance(does, Cut) else None, **options)
    found = [[fit["reason"] for each in one["processes"] for fit in each["fits"]] for one in chapters(tmp_path)]
    assert found == expected


@pytest.mark.parametrize("stage", ["fast_dev_run", "barebones", "validate"])
def test_what_is_no_training_leaves_the_run_alone(stage: str, tmp_path: Path) -> None:
    """Between a kill and its resume, a trial run or a validation changes no autosave; nothing is told of a trial."""
    training = Training(group=Group(rows=ROWS), root=tmp_path)
    training.start(Cut(at=(0, 3)))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("autosave-*")}
    num_fits = len(fits(tmp_path))
    if stage == "validate":
        training.stage = stage
    else:
        trial: dict[str, Any] = {stage: True, **({"log_every_n_steps": None} if stage == "barebones" else {})}
        training.group = Group(rows=(*ROWS, Row(name="trial", trainer=trial)))
    training.start()
    assert before
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert stage == "validate" or len(fits(tmp_path)) == num_fits


def test_report_of_a_resume(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """It names the file, the place, what was restored, and that another number of threads may change the last bits."""

    def script(trainer: Trainer, module: LightningModule, group: Group) -> None:
        torch.set_num_threads(2)
        trainer.fit(module, **group.data())
        [found] = [callback for callback in trainer.callbacks if isinstance(callback, FaultTolerance)]
        assert found.resume_report is not None
        assert (found.resume_report.epoch, found.resume_report.batch, found.resume_report.global_step) == (1, 2, 8)
        print("REPORT", found.resume_report)

    training = Training(group=Group(rows=ROWS), root=tmp_path)
    training.start(Cut(at=(1, 2)))
    training.stage = script
    assert training.told(training.finished().output.rpartition("REPORT ")[2]) == snapshot


# Time.

SECONDS = 0.4
"""What the slow rank loses in each batch. On a busy machine, the rest of a batch may take as long."""


class SlowData(NoisyDataset):
    """Takes long to load a batch of four."""

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SECONDS / 4 if os.environ.get("RANK") == "1" else 0.0)
        return super().__getitem__(index)


def test_slow_rank_and_its_section_are_named(tmp_path: Path) -> None:
    """A rank that is slow in its data is named with that, and no other; rank 0 tells it."""
    row = Row(name="slow", train=lambda: DataLoader(SlowData(32), batch_size=4))
    short = Row(name="short", trainer={"max_epochs": 1, "val_check_interval": 1, "limit_train_batches": 4})
    few = Row(
        name="few",
        validation=lambda: DataLoader(NoisyDataset(8), batch_size=4),
        warns=("Using `Distributed", "It is recommended to use `self.log"),
    )
    training = Training(group=Group(rows=(row, short, few)), root=tmp_path, num_ranks=2)
    training.finished()
    [fit] = fits(tmp_path)
    assert fit["num_ranks"] == 2
    names = [each["name"] for each in fit["autosaves"]]
    assert len(names) == len(set(names)) > 3
    assert {(each["rank"], each["section"]) for save in fit["autosaves"] for each in save["slow"]} == {(1, "data")}
    assert "Rank 1 was " in report(tmp_path)
