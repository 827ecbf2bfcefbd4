"""When autosaves are written and which are kept, what an end of any kind costs, and errors of a save."""

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
from unittest.mock import ANY

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from syrupy.assertion import SnapshotAssertion
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info

from lightning_faulttolerant import FlightRecorder
from tests.laws.cuts import At, Cut, on_sync
from tests.laws.data_sets import NoisyDataset
from tests.laws.events import slice_of
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import Start, Training, assert_continues, whole_run

SHUFFLED = Row(name="shuffled", train=rows_of(24))
WORKERS = Row(name="two workers", train=rows_of(32, num_workers=2))
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


@pytest.mark.parametrize("budget", [False, True])
def test_slow_disk_in_the_background(budget: bool, tmp_path: Path) -> None:
    """The first save is waited for; each later one, too, where each is asked for; a budget skips them meanwhile."""
    begun, done = threading.Event(), threading.Event()

    class Ends(Looks):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            super().on_train_batch_start(trainer)
            begun.set()
            if trainer.fit_loop.batch_idx == 5:
                done.set()

    def strike(in_background: bool) -> None:
        if in_background and begun.is_set():
            done.wait() if budget else time.sleep(0.02)

    group = Group(rows=(SHUFFLED, ONE_EPOCH))
    training = Training(group=group, root=tmp_path, more=lambda: [Ends()], before=on_sync(strike))
    newest, most = seen(training.start(async_save=True, **(BUDGET if budget else {})))
    if budget:
        assert newest == [1] * 6
    else:
        assert [number >= max(1, batch) for batch, number in enumerate(newest)] == [True] * 6
    assert most <= 2


def kept(root: Path) -> list[tuple[int, int]]:
    """Return epoch and batch of each autosave that is kept for good."""
    found = (re.search(r"epoch=(\d+)-batch=(\d+)-kept", path.name) for path in autosaves(root))
    return [(int(match[1]), int(match[2])) for match in found if match is not None]


ALL_KEPT = [(0, 3), (1, 0), (1, 3)]
FULL = [(0, 4), (1, 0), (1, 3)]


@pytest.mark.parametrize(
    ("options", "is_full", "expected"),
    [
        ({"every_n_train_steps": 2}, False, ALL_KEPT),
        ({"every_n_train_steps": 1, "async_save": True}, False, ALL_KEPT),
        ({"every_n_train_steps": 1}, True, FULL),
        ({"every_n_train_steps": 3}, True, FULL),
        (HOUR, True, FULL),
    ],
    ids=str,
)
def test_multiples_that_are_kept(
    options: dict[str, Any], is_full: bool, expected: list[tuple[int, int]], tmp_path: Path
) -> None:
    """``keep_every`` keeps each third step, or the step after it if the disk was full, whatever else is saved."""
    full = tmp_path / "full"
    training = Training(group=Group(rows=(SHUFFLED,)), root=tmp_path, before=on_sync(functools.partial(no_room, full)))
    filling = At({(0, 2): full.touch, (0, 3): full.unlink} if is_full else {})
    training.more = lambda: [filling, FlightRecorder(rule=None, keep_every=3)]
    start = training.start(**options)
    assert start.codes == [0], start.output
    assert ("could not be saved" in start.output) == is_full
    assert kept(tmp_path) == expected


def no_room(mark: Path, in_background: bool) -> None:
    """Fail as a full disk does, while a file exists."""
    if mark.exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_multiples_are_counted_from_the_beginning_of_the_run(tmp_path: Path) -> None:
    """A run that is killed resumes from its newest autosave, kept or not, and keeps what it keeps uninterrupted."""
    group = Group(rows=(SHUFFLED,))
    training = Training(group=group, root=tmp_path / "cut")
    training.more = lambda: [FlightRecorder(rule=None, keep_every=4)]
    assert_continues(whole_run(group, tmp_path), training, [Cut(at=(0, 4)), Cut(at=(0, 5)), Cut(at=(1, 3))])
    assert kept(tmp_path / "cut") == [(0, 4), (1, 2)]


def ends_as_a_script(trainer: Trainer, module: LightningModule, group: Group) -> None:
    """Fit, and end as Python does."""
    trainer.fit(module, **group.data())
    atexit._run_exitfuncs()


def test_what_is_left_of_a_run_that_has_finished(tmp_path: Path) -> None:
    """Only what is kept for good is left, and the next start is a new run."""
    training = Training(group=Group(rows=(SHUFFLED,)), root=tmp_path, stage=ends_as_a_script, before=atexit._clear)
    training.more = lambda: [FlightRecorder(rule=None, keep_every=4)]
    for _ in range(2):
        assert first_batch(training.finished()) == (0, 0)
        assert len(autosaves(tmp_path)) == len(kept(tmp_path)) > 0
    assert training.said("Resumed") == ""


def test_autosave_is_a_checkpoint_of_lightning(tmp_path: Path) -> None:
    """It loads safely in plain torch, and Lightning alone continues from it."""
    group = Group(rows=(SHUFFLED,))
    killed = Training(group=group, root=tmp_path / "killed")
    killed.start(Cut(at=(1, 3)))
    newest = autosaves(tmp_path)[-1]
    assert torch.load(newest, weights_only=True)["global_step"] == 9
    group = Group(rows=(SHUFFLED, Row(name="quiet", warns=("You're resuming from a checkpoint that ended before",))))
    alone = Training(group=group, root=tmp_path / "alone", with_callback=False, ckpt_path=newest)
    assert alone.finished().events[0][-1]["step"] >= 12


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
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                time.sleep(1 if self.how == "sleeps" else 0)
        return super().__getitem__(index)


def failing(how: str) -> Row:
    """Return a feature whose data fail."""
    return Row(name=how, train=lambda: DataLoader(FailsInWorker(how), batch_size=4, shuffle=True, num_workers=2))


def strike_later(send: Callable[[int, int], object], signum: int) -> None:
    """Send a signal when the process has probably waited for some time for a batch that never comes."""
    threading.Timer(1.5, send, (0 if send is os.killpg else os.getpid(), signum)).start()


GROUP_TERM = At({(0, 3): lambda: os.killpg(0, signal.SIGTERM)})
GROUP_INT = At({(0, 3): lambda: os.killpg(0, signal.SIGINT)})
STUCK = At({(0, 4): lambda: strike_later(os.kill, signal.SIGTERM)})
GROUP_STUCK = At({(0, 4): lambda: strike_later(os.killpg, signal.SIGINT)})
THIRD = {**BUDGET, "every_n_train_steps": 3}
RARE = {**BUDGET, "every_n_train_steps": 100}
RAISES = Row(name="module", module=RaisesAfterItsStep)
DIVIDED = "ZeroDivisionError"

# A feature, how the first start ends, and its exit code; then options, and where the next start begins.
ENDS: dict[str, tuple[Row, Cut | Callback | None, int, dict[str, Any], tuple[int, int] | None]] = {
    "SIGTERM": (WORKERS, Cut(at=(0, 3), by=signal.SIGTERM), 143, HOUR, (0, 4)),
    "SIGINT": (SHUFFLED, Cut(at=(0, 3), by=signal.SIGINT, hook="backward"), 130, HOUR, (0, 4)),
    "SIGTERM to the workers, too": (WORKERS, GROUP_TERM, 143, HOUR, (0, 4)),
    "SIGINT to the workers, too": (WORKERS, GROUP_INT, 130, HOUR, (0, 4)),
    "SIGTERM in validation": (WORKERS, Cut(at=(0, 7), by=signal.SIGTERM, hook="validation"), 143, HOUR, (1, 0)),
    "SIGTERM after all": (SHUFFLED, Cut(at=(1, 5), by=signal.SIGTERM, hook="epoch end"), 143, HOUR, None),
    "before a batch": (SHUFFLED, Cut(at=(0, 4), by=0), 1, RARE, (0, 4)),
    "before a backward pass": (WORKERS, Cut(at=(0, 4), by=0, hook="backward"), 1, RARE, (0, 4)),
    "after a step": (SHUFFLED, Cut(at=(0, 4), by=0, hook="step"), 1, THIRD, (0, 3)),
    "between a step and its count": (RAISES, None, 1, THIRD, (0, 3)),
    "in validation": (SHUFFLED, Cut(at=(0, 5), by=0, hook="validation"), 1, THIRD, (1, 0)),
    "at the end of an epoch": (SHUFFLED, Cut(at=(0, 5), by=0, hook="epoch end"), 1, THIRD, (1, 0)),
    "a worker raises": (failing("raises"), None, 1, RARE, (0, 5)),
    "a worker dies": (failing("dies"), None, 1, RARE, ANY),  # noticed at once or when its batch is due
    "a worker sleeps": (failing("sleeps"), STUCK, 143, HOUR, (0, 5)),
    "a worker spins": (failing("spins"), GROUP_STUCK, 130, HOUR, (0, 5)),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_an_end_costs(name: str, tmp_path: Path) -> None:
    """A stop saves the finished batches, and so does an error before the step; after it, the last autosave counts."""
    row, end, code, options, place = ENDS[name]
    training = Training(group=Group(rows=(row,)), root=tmp_path / "cut", more=list)
    whole = whole_run(training.group, tmp_path)
    training.root.mkdir()
    (training.root / "armed").touch()
    training.more = (lambda: [end]) if isinstance(end, At) else list
    start = training.start(end if isinstance(end, Cut) else None, **options)
    assert start.codes == [code], start.output
    training.more = list
    last = training.finished()
    assert first_batch(last) == place
    [begin, end_of_first] = slice_of(whole[0], start.events[0], whole_name="the whole run", part_name="the first start")
    [again, end_of_last] = slice_of(whole[0], last.events[0], whole_name="the whole run", part_name="the last start")
    assert begin == 0 < again <= end_of_first
    assert end_of_last == len(whole[0])


class Dies(Callback):
    """Kills the process while it starts."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def test_killed_while_it_resumes(tmp_path: Path) -> None:
    """However often that happens, the autosaves stay as they are, and the run continues from the newest."""
    group = Group(rows=(SHUFFLED,))
    [whole] = whole_run(group, tmp_path)
    training = Training(group=group, root=tmp_path / "cut")
    training.start(Cut(at=(0, 3)))
    before = autosaves(training.root)
    for hook in ("on_load_checkpoint", "on_train_start", "on_train_batch_start"):
        training.more = lambda hook=hook: [Dies(hook)]
        assert training.start().codes == [-signal.SIGKILL]
        assert autosaves(training.root) == before
    training.more = list
    last = training.finished()
    assert first_batch(last) == (0, 3)
    assert last.events[0] == whole[-len(last.events[0]) :]


def test_resume_of_another_state_is_saved_at_once(tmp_path: Path) -> None:
    """A start from a user's file, or one that is not exact, has no autosave of its state yet."""
    first = Training(group=Group(rows=(SHUFFLED,)), root=tmp_path / "first")
    first.start(Cut(at=(0, 3)))
    other = Training(group=first.group, root=tmp_path / "other", ckpt_path=autosaves(first.root)[-1])
    other.start(Cut(at=(0, 3)))
    assert len(autosaves(other.root)) == 1
    before = autosaves(first.root)[-1].name
    first.group = Group(rows=(Row(name="longer", train=rows_of(40)),))
    first.start(Cut(at=(0, 3)), strict=False)
    assert autosaves(first.root)[-1].name > before


def test_a_run_that_only_the_environment_protects(tmp_path: Path) -> None:
    """An unchanged script that is stopped continues exactly; nothing after its fit runs before that."""

    def script(trainer: Trainer, module: LightningModule, group: Group) -> None:
        trainer.fit(module, **group.data())
        print("the script goes on")

    group = Group(rows=(SHUFFLED,))
    training = Training(group=group, root=tmp_path / "cut", with_callback=False, stage=script)
    training.before = lambda: os.environ.update(PL_FAULT_TOLERANT_TRAINING="1")
    assert_continues(whole_run(group, tmp_path, stage=script), training, [Cut(at=(0, 3), by=signal.SIGTERM)])
    assert ["the script goes on" in start.output for start in training.starts] == [False, True]


def test_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    """After a second Ctrl-C not even the batch is finished."""
    training = Training(group=Group(rows=(SHUFFLED,)), root=tmp_path)
    training.more = lambda: [At({(0, 3): lambda: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]})]
    start = training.start()
    assert start.codes == [130]
    assert [each["kind"] for each in start.events[0]].count("trained") == 3


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


def kill() -> None:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("row", [SHUFFLED, WORKERS], ids=["", "two workers"])
def test_killed_while_a_thread_writes(row: Row, tmp_path: Path) -> None:
    """A kill before a file is in place costs the training since the previous autosave."""
    group = Group(rows=(row, Row(name="options", options={"async_save": True}, repeats=12)))
    training = Training(group=group, root=tmp_path / "cut", before=on_sync(Writes(7, 13, act=kill)))
    never = Cut(at=(9, 9))
    assert_continues(whole_run(group, tmp_path), training, [never, never])


def test_stop_makes_up_for_a_write_that_failed(tmp_path: Path) -> None:
    """A stop reports the write that failed in the background, and saves its own state."""
    stopped = threading.Event()

    def act() -> None:
        stopped.wait()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        stopped.set()

    group = Group(rows=(SHUFFLED,))
    [whole] = whole_run(group, tmp_path)
    training = Training(group=group, root=tmp_path / "cut", before=on_sync(Writes(3, act=act)))
    training.more = lambda: [At({(0, 3): stop})]
    start = training.start(async_save=True, **BUDGET)
    assert start.codes == [143], start.output
    assert training.said("could not be written in the background")
    training.before, training.more = None, list
    last = training.finished()
    assert first_batch(last) == (0, 4)
    assert last.events[0] == whole[-len(last.events[0]) :]


# Errors of a save.


class Unsafe(Callback):
    """Has a state that a safe load refuses, from some step on."""

    def __init__(self, step: int) -> None:
        self.step, self.num_steps = step, 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"where": Path("/data") if self.num_steps >= self.step else ""}


class RaisesInItsSave(Net):
    """Writes a file of its own, for which there is no room."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.trainer.global_step == 3:
            raise OSError(errno.ENOSPC, "No space left for this side file")


def raise_it(in_background: bool) -> None:
    """Raise what is no fault of a disk."""
    raise ZeroDivisionError("in the thread" if in_background else "at once")


RARELY = {"async_save": True, "every_n_train_steps": 100}
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
    "a hook of the user": (Row(name="raises", module=RaisesInItsSave), {}, None, 3),
    "a ModelCheckpoint": (CHECKPOINT, {}, None, 3),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors_that_end_a_run(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A state that could not be restored, a place that never worked, and an error of the user's own are raised."""
    row, options, strike, num_batches = ERRORS[name]
    training = Training(group=Group(rows=(row,)), root=tmp_path, before=on_sync(strike) if strike else None)
    start = training.start(**options)
    assert start.codes == [1], start.output
    assert sum(each["kind"] == "batch" for each in start.events[0]) == num_batches
    error = [line for line in start.output.splitlines() if re.match(r"[\w.]*Error: ", line)][-1]
    assert training.told(error) == snapshot


def test_error_in_the_background_ends_a_run_at_the_next_boundary(tmp_path: Path) -> None:
    """However late the next save is due, a bug in the thread is raised, and what was saved stays."""
    writes = Writes(3, act=lambda: raise_it(True))
    row = Row(name="long", trainer={"max_epochs": 100})
    training = Training(group=Group(rows=(SHUFFLED, row)), root=tmp_path, before=on_sync(writes))
    start = training.start(async_save=True, every_n_train_steps=5)
    assert start.codes == [1]
    assert "ZeroDivisionError: in the thread" in start.output
    assert sum(each["kind"] == "batch" for each in start.events[0]) < 20
    assert autosaves(tmp_path)


# A full disk, or a store that is not reached.


class Struck(Callback):
    """Raises an error of the user's."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) == (0, 5):
            raise ZeroDivisionError("of the user's")


VALIDATION = Cut(at=(0, 5), hook="validation", by=signal.SIGTERM)
# From which batch to which it is full, what ends the start, with which exit code, and options.
OUTAGES: dict[str, tuple[tuple[int, int], tuple[int, int], Cut | Callback | None, int, dict[str, Any]]] = {
    "for a while": ((0, 2), (1, 1), None, 0, {}),
    "when the fit ends": ((1, 3), (9, 9), None, 0, {}),
    "at a stop in validation": ((0, 3), (9, 9), VALIDATION, 74, {}),
    "at an error": ((0, 3), (9, 9), Struck(), 1, BUDGET),
    "in the background": ((0, 2), (1, 1), None, 0, {"async_save": True, "every_n_train_steps": 3}),
}


@pytest.mark.parametrize("name", OUTAGES)
def test_what_is_said_while_a_disk_is_full(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """The run continues; the start and end of the outage are told once each, and so is what a stop could not save."""
    first, last, end, code, options = OUTAGES[name]
    full = tmp_path / "start-full"
    training = Training(group=Group(rows=(SHUFFLED,)), root=tmp_path)
    training.before = on_sync(functools.partial(no_room, full))
    filling = At({first: full.touch, last: functools.partial(full.unlink, missing_ok=True)})
    training.more = lambda: [filling, *([end] if isinstance(end, Callback) else [])]
    start = training.start(end if isinstance(end, Cut) else None, **options)
    assert start.codes == [code], start.output
    assert re.sub(r"\d+ saves?", "SOME saves", training.said("saved", "Autosaves")) == snapshot


def test_store_that_is_not_reached_for_a_while(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """It is reported once, and the run equals the uninterrupted one."""
    away = tmp_path / "away"

    def before() -> None:
        def answers(real: Callable[..., Any]) -> Callable[..., Any]:
            def ask(*arguments: Any, **named: Any) -> Any:
                if away.exists():
                    raise ConnectionError("the store does not answer")
                return real(*arguments, **named)

            return ask

        for name in ("_open", "ls", "info", "mv", "rm_file", "pipe_file", "cp_file", "cat_file"):
            setattr(MemoryFileSystem, name, answers(getattr(MemoryFileSystem, name)))

    group = Group(rows=(SHUFFLED,))
    training = Training(group=group, root=tmp_path / "cut", before=before)
    training.more = lambda: [At({(0, 2): away.touch, (0, 5): away.unlink})]
    assert training.start(dirpath="memory://runs").events == whole_run(group, tmp_path)
    assert training.said("saved", "Autosaves", "history") == snapshot
