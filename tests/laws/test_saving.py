"""When and where autosaves are written, which are kept, what an end of any kind costs, and errors of a save."""

from __future__ import annotations

import atexit
import errno
import functools
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from syrupy.assertion import SnapshotAssertion
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from lightning_faulttolerant import FlightRecorder
from tests.damage import change_a_weight
from tests.emulators import EMULATORS, WARNING
from tests.laws.cuts import At, Cut, ends_in, on_sync
from tests.laws.data_sets import NoisyDataset
from tests.laws.events import Broken, slice_of
from tests.laws.features.any_iterables import ReadsAhead
from tests.laws.features.data_modules import Counts
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import Start, Training, assert_continues
from tests.laws.wholes import whole_of

SHUFFLED = Row(name="shuffled", train=rows_of(24))
WORKERS = Row(name="two workers", train=rows_of(32, num_workers=2))
PLAIN = Group(rows=(SHUFFLED,))
ONE_EPOCH = Row(name="one epoch", trainer={"max_epochs": 1})
BUDGET: dict[str, Any] = {"every_n_train_steps": None, "overhead_budget": 1.0}
HOUR: dict[str, Any] = {"every_n_train_steps": None, "train_time_interval": timedelta(hours=1)}


def autosaves(root: Path) -> list[Path]:
    """Return the autosaves of a run, the newest last."""
    return sorted(root.rglob("autosave-*.ckpt"), key=lambda path: path.name)


def first_batch(start: Start) -> tuple[int, int] | None:
    """Return epoch and batch of the first training batch of a start."""
    return next(((each["epoch"], each["batch"]) for each in start.events[0] if each["kind"] == "batch"), None)


class Looks(Callback):
    """Prints at each batch the number of the newest autosave, and how many there are."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        found = autosaves(Path.cwd())
        print(f"newest {found[-1].name.split('-')[1] if found else 0} of {len(found)}")

    on_test_batch_start = on_train_batch_start


def seen(start: Start) -> tuple[list[int], int]:
    """Return the number of the newest autosave at each batch, and the largest number of autosaves."""
    found = [(int(newest), int(count)) for newest, count in re.findall(r"newest (\d+) of (\d+)", start.output)]
    return [newest for newest, _ in found], max((count for _, count in found), default=0)


# When autosaves are written, and which are kept.


@pytest.mark.parametrize(
    ("options", "newest", "most"),
    [
        ({"every_n_train_steps": 2}, [1, 1, 2, 2, 3, 3], 2),
        ({"every_n_train_steps": 1, "keep_last": 3}, [1, 2, 3, 4, 5, 6], 3),
        (HOUR, [1, 1, 1, 1, 1, 1], 1),
        (BUDGET, [1, 2, 3, 4, 5, 6], 2),
        ({**BUDGET, "overhead_budget": 1e-6}, [1, 1, 1, 1, 1, 1], 1),
    ],
    ids=str,
)
def test_when_autosaves_are_written(options: dict[str, Any], newest: list[int], most: int, tmp_path: Path) -> None:
    """The first boundary always saves; after that the steps, the time, or the budget decide."""
    training = Training(group=Group(rows=(SHUFFLED, ONE_EPOCH)), root=tmp_path, more=lambda: [Looks()])
    assert seen(training.start(**options)) == (newest, most)


def test_evaluation_keeps_the_budget(tmp_path: Path) -> None:
    """Its first boundary saves; after that the budget decides."""
    training = Training(group=PLAIN, root=tmp_path, stage="test", more=lambda: [Looks()])
    assert seen(training.start(**{**BUDGET, "overhead_budget": 1e-6})) == ([1, 1], 1)


def test_budget_skips_saves_while_a_thread_writes(tmp_path: Path) -> None:
    """On a disk that is too slow for the budget, no save waits for the one before it."""
    begun, done = threading.Event(), threading.Event()
    training = Training(group=Group(rows=(SHUFFLED, ONE_EPOCH)), root=tmp_path)
    training.before = on_sync(lambda in_background: in_background and begun.is_set() and done.wait())
    training.more = lambda: [Looks(), At({(0, 0): begun.set, (0, 5): done.set})]
    assert seen(training.start(async_save=True, **BUDGET)) == ([1] * 6, 1)


def test_what_a_kill_repeats_is_told_when_it_is_known(tmp_path: Path) -> None:
    """A number of steps at once; a time after the first save of the process, which shows what one costs."""
    training = Training(group=PLAIN, root=tmp_path)
    rarely = {**BUDGET, "overhead_budget": 1e-6}
    starts = [training.start(Cut(at=(0, 2)), **each) for each in (rarely, rarely, {"every_n_train_steps": 2})]
    assert [re.findall(r"repeats at most (\w+)", start.output) for start in starts] == [["about"], [], ["2"]]


def kept(root: Path) -> list[tuple[int, int]]:
    """Return epoch and batch of each autosave that is kept for good."""
    found = (re.search(r"epoch=(\d+)-batch=(\d+)-kept", path.name) for path in autosaves(root))
    return [(int(match[1]), int(match[2])) for match in found if match is not None]


@pytest.mark.parametrize(
    ("options", "is_full", "expected"),
    [
        ({"every_n_train_steps": 2}, False, [(0, 3), (1, 0), (1, 3)]),
        ({"every_n_train_steps": 1, "async_save": True}, False, [(0, 3), (1, 0), (1, 3)]),
        ({"every_n_train_steps": 3}, True, [(0, 4), (1, 0), (1, 3)]),
    ],
    ids=str,
)
def test_multiples_that_are_kept(
    options: dict[str, Any], is_full: bool, expected: list[tuple[int, int]], tmp_path: Path
) -> None:
    """``keep_every`` keeps each third step, or the step after it if the disk was full, whatever else is saved."""
    full = tmp_path / "full"
    training = Training(group=PLAIN, root=tmp_path, before=on_sync(functools.partial(no_room, full)))
    filling = At({(0, 2): full.touch, (0, 3): full.unlink} if is_full else {})
    training.more = lambda: [filling, FlightRecorder(rule=None, keep_every=3)]
    start = training.ended(**options)
    assert ("could not be saved" in start.output) == is_full
    assert kept(tmp_path) == expected


def no_room(mark: Path, in_background: bool) -> None:
    """Fail as a full disk does, while a file exists."""
    if mark.exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_multiples_are_counted_from_the_beginning_of_the_run(tmp_path: Path) -> None:
    """A run that is killed resumes from its newest autosave, kept or not, and keeps what it keeps uninterrupted."""
    training = Training(group=PLAIN, root=tmp_path, more=lambda: [FlightRecorder(rule=None, keep_every=4)])
    assert_continues(whole_of(PLAIN), training, [Cut(at=(0, 4)), Cut(at=(0, 5)), Cut(at=(1, 3))])
    assert kept(tmp_path) == [(0, 4), (1, 2)]


def ends_as_a_script(trainer: Trainer, module: LightningModule, group: Group) -> None:
    """Fit, and end as Python does."""
    trainer.fit(module, **group.data())
    atexit._run_exitfuncs()


def test_what_is_left_of_a_run_that_has_finished(tmp_path: Path) -> None:
    """Only what is kept for good is left, and the next start is a new run."""
    training = Training(group=PLAIN, root=tmp_path, stage=ends_as_a_script, before=atexit._clear)
    training.more = lambda: [FlightRecorder(rule=None, keep_every=4)]
    for _ in range(2):
        assert first_batch(training.finished()) == (0, 0)
        assert len(autosaves(tmp_path)) == len(kept(tmp_path)) > 0
    assert training.said("Resumed") == ""


def test_autosave_is_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    """It loads safely in plain torch, and Lightning alone continues from it."""
    killed = Training(group=PLAIN, root=tmp_path / "killed")
    killed.start(Cut(at=(1, 3)))
    newest = autosaves(tmp_path)[-1]
    assert torch.load(newest, weights_only=True)["global_step"] == 9
    group = Group(rows=(SHUFFLED, Row(name="quiet", warns=("You're resuming from a checkpoint that ended before",))))
    alone = Training(group=group, root=tmp_path / "alone", with_callback=False, ckpt_path=newest)
    assert alone.finished().events[0][-1]["step"] >= 12


# Where and how they are written.

CUTS = [Cut(at=(0, 3)), Cut(at=(0, 5), hook="validation"), Cut(at=(1, 1), by=signal.SIGTERM), Cut(at=(1, 4), every=3)]
CHANGES = {"incremental": True}
IN_BACKGROUND = {"async_save": True}


def assert_stored(root: Path, **options: Any) -> None:
    """Check the law with these options, and that the last start has proved it."""
    repeats = 12 if "async_save" in options else 1
    group = Group(rows=(*PLAIN.rows, Row(name="options", options=options, repeats=repeats)))
    training = Training(group=group, root=root)
    assert_continues(whole_of(PLAIN), training, CUTS)
    assert "identical to those of process 4" in training.starts[-1].output


@pytest.mark.parametrize("options", [CHANGES, {**CHANGES, **IN_BACKGROUND, "keep_last": 1}], ids=str)
def test_on_a_disk(options: dict[str, Any], tmp_path: Path) -> None:
    """However a save is written, the run continues from it exactly."""
    assert_stored(tmp_path, **options)


@pytest.mark.parametrize("options", [{}, pytest.param(IN_BACKGROUND, marks=pytest.mark.slow)], ids=str)
def test_in_a_store(s3: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A run below a URL continues exactly, and so does one that is killed during an upload."""
    assert_stored(tmp_path, dirpath=f"{s3}/run", **options)


@pytest.mark.slow
@pytest.mark.filterwarnings(WARNING)
@pytest.mark.parametrize("name", sorted(EMULATORS))
def test_in_each_store(emulated: Callable[[str], str], name: str, tmp_path: Path) -> None:
    """The same holds in Azure's store, in Google's, and in another S3."""
    assert_stored(tmp_path, dirpath=f"{emulated(name)}/run")


@pytest.mark.parametrize("num_damaged", [1, 2])
def test_damaged_autosaves(num_damaged: int, tmp_path: Path) -> None:
    """A damaged autosave costs the work of one interval; if all are damaged, that is an error, not a fresh start."""
    [whole] = whole_of(PLAIN)
    training = Training(group=Group(rows=(*PLAIN.rows, Row(name="changes", options=CHANGES))), root=tmp_path)
    training.ended(Cut(at=(0, 4)))
    for path in autosaves(tmp_path)[-num_damaged:]:
        change_a_weight(path)
    if num_damaged == 2:
        with pytest.raises(Broken, match="NoValidCheckpointError"):
            training.finished()
        return
    start = training.finished()
    assert start.events[0] == whole[-len(start.events[0]) :]
    assert ".damaged" in start.output


# What an end costs.


class RaisesAfterItsStep(Net):
    """Raises once, in the first start that has a file, after an optimizer step that Lightning has not counted yet."""

    def optimizer_step(self, *arguments: Any, **named: Any) -> None:
        super().optimizer_step(*arguments, **named)
        if self.trainer.global_step == 4 and Path("armed").exists():
            Path("armed").unlink()
            raise ZeroDivisionError


class FailsInWorker(NoisyDataset):
    """Fails once, in the first start that has a file, when worker 1 loads batch 5."""

    def __init__(self, how: str) -> None:
        super().__init__(32)
        self.how, self.num_loaded = how, 0

    def __getitem__(self, index: int) -> Tensor:
        self.num_loaded += 1
        worker = get_worker_info()
        if worker is not None and worker.id == 1 and self.num_loaded == 9 and Path("armed").exists():
            Path("armed").unlink()
            if self.how == "raises":
                raise ZeroDivisionError
            if self.how == "dies":
                kill()
            time.sleep(1_000)
        return super().__getitem__(index)


def kill() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


def failing(how: str) -> Row:
    """Return a feature whose data fail."""
    return Row(name=how, train=lambda: DataLoader(FailsInWorker(how), batch_size=4, shuffle=True, num_workers=2))


GROUP_TERM = At({(0, 3): lambda: os.killpg(0, signal.SIGTERM)})
STUCK = At({(0, 4): lambda: threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)).start()})
"""A signal comes when the process has probably waited for some time for a batch that never comes."""
TWICE = At({(0, 3): lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]})
THIRD = {**BUDGET, "every_n_train_steps": 3}
SECOND = {**BUDGET, "every_n_train_steps": 2}
RARE = {**BUDGET, "every_n_train_steps": 100}
LIKE = {"module": SHUFFLED, **dict.fromkeys(("raises", "dies", "sleeps"), WORKERS)}
"""Rows that train alike as long as they are not armed."""
COUNTS = Row(name="data", data=Counts)
ANYWHERE = (-1, -1)
RAISES = Row(name="module", module=RaisesAfterItsStep)

# A feature, how the first start ends, and its exit code; then options, and where the next start begins.
ENDS: dict[str, tuple[Row, Cut | Callback | None, int, dict[str, Any], tuple[int, int] | None]] = {
    "SIGTERM": (WORKERS, Cut(at=(0, 3), by=signal.SIGTERM), 143, HOUR, (0, 4)),
    "SIGINT": (SHUFFLED, Cut(at=(0, 3), by=signal.SIGINT, hook="backward"), 130, HOUR, (0, 4)),
    "SIGTERM to the workers, too": (WORKERS, GROUP_TERM, 143, HOUR, (0, 4)),
    "SIGTERM in validation": (WORKERS, Cut(at=(0, 7), by=signal.SIGTERM, hook="validation"), 143, HOUR, (1, 0)),
    "SIGTERM after all": (SHUFFLED, Cut(at=(1, 5), by=signal.SIGTERM, hook="epoch end"), 143, HOUR, None),
    "second SIGINT, without the rest of the batch": (SHUFFLED, TWICE, 130, THIRD, (0, 3)),
    "before a batch": (SHUFFLED, Cut(at=(0, 4), by=0), 1, RARE, (0, 4)),
    "before a backward pass": (WORKERS, Cut(at=(0, 4), by=0, hook="backward"), 1, RARE, (0, 4)),
    "after a step": (SHUFFLED, Cut(at=(0, 4), by=0, hook="step"), 1, THIRD, (0, 3)),
    "between a step and its count": (RAISES, None, 1, THIRD, (0, 3)),
    "at the end of an epoch": (SHUFFLED, Cut(at=(0, 5), by=0, hook="epoch end"), 1, THIRD, (1, 0)),
    "a thread reads ahead": (Row(name="ahead", train=ReadsAhead), Cut(at=(1, 2), by=signal.SIGTERM), 143, HOUR, (1, 3)),
    "the state of the data module is of now": (COUNTS, Cut(at=(0, 3), by=0, hook="backward"), 1, SECOND, (0, 2)),
    "a worker raises": (failing("raises"), None, 1, RARE, (0, 5)),
    "a worker dies": (failing("dies"), None, 1, RARE, ANYWHERE),  # noticed at once or when its batch is due
    "a worker sleeps": (failing("sleeps"), STUCK, 143, HOUR, (0, 5)),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_an_end_costs(name: str, tmp_path: Path) -> None:
    """A stop saves the finished batches, and so does an error before the step; after it, the last autosave counts."""
    row, end, code, options, place = ENDS[name]
    training = Training(group=Group(rows=(row,)), root=tmp_path)
    [whole] = whole_of(Group(rows=(LIKE.get(row.name, row),)))
    (tmp_path / "armed").touch()
    training.more = (lambda: [end]) if isinstance(end, At) else list
    start = training.start(end if isinstance(end, Cut) else None, **options)
    assert start.codes == [code], start.output
    training.more = list
    last = training.finished()
    assert place in (ANYWHERE, first_batch(last))
    [begin, end_of_first] = slice_of(whole, start.events[0], whole_name="the whole run", part_name="the first start")
    [again, end_of_last] = slice_of(whole, last.events[0], whole_name="the whole run", part_name="the last start")
    assert begin == 0 < again <= end_of_first
    assert end_of_last == len(whole)


def test_killed_while_it_resumes(tmp_path: Path) -> None:
    """However often that happens, the autosaves stay as they are, and the run continues from the newest."""
    training = Training(group=PLAIN, root=tmp_path)
    training.start(Cut(at=(0, 3)))
    before = autosaves(tmp_path)
    for hook in ("on_load_checkpoint", "on_train_start", "on_train_batch_start"):
        training.more = lambda hook=hook: [ends_in(hook)]
        training.ended(code=-signal.SIGKILL)
        assert autosaves(tmp_path) == before
    training.more = list
    assert_rest(training, (0, 3))


def assert_rest(training: Training, place: tuple[int, int]) -> None:
    """Check that the last start does the rest of the whole run, from a batch on."""
    last = training.finished()
    assert first_batch(last) == place
    assert last.events[0] == whole_of(training.group)[0][-len(last.events[0]) :]


# Killed, or with an error, while a thread writes.


class Writes:
    """Strikes in some of the background's calls of ``fsync``, counted over all starts; each file has two.

    The first file is waited for.
    """

    def __init__(self, *strikes: int, act: Callable[[], object]) -> None:
        self.strikes, self.act = strikes, act

    def __call__(self, in_background: bool) -> None:
        count = Path("syncs")
        if in_background:
            with count.open("a") as file:
                file.write("x")
            if count.stat().st_size in self.strikes:
                self.act()


def test_killed_while_a_thread_writes(tmp_path: Path) -> None:
    """A kill before a file is in place costs the training since the previous autosave."""
    group = Group(rows=(SHUFFLED, Row(name="options", options=IN_BACKGROUND, repeats=12)))
    training = Training(group=group, root=tmp_path, before=on_sync(Writes(7, 13, act=kill)))
    never = Cut(at=(9, 9))
    assert_continues(whole_of(PLAIN), training, [never, never])
    assert all(" parts read back" in start.output for start in training.starts[1:])


def test_stop_makes_up_for_a_write_that_failed(tmp_path: Path) -> None:
    """A stop reports the write that failed in the background, and saves its own state."""
    stopped = threading.Event()

    def act() -> None:
        stopped.wait()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        stopped.set()

    training = Training(group=PLAIN, root=tmp_path, before=on_sync(Writes(3, act=act)))
    training.more = lambda: [At({(0, 3): stop})]
    training.ended(code=143, async_save=True, **BUDGET)
    assert training.said("could not be written in the background")
    training.before, training.more = None, list
    assert_rest(training, (0, 4))


# Errors of a save.


class Unsafe(Callback):
    """Has a state that a safe load refuses, from some step on."""

    def __init__(self, step: int) -> None:
        self.step, self.num_steps = step, 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"where": Path("/data") if self.num_steps >= self.step else ""}


def raise_it(in_background: bool) -> None:
    """Raise what is no fault of a disk."""
    raise ZeroDivisionError("in the thread" if in_background else "at once")


CHECKPOINT = Row(
    name="checkpoint",
    trainer={"enable_checkpointing": True},
    callbacks=lambda: [At({(0, 2): Path("checkpoints").touch}), ModelCheckpoint("checkpoints", every_n_train_steps=3)],
)
# A feature, options, what happens at each fsync, and how many batches begin.
ERRORS: dict[str, tuple[Row, dict[str, Any], Callable[[bool], object] | None, int]] = {
    "unsafe": (Row(name="unsafe", callbacks=lambda: Unsafe(0)), {"trust_autosaves": False}, None, 0),
    "unsafe later": (Row(name="unsafe", callbacks=lambda: Unsafe(3)), {"trust_autosaves": False}, None, 3),
    "nowhere": (SHUFFLED, {"dirpath": "/proc/nothing"}, None, 0),
    "full at the start": (SHUFFLED, {}, functools.partial(no_room, Path("/")), 0),
    "a bug": (SHUFFLED, {}, raise_it, 0),
    "a ModelCheckpoint": (CHECKPOINT, {}, None, 3),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_that_end_a_run(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A state that could not be restored, a place that never worked, and an error of the user's own are raised."""
    row, options, strike, num_batches = ERRORS[name]
    training = Training(group=Group(rows=(row,)), root=tmp_path, before=on_sync(strike) if strike else None)
    start = training.ended(code=1, **options)
    assert sum(each["kind"] == "batch" for each in start.events[0]) == num_batches
    error = [line for line in start.output.splitlines() if re.match(r"[\w.]*Error: ", line)][-1]
    assert training.told(error) == snapshot


# A full disk, or a store that is not reached.


VALIDATION = Cut(at=(0, 5), hook="validation", by=signal.SIGTERM)
# From which batch to which it is full, what ends the start, with which exit code, and options.
OUTAGES: dict[str, tuple[tuple[int, int], tuple[int, int], Cut | None, int, dict[str, Any]]] = {
    "for a while": ((0, 2), (1, 1), None, 0, {}),
    "when the fit ends": ((1, 3), (9, 9), None, 0, {}),
    "at a stop": ((0, 3), (9, 9), Cut(at=(0, 5), by=signal.SIGTERM), 74, {}),
    "at a stop in validation": ((0, 3), (9, 9), VALIDATION, 74, {}),
    "at an error": ((0, 3), (9, 9), Cut(at=(0, 5), by=0), 1, BUDGET),
    "in the background": ((0, 2), (1, 1), None, 0, {"async_save": True, "every_n_train_steps": 3}),
}


@pytest.mark.parametrize("name", OUTAGES)
def test_what_is_said_while_a_disk_is_full(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """The run continues; the start and end of the outage are told once each, and so is what a stop could not save."""
    first, last, end, code, options = OUTAGES[name]
    full = tmp_path / "start-full"
    training = Training(group=PLAIN, root=tmp_path)
    training.before = on_sync(functools.partial(no_room, full))
    filling = At({first: full.touch, last: functools.partial(full.unlink, missing_ok=True)})
    training.more = lambda: [filling]
    start = training.start(end, **options)
    assert start.codes == [code], start.output
    assert re.sub(r"\d+ saves?", "SOME saves", training.said("saved", "Autosaves")) == snapshot


def test_disk_that_is_full_when_it_is_killed(tmp_path: Path) -> None:
    """Killed while the disk is full, or after that, a run continues exactly from what could be saved."""
    group, full = Group(rows=(*PLAIN.rows, Row(name="options", options=IN_BACKGROUND, repeats=12))), tmp_path / "full"
    training = Training(group=group, root=tmp_path, before=on_sync(functools.partial(no_room, full)))
    training.more = lambda: [At({(0, 2): full.touch, (1, 1): functools.partial(full.unlink, missing_ok=True)})]
    assert_continues(whole_of(PLAIN), training, [Cut(at=(0, 4)), Cut(at=(1, 3))])
