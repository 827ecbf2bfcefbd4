"""The history of a run: it records what happened, however a process ended, and changes nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.cli.found import find_checkpoints
from lightning_faulttolerant.cli.histories import runs_of
from lightning_faulttolerant.records.accounting import chapter_report
from lightning_faulttolerant.records.history import FILE_NAME, FitHistory, RunPlace
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.testing.processes import run_ranks
from lightning_faulttolerant.trainer.recorder import KillAt
from lightning_faulttolerant.trainer.run import history as history_module
from lightning_faulttolerant.trainer.run.directory import RUN_ID_VARIABLE
from lightning_faulttolerant.trainer.run.history_file import LocalHistory
from tests.data_sets import NoisyDataset
from tests.histories import chapter_of, ends, history_of, lines_of
from tests.processes import run
from tests.rank_runs import for_ranks
from tests.runs import Net, RaiseAt, eight_batches, fit_net, make_trainer
from tests.scripts import protected

pytestmark = for_ranks


def fit_one(directory: Path, *faults: Callback, **options: Any) -> Callable[[], Trainer]:
    """Return a script of one fit of 2 epochs of 5 batches, with an autosave at every step."""
    return lambda: fit_net([protected(**options), *faults], directory)


def place(epoch: int, batch: int) -> RunPlace:
    """Return a place of such a fit."""
    return RunPlace(epoch=epoch, batch=batch, global_step=5 * epoch + batch)


# The history changes nothing.


@pytest.mark.parametrize("how", ["each-boundary", pytest.param("unwritable", marks=pytest.mark.slow)])
def test_run_with_a_history_is_the_run_without(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a sign of life at each boundary and validation batch, a killed run equals one without a history.

    The same holds if the history can't be written at all.
    """
    monkeypatch.setattr(history_module, "ALIVE_EVERY_SECONDS", (0.0, 0.0))
    monkeypatch.setenv(RUN_ID_VARIABLE, "run")

    def fit(callbacks: list[Callback], directory: Path) -> Trainer:
        if how == "unwritable":
            (directory / "fault_tolerance" / "run" / FILE_NAME).mkdir(parents=True, exist_ok=True)
        trainer = fit_net(callbacks, directory)
        if how == "each-boundary" and directory.name != "uninterrupted":
            signs = [line for line in lines_of(directory) if line["event"] == "alive"]
            assert len(signs) >= 8  # an autosave at a boundary counts as a sign
        return trainer

    costs = assert_resumes_exactly(fit, [KillAt(3), KillAt(5)], options={"every_n_train_steps": 2})
    assert [cost.exit_code for cost in costs] == [-signal.SIGKILL] * 2


# The history records what happened.


def test_run_of_many_ends_is_told_whole(tmp_path: Path) -> None:
    """Whether a process was killed, stopped, failed, or finished, the history has its start, its work, and its end.

    The account of its time adds up.
    """
    faults = [[KillAt(2)], [KillAt(1, signum=signal.SIGTERM)], [RaiseAt("on_train_epoch_start", 1)], []]
    codes = [run(fit_one(tmp_path, *fault)).exit_code for fault in faults]
    assert codes == [-signal.SIGKILL, 128 + signal.SIGTERM, 1, 0]
    chapter = chapter_of(tmp_path)
    assert ends(chapter) == [None, "stopped by SIGTERM", "ZeroDivisionError", "finished"]
    fits = chapter.fits
    before_validation = replace(place(0, 5), num_validated=0)
    assert [fit.place for fit in fits] == [place(0, 0), place(0, 2), place(0, 4), before_validation]
    assert [fit.resumed is not None and fit.resumed.continues for fit in fits] == [False, True, True, True]
    assert [fit.num_autosaves for fit in fits] == [3, 2, 1, 6]
    assert "Stopped by SIGTERM before batch 4 of epoch 0" in fits[1].text
    assert fits[2].text == "ZeroDivisionError: in on_train_epoch_start"
    assert fits[1].saved == place(0, 4)
    assert [process.pid for process in chapter.processes] == list(dict.fromkeys(p.pid for p in chapter.processes))
    assert chapter.done is not None
    report = chapter_report(chapter)
    assert report.account.total == pytest.approx(report.ended - report.began)
    assert min(report.account.restoring, report.account.restarting, report.account.saving) > 0
    assert [line["event"] for line in lines_of(tmp_path)].count("begin") == 4


def test_autosaves_are_told_as_they_are(tmp_path: Path) -> None:
    """Each autosave is recorded with its name and size, before the next batch begins."""
    sizes = {}

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            for path in tmp_path.rglob("autosave-*.ckpt"):
                sizes[path.name] = path.stat().st_size
            told = {autosave.name: autosave.num_bytes for autosave in chapter_of(tmp_path).fits[-1].autosaves}
            assert sizes.items() <= told.items()

    assert run(fit_one(tmp_path, Looks())).exit_code == 0
    [fit] = chapter_of(tmp_path).fits
    assert [autosave.place for autosave in fit.autosaves[:6]] == [place(0, b) for b in range(5)] + [place(1, 0)]
    assert all(autosave.seconds > 0 and not autosave.is_in_background for autosave in fit.autosaves)


def test_autosaves_in_background_are_reported_when_they_are_written(tmp_path: Path) -> None:
    """A background autosave has the time of its capture and that of its file, and a later process finds it."""

    class Waits(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            [protection] = [callback for callback in trainer.callbacks if isinstance(callback, FaultTolerance)]
            protection._session.autosaver._background.wait()

    assert run(fit_one(tmp_path, Waits(), KillAt(4), async_save=True)).exit_code == -signal.SIGKILL
    assert run(fit_one(tmp_path, async_save=True)).exit_code == 0
    first, second = chapter_of(tmp_path).fits
    assert [autosave.is_in_background for autosave in first.autosaves[:2]] == [False, True]
    in_background = [autosave for autosave in first.autosaves if autosave.is_in_background]
    assert all(autosave.taken < autosave.time for autosave in in_background)
    assert second.resumed is not None
    assert os.path.basename(second.resumed.path) == first.autosaves[-1].name
    assert second.autosaves[-1].is_in_background is False


def test_signal_while_the_end_is_told_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a signal handler interrupts the final wait for a store, all attributes of the trainer are restored.

    This includes the methods that are wrapped twice, for stopping and for the rest.
    """

    def flush(self: LocalHistory) -> None:
        raise SystemExit(3)

    monkeypatch.setattr(LocalHistory, "flush", flush)
    trainer = make_trainer([FaultTolerance(tmp_path)], tmp_path, max_epochs=1)
    with pytest.raises(SystemExit, match="3"):
        trainer.fit(Net(), DataLoader(NoisyDataset(20), batch_size=4), DataLoader(NoisyDataset(8), batch_size=4))
    assert trainer.global_step == 5
    assert "run" not in vars(trainer.fit_loop)
    assert "run" not in vars(trainer.fit_loop.epoch_loop.val_loop)
    assert "process_dataloader" not in vars(trainer.strategy)


def test_validation_leaves_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation has no boundaries, but its signs of life still give the time of a kill."""
    monkeypatch.setattr(history_module, "ALIVE_EVERY_SECONDS", (0.0, 0.0))
    assert run(fit_one(tmp_path, KillAt(4, hook="validation"))).exit_code == -signal.SIGKILL
    assert lines_of(tmp_path)[-1]["event"] == "alive"
    assert lines_of(tmp_path)[-1]["batch"] >= 4


def test_process_that_never_reached_a_batch_is_reported(tmp_path: Path) -> None:
    """An exception or a kill before the first batch is an end without a start, in the same chapter."""

    class Fails(Callback):
        def on_fit_start(self, *_: Any) -> None:
            raise RuntimeError("no data")

    class Dies(Callback):
        def on_fit_start(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

    for fault in (Fails(), Dies()):
        run(fit_one(tmp_path, fault))
    assert run(fit_one(tmp_path)).exit_code == 0
    chapter = chapter_of(tmp_path)
    assert ends(chapter) == ["RuntimeError", None, "finished"]
    assert [fit.started is None for fit in chapter.fits] == [True, True, False]
    assert chapter.fits[0].text == "RuntimeError: no data"
    assert chapter_report(chapter).account.restarting > 0


def test_rerun_of_a_finished_run_begins_a_chapter(tmp_path: Path) -> None:
    """Running a finished run again adds a chapter to the same history, and both are complete."""
    for _ in range(2):
        assert run(fit_one(tmp_path)).exit_code == 0
    chapters = history_of(tmp_path).chapters
    assert [ends(chapter) for chapter in chapters] == [["finished"], ["finished"]]
    assert all(chapter.done is not None for chapter in chapters)


def test_start_without_resuming_begins_a_chapter(tmp_path: Path) -> None:
    """``auto_resume=False`` starts a new chapter."""
    run(fit_one(tmp_path, KillAt(3)))
    assert run(fit_one(tmp_path, auto_resume=False)).exit_code == 0
    assert [ends(chapter) for chapter in history_of(tmp_path).chapters] == [[None], ["finished"]]


def test_fits_of_a_script_are_told_apart(tmp_path: Path) -> None:
    """If a script is killed in its second fit, the restart restores the first fit and does not train it again."""

    def main(*faults: Callback) -> None:
        for number in range(2):
            fit_net([protected(), *(faults if number else ())], tmp_path, max_epochs=1)

    assert run(lambda: main(KillAt(2))).exit_code == -signal.SIGKILL
    assert run(main).exit_code == 0
    chapter = chapter_of(tmp_path)
    assert [[fit.number for fit in process.fits] for process in chapter.processes] == [[1, 2], [1, 2]]
    assert [fit.has_trained for fit in chapter.fits] == [True, True, False, True]
    assert chapter.done is not None


def test_exception_after_the_fit_leaves_the_chapter_open(tmp_path: Path) -> None:
    """If the script fails after its fit, the autosaves stay, and the next process continues the chapter."""

    def main(*, fails: bool) -> None:
        fit_net([protected()], tmp_path)
        if fails:
            raise RuntimeError("in the evaluation")

    assert run(lambda: main(fails=True)).exit_code == 1
    assert chapter_of(tmp_path).done is None
    assert run(lambda: main(fails=False)).exit_code == 0
    chapter = chapter_of(tmp_path)
    assert (ends(chapter), chapter.done is not None) == (["finished", "finished"], True)
    assert chapter.fits[1].has_trained is False


def test_deadline_is_a_reason(tmp_path: Path) -> None:
    """The history gives the deadline as the reason of a stop."""
    ended = run(lambda: fit_net([FaultTolerance(deadline=timedelta(seconds=0.5))], tmp_path, max_epochs=-1))
    assert ended.exit_code == 75
    [fit] = chapter_of(tmp_path).fits
    assert fit.reason == "stopped by the deadline"
    assert fit.text.startswith("Stopped by the deadline")


def test_fit_of_nobody_is_not_told(tmp_path: Path) -> None:
    """``fast_dev_run`` leaves no history, as it leaves no autosave."""
    assert run(lambda: fit_net([protected()], tmp_path, fast_dev_run=True)).exit_code == 0
    assert runs_of(find_checkpoints(str(tmp_path))) == []


@pytest.mark.slow
def test_run_in_a_store_is_reported_there(tmp_path: Path, s3: str) -> None:
    """A run below a URL that is killed, resumed, and finished has one history object, which outlives the autosaves."""
    assert run(fit_one(tmp_path, KillAt(3), dirpath=s3)).exit_code == -signal.SIGKILL
    ended = run(fit_one(tmp_path, dirpath=s3))
    assert (ended.exit_code, "can't be written" in ended.output) == (0, False), ended.output
    chapter = chapter_of(s3)
    assert ends(chapter) == [None, "finished"]
    assert chapter.done is not None
    second: FitHistory = chapter.fits[1]
    assert second.resumed is not None
    assert second.place == place(0, 3)
    assert all(autosave.num_bytes for autosave in second.autosaves)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_fits_in_other_processes_are_of_the_process_of_the_script(tmp_path: Path) -> None:
    """Fits that Lightning runs in separate processes are recorded as fits of the script, which records its end."""

    def main() -> None:
        for _ in range(2):
            fit_net([protected()], tmp_path, strategy="ddp_fork", devices=1, max_epochs=1)

    ended = run(main)
    assert ended.exit_code == 0, ended.output
    chapter = chapter_of(tmp_path)
    assert [[fit.number for fit in process.fits] for process in chapter.processes] == [[1, 2]]
    assert (ends(chapter), chapter.done is not None) == (["finished"], True)


def test_only_the_first_rank_tells(tmp_path: Path) -> None:
    """Only one of two ranks writes: one beginning, one start of two ranks, and one line for each autosave."""

    def main(rank: int) -> None:
        arguments: dict[str, Any] = {"strategy": "ddp", "devices": 2, "max_epochs": 1}
        fit_net([protected(run_id="run")], tmp_path, train=eight_batches(), **arguments)

    outputs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    assert run_ranks(main, outputs=outputs, seed=1, timeout_seconds=60.0) == 0, outputs[0].read_text()
    lines = lines_of(tmp_path)
    events = [line["event"] for line in lines]
    assert (events.count("begin"), events.count("start"), events.count("end")) == (1, 1, 1)
    [fit] = chapter_of(tmp_path).fits
    assert fit.num_ranks == 2
    assert fit.num_autosaves == len({autosave.name for autosave in fit.autosaves}) == 5
