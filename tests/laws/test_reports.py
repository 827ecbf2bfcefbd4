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
from unittest.mock import Mock, patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ThroughputMonitor
from syrupy.assertion import SnapshotAssertion
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.cli import main
from tests.laws.cuts import Cut, Struck
from tests.laws.data_sets import NoisyDataset
from tests.laws.rows import Group, Net, Row, rows_of
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


class EndsAtStart(Callback):
    """Ends a fit before its first batch."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.end = end

    def on_fit_start(self, *_: Any) -> None:
        self.end()


def fail() -> None:
    """Raise an error."""
    raise Struck("no data")


def die() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def fit_twice(trainer: Trainer, module: LightningModule, group: Group) -> None:
    """Fit an epoch, and then another one with the same callbacks."""
    trainer.fit(module, **group.data())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, **group.data())


def fit_and_fail(trainer: Trainer, module: LightningModule, group: Group) -> None:
    """Fit, and fail afterwards."""
    trainer.fit(module, **group.data())
    fail()


# What each start does, besides a fit that finishes, and its options; then the reasons of all ends in each chapter.
Does = Cut | Callback | Callable[..., None] | None
STORIES: dict[str, tuple[Sequence[tuple[Does, dict[str, Any]]], list[list[str | None]]]] = {
    "run again": ([(None, {}), (None, {})], [["finished"], ["finished"]]),
    "started over": ([(Cut(at=(0, 3)), {}), (None, {"auto_resume": False})], [[None], ["finished"]]),
    "never at a batch": (
        [(EndsAtStart(fail), {}), (EndsAtStart(die), {}), (None, {})],
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


def test_fits_of_a_script_are_told_apart(tmp_path: Path) -> None:
    """A script that is killed in its second fit restores the first one, and does not train it again."""
    group = Group(rows=(*ROWS, Row(name="one epoch", trainer={"max_epochs": 1})))
    training = Training(group=group, root=tmp_path, stage=fit_twice)
    assert training.start(Cut(at=(1, 2))).codes == [-signal.SIGKILL]
    training.finished()
    [chapter] = chapters(tmp_path)
    assert [[fit["number"] for fit in each["fits"]] for each in chapter["processes"]] == [[1, 2], [1, 2]]
    assert [fit["place"]["epoch"] for fit in fits(tmp_path)][1::2] == [1, 1]
    assert [(each["epoch"], each["batch"]) for each in training.starts[1].events[0] if each["kind"] == "batch"] == [
        (1, batch) for batch in range(2, 6)
    ]


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


def wait(here: bool) -> None:
    """Take long on rank 1, or on all ranks."""
    time.sleep(SECONDS if here else 0.0)


def is_second() -> bool:
    """Return whether this is a process of rank 1."""
    return os.environ.get("RANK") == "1"


class SlowData(NoisyDataset):
    """Takes long on rank 1 to load a batch of four."""

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(SECONDS / 4 if is_second() else 0.0)
        return super().__getitem__(index)


class SlowStep(Net):
    """Takes long on rank 1 to train a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        wait(is_second())
        return super().training_step(batch, batch_idx)


class SlowEvaluation(Net):
    """Takes long on rank 1 to validate a batch."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        wait(is_second())
        super().validation_step(batch, batch_idx)


class SlowEverywhere(Net):
    """Takes as long on each rank, although rank 0 writes all files."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        wait(True)
        return super().training_step(batch, batch_idx)


class SlowState(Callback):
    """Takes long on rank 1 to return its state."""

    def state_dict(self) -> dict[str, Any]:
        wait(is_second())
        return {"state": 1}


SLOW = [
    pytest.param("data", Row(name="slow", train=lambda: DataLoader(SlowData(32), batch_size=4)), id="data"),
    pytest.param("step", Row(name="slow", module=SlowStep), id="step", marks=pytest.mark.slow),
    pytest.param("evaluation", Row(name="slow", module=SlowEvaluation), id="evaluation", marks=pytest.mark.slow),
    pytest.param("save", Row(name="slow", callbacks=SlowState), id="save", marks=pytest.mark.slow),
    pytest.param("", Row(name="slow", module=SlowEverywhere), id="none", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("section", "row"), SLOW)
def test_slow_rank_and_its_section_are_named(section: str, row: Row, tmp_path: Path) -> None:
    """A rank that is slow in its data, step, evaluation, or saves is named with that, and no other; rank 0 tells it."""
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
    assert {(each["rank"], each["section"]) for save in fit["autosaves"] for each in save["slow"]} == (
        {(1, section)} if section else set()
    )
    assert ("Rank 1 was " in report(tmp_path)) == bool(section)


def test_waiting_for_data_is_in_the_account(tmp_path: Path) -> None:
    """Batches that take long to load are told apart from training, up to the state that counts."""

    class Slow(NoisyDataset):
        def __getitem__(self, index: int) -> Tensor:
            time.sleep(0.05)
            return super().__getitem__(index)

    data = Row(name="slow", train=lambda: DataLoader(Slow(24), batch_size=4), trainer={"max_epochs": 1})
    training = Training(group=Group(rows=(data,)), root=tmp_path)
    training.start(Cut(at=(0, 4), every=3))
    assert chapters(tmp_path)[0]["account"]["data"] >= 3 * 4 * 0.05
    training.finished()
    assert chapters(tmp_path)[0]["account"]["data"] >= 6 * 4 * 0.05


def test_clock_that_a_mock_replaces_is_not_asked(tmp_path: Path) -> None:
    """A test that replaces ``time.perf_counter`` expects its own calls only. One call too many ended each epoch."""

    class Measured(Net):
        flops_per_batch = 64

    logger = Mock(save_dir=tmp_path)

    def script(trainer: Trainer, module: LightningModule, group: Group) -> None:
        with patch("time.perf_counter", side_effect=[0.0, *(0.5 + step for step in range(1, 7))]):
            trainer.fit(module, **group.data())
        times = [call.kwargs["metrics"].get("train/time") for call in logger.log_metrics.mock_calls]
        assert [time for time in times if time is not None] == [1.5, 2.5, 3.5, 4.5, 5.5, 6.5]

    arguments = {"max_epochs": 1, "limit_val_batches": 0, "logger": lambda: logger}
    row = Row(
        name="measured", module=Measured, trainer=arguments, callbacks=lambda: ThroughputMonitor(len, window_size=4)
    )
    training = Training(group=Group(rows=(row,)), root=tmp_path, stage=script)
    training.finished()
