"""The history of validation runs, and of ``validate``, ``test``, and ``predict``: what ran, and what ran twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.cli.report import report_lines
from lightning_faulttolerant.records.accounting import chapter_report, report_of
from lightning_faulttolerant.records.history import FILE_NAME, FitHistory, RunPlace
from lightning_faulttolerant.trainer.run import history as history_module
from tests.cli.checkpoints import call
from tests.data_sets import NoisyDataset
from tests.histories import chapter_of, ends, history_of, lines_of
from tests.processes import run
from tests.runs import Net, make_trainer

ALWAYS = {"train_time_interval": timedelta(microseconds=1)}
"""An autosave before each batch."""
RARELY = {"train_time_interval": timedelta(hours=1)}
"""An autosave before the first batch and at the end."""


class Evaluated(Net):
    """A module that can be tested, and predicts."""

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self.layers(batch).square().mean())

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch)


class Strikes(Callback):
    """Sends a signal in a batch of one stage, counted from 0, or raises."""

    def __init__(self, stage: str, batch: int, signum: int = signal.SIGKILL) -> None:
        self.stage, self.batch, self.signum = stage, batch, signum

    def on_test_batch_start(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, *_: Any
    ) -> None:
        stage = trainer.state.stage.value if trainer.state.stage is not None else ""
        if (stage, batch_idx) == (self.stage, self.batch):
            if not self.signum:
                raise RuntimeError("in an evaluation")
            os.kill(os.getpid(), self.signum)

    on_validation_batch_start = on_predict_batch_start = on_test_batch_start


class StartsTwice(Callback):
    """Does more at the start of a validation run than a new process could have: the run is repeated."""

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        open(os.devnull).close()


def script(
    directory: Path, *functions: str, own: Callable[[], list[Callback]] = list, **options: Any
) -> Callable[..., None]:
    """Return a script that calls functions of the Trainer, each with 6 batches; a fit has 2 epochs of 5."""

    def main(*strikes: Callback) -> None:
        trainer = make_trainer(
            [FaultTolerance(directory, run_id="run", **{**ALWAYS, **options}), *own(), *strikes], directory
        )
        module, loader = Evaluated(), DataLoader(NoisyDataset(24), batch_size=4)
        for function in functions:
            if function == "fit":
                trainer.fit(module, DataLoader(NoisyDataset(20), batch_size=4), loader)
            else:
                getattr(trainer, function)(module, loader)

    return main


def struck(main: Callable[..., None], *strikes: Callback) -> None:
    """Run a script with each strike, and then to its end."""
    for strike in strikes:
        assert run(lambda strike=strike: main(strike)).exit_code != 0  # type: ignore[misc]
    ended = run(main)
    assert ended.exit_code == 0, ended.output


@pytest.fixture(autouse=True)
def sign_at_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each batch leave a sign of life."""
    monkeypatch.setattr(history_module, "ALIVE_EVERY_SECONDS", (0.0, 0.0))


def again_in(directory: Path) -> list[tuple[int, str, int, bool]]:
    """Return for each evaluation that was continued the process, its name, and how many batches ran again."""
    report = chapter_report(chapter_of(directory))
    return [(each.process + 1, report.fit_of(each).name, each.num_again, each.was_killed) for each in report.continued]


def validations_of(fit: FitHistory) -> list[tuple[int, int, bool]]:
    """Return the first batch, the number of batches, and the end of each validation run."""
    return [(run.first, run.num_batches, run.is_over) for run in fit.validations]


def test_validation_runs_are_reported(tmp_path: Path) -> None:
    """A fit tells each of its validation runs: after which batch, how many batches, and how long."""
    struck(script(tmp_path, "fit"))
    [fit] = chapter_of(tmp_path).fits
    assert validations_of(fit) == [(0, 6, True), (0, 6, True)]
    assert [run.place for run in fit.validations] == [
        RunPlace(epoch=epoch, batch=5, global_step=5 * (epoch + 1)) for epoch in range(2)
    ]
    report = chapter_report(chapter_of(tmp_path))
    assert report.account.evaluation == pytest.approx(sum(run.seconds for run in fit.validations), abs=0.01)
    assert min(report.account.evaluation, report.account.training) > 0
    assert report.account.total == pytest.approx(report.ended - report.began)


def test_short_validation_runs_are_written_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written for a short run but with the next line: two runs in a second are one line."""
    monkeypatch.setattr(history_module, "ALIVE_EVERY_SECONDS", (100.0, 100.0))
    struck(script(tmp_path, "fit", **RARELY))
    [line] = [line for line in lines_of(tmp_path) if line["event"] == "validation"]
    assert (line["number"], line["num_batches"], line["epoch"]) == (2, 12, 1)
    assert "alive" not in [line["event"] for line in lines_of(tmp_path)]


@pytest.mark.parametrize(("signum", "options", "first", "again"), [
    (signal.SIGTERM, RARELY, 4, 0), (signal.SIGKILL, ALWAYS, 3, 0), (signal.SIGKILL, RARELY, 0, 3),
])  # fmt: skip
def test_struck_validation_tells_where_it_continued(
    tmp_path: Path, signum: int, options: dict[str, Any], first: int, again: int
) -> None:
    """After a stop or a kill in its batch 3, the next process names its first batch, and what ran again is lost."""
    struck(script(tmp_path, "fit", **options), Strikes("validate", 3, signum))
    before, after = chapter_of(tmp_path).fits
    assert validations_of(before) == [(0, 4 if signum == signal.SIGTERM else 3, False)]
    assert validations_of(after)[0] == (first, 6 - first, True)
    killed = signum == signal.SIGKILL
    assert again_in(tmp_path) == [(2, "fit-1", again, killed)]
    assert after.place is not None
    assert after.place.num_validated == (first or None)
    assert not again or chapter_report(chapter_of(tmp_path)).account.redone > 0


def test_validation_that_is_repeated_is_lost(tmp_path: Path) -> None:
    """If only the capture of the run's start can be saved, its batches run again, and their time is lost."""
    struck(script(tmp_path, "fit", own=lambda: [StartsTwice()], **RARELY), Strikes("validate", 3, signal.SIGTERM))
    before, after = chapter_of(tmp_path).fits
    assert validations_of(after)[0] == (0, 6, True)
    assert again_in(tmp_path) == [(2, "fit-1", 4, False)]
    lost = chapter_report(chapter_of(tmp_path)).account.redone
    [run] = before.validations
    assert lost == pytest.approx(run.seconds, abs=0.05)


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_evaluation_is_reported_like_a_fit(tmp_path: Path, function: str) -> None:
    """An evaluation that is stopped, killed, fails, and ends: its starts, batches, autosaves, and ends."""
    strikes = [(1, signal.SIGTERM), (3, signal.SIGKILL), (4, 0)]
    struck(script(tmp_path, function), *(Strikes(function, batch, signum) for batch, signum in strikes))
    chapter = chapter_of(tmp_path)
    assert ends(chapter) == ["stopped by SIGTERM", None, "RuntimeError", "finished"]
    assert {fit.name for fit in chapter.fits} == {f"{function}-1"}
    starts = [fit.place.num_validated for fit in chapter.fits if fit.place is not None]
    assert starts == [0, 2, 3, 4]
    assert [fit.resumed is not None and fit.resumed.position for fit in chapter.fits] == [
        False, *(f"before batch {batch} of {function}" for batch in (2, 3, 4))
    ]  # fmt: skip
    assert all(fit.num_autosaves for fit in chapter.fits)
    last = chapter.fits[-1].last_place
    assert last is not None
    assert last.num_validated == 6
    assert again_in(tmp_path) == [
        (2, f"{function}-1", 0, False),
        (3, f"{function}-1", 0, True),
        (4, f"{function}-1", 1, False),
    ]
    account = chapter_report(chapter).account
    assert account.training == 0
    assert account.evaluation > 0
    assert chapter.done is not None


def test_killed_evaluation_repeats_its_batches(tmp_path: Path) -> None:
    """The batches since the only autosave run again, and their time is lost."""
    struck(script(tmp_path, "test", **RARELY), Strikes("test", 4))
    assert again_in(tmp_path) == [(2, "test-1", 4, True)]
    assert chapter_report(chapter_of(tmp_path)).account.redone > 0


@pytest.mark.parametrize(
    ("signum", "options", "note"),
    [
        (signal.SIGTERM, RARELY, []),
        (signal.SIGKILL, RARELY, ["batches 0 to 3 of predict, and maybe some more, run a second time"]),
        (signal.SIGKILL, ALWAYS, ["batches 4 and later of predict may run a second time"]),
    ],
)
def test_report_names_the_batches_that_run_again(
    tmp_path: Path, signum: int, options: dict[str, Any], note: list[str]
) -> None:
    """After a kill, `resume_report` names the batches that writers see again; after a stop there are none."""
    main = script(tmp_path, "predict", **options)
    assert run(lambda: main(Strikes("predict", 4, signum))).exit_code != 0

    class Looks(Callback):
        def on_predict_end(self, trainer: Trainer, module: LightningModule) -> None:
            [protection] = [one for one in trainer.callbacks if isinstance(one, FaultTolerance)]
            report = protection.resume_report
            assert report is not None
            told = [text.removeprefix("the previous process ended without a save: ") for text in report.notes]
            assert told == note, told

    ended = run(lambda: main(Looks()))
    assert ended.exit_code == 0, ended.output


def test_script_that_fits_tests_and_predicts_has_one_chapter(tmp_path: Path) -> None:
    """Each function is told under its number. Those that are finished are restored, and count once."""
    struck(script(tmp_path, "fit", "test", "predict"), Strikes("test", 2), Strikes("predict", 2, signal.SIGTERM))
    chapter = chapter_of(tmp_path)
    assert [[fit.name for fit in process.fits] for process in chapter.processes] == [
        ["fit-1", "test-2"], ["fit-1", "test-2", "predict-3"], ["fit-1", "test-2", "predict-3"],
    ]  # fmt: skip
    assert [[fit.has_trained for fit in process.fits] for process in chapter.processes] == [
        [True, True], [False, True, True], [False, False, True],
    ]  # fmt: skip
    assert again_in(tmp_path) == [(2, "test-2", 0, True), (3, "predict-3", 0, False)]
    report = report_of(history_of(tmp_path), run_id="run", path="run", made=0.0)
    assert report is not None
    text = "\n".join(report_lines(report))
    for expected in ("evaluation that counted", "predict-3", "2 validation runs inside fits: 12 batches"):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 80


def test_evaluation_that_can_only_start_over_continues_the_chapter(tmp_path: Path) -> None:
    """Its batches run again from the first, and all of its earlier time is lost; it is the same run."""

    class Opens(Callback):
        def on_test_start(self, *_: Any) -> None:
            open(os.devnull).close()

    struck(script(tmp_path, "test", own=lambda: [Opens()]), Strikes("test", 3, signal.SIGTERM))
    before, after = chapter_of(tmp_path).fits
    assert (after.resumed, after.place and after.place.num_validated) == (None, 0)
    assert before.last_place is not None
    assert again_in(tmp_path) == [(2, "test-1", 4, False)]
    assert chapter_report(chapter_of(tmp_path)).account.redone > 0


def test_evaluation_with_other_weights_begins_a_chapter(tmp_path: Path) -> None:
    """It is another evaluation: nothing of the earlier one is continued, and it loses nothing."""
    main = script(tmp_path, "test")

    def other() -> None:
        trainer = make_trainer([FaultTolerance(tmp_path, run_id="run", **ALWAYS)], tmp_path)
        module = Evaluated()
        module.layers[0].bias.data += 1  # type: ignore[operator, union-attr]
        trainer.test(module, DataLoader(NoisyDataset(24), batch_size=4))

    assert run(lambda: main(Strikes("test", 3))).exit_code == -signal.SIGKILL
    assert run(other).exit_code == 0
    assert [ends(chapter) for chapter in history_of(tmp_path).chapters] == [[None], ["finished"]]


def test_commands_take_the_history_for_no_autosave(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``list`` and ``prune`` see the autosaves of an unfinished evaluation, and nothing after its end."""
    main = script(tmp_path, "test")
    assert run(lambda: main(Strikes("test", 3))).exit_code == -signal.SIGKILL
    assert "test-1" in call(capsys, "list", tmp_path).out
    assert call(capsys, "prune", tmp_path, "--keep-last", "1").status == 0
    assert (tmp_path / "run" / FILE_NAME).exists()
    assert run(main).exit_code == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [FILE_NAME]
    assert "test-1" not in call(capsys, "list", tmp_path).out
    assert "Run run" in call(capsys, "report", tmp_path).out
