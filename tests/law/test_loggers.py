"""Loggers that write files continue after a resume as if nothing had happened."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.kills import files_below, run_whole_and_killed
from tests.loggers import LateNet, scalars
from tests.processes import run
from tests.runs import fit_net

pytestmark = pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty:UserWarning")

Loggers = Callable[[Path], Any]


def fit_logging(callbacks: list[Callback], directory: Path, loggers: Loggers, **arguments: Any) -> Any:
    """Fit with loggers."""
    return fit_net(callbacks, directory, logger=loggers(directory), module=LateNet(), **arguments)


CSV: dict[str, Loggers] = {
    "default": lambda directory: CSVLogger(directory),
    "named": lambda directory: CSVLogger(directory, name="mine", prefix="p", flush_logs_every_n_steps=1000),
    "no name": lambda directory: CSVLogger(directory, name=None),
    "version": lambda directory: CSVLogger(directory, version=3),
    "text": lambda directory: CSVLogger(directory, version="mine"),
}


@pytest.mark.parametrize("kills", [[3], [8], [4, 2, 1]], ids=str)
@pytest.mark.parametrize("loggers", CSV)
def test_csv_continues(loggers: str, kills: list[int], tmp_path: Path) -> None:
    """There is one version, and each of its files equals the uninterrupted run's, byte for byte."""
    if kills != [4, 2, 1] and loggers not in ("default", "version"):
        kills = kills[:1]
    runs = run_whole_and_killed(lambda *args: fit_logging(*args, CSV[loggers]), tmp_path, kills, every_n_train_steps=2)
    names = files_below(runs.whole)
    assert names == files_below(runs.killed)
    assert len(names) == 2
    for name in names:
        assert (runs.killed / name).read_bytes() == (runs.whole / name).read_bytes(), name


class LogAside(Callback):
    """Logs directly to the logger, which Lightning does not flush then."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        trainer.logger.log_metrics({"aside": float(batch_idx)}, step=trainer.global_step)


@pytest.mark.parametrize("kill", [KillAt(3), KillAt(3, signum=signal.SIGTERM, hook="validation")], ids=["kill", "term"])
def test_rows_that_were_not_flushed_are_kept(kill: Callback, tmp_path: Path) -> None:
    """Rows that CSVLogger held in memory at the autosave are in the file, even if the state was captured earlier."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        arguments = {"log_every_n_steps": 100, "val_check_interval": 4}
        fit_logging([LogAside(), *callbacks], directory, lambda directory: CSVLogger(directory), **arguments)

    runs = run_whole_and_killed(main, tmp_path, [kill])
    path = "lightning_logs/version_0/metrics.csv"
    assert (runs.killed / path).read_bytes() == (runs.whole / path).read_bytes()


TENSORBOARD: dict[str, Loggers] = {
    "default": lambda directory: True,
    "named": lambda directory: TensorBoardLogger(directory, name="mine", sub_dir="sub"),
    "version": lambda directory: TensorBoardLogger(directory, version="mine"),
}


@pytest.mark.parametrize("kills", [[3], [8, 1]], ids=str)
@pytest.mark.parametrize("loggers", TENSORBOARD)
def test_tensorboard_continues(loggers: str, kills: list[int], tmp_path: Path) -> None:
    """There is one version, and TensorBoard shows the same as for the uninterrupted run."""
    runs = run_whole_and_killed(
        lambda *args: fit_logging(*args, TENSORBOARD[loggers]), tmp_path, kills, every_n_train_steps=2
    )
    names = files_below(runs.whole)
    assert sorted(set(files_below(runs.killed))) == names
    [events] = [name for name in names if "tfevents" in name]
    shown = scalars((runs.killed / events).parent)
    assert shown == scalars((runs.whole / events).parent)
    assert len(shown["loss_step"]) == 10
    assert (runs.killed / events).parent.joinpath("hparams.yaml").exists() or loggers == "named"


class MarkBehind(Callback):
    """Writes to TensorBoard directly, with the step that the batch has reached."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.logger.experiment.add_histogram("mark", trainer.global_step, trainer.global_step)


def test_tensorboard_loses_nothing_of_users(tmp_path: Path) -> None:
    """Data that a user has written at the step where a resume continues is not dropped."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        fit_logging([MarkBehind(), *callbacks], directory, lambda _: True)

    runs = run_whole_and_killed(main, tmp_path, [3])
    accumulator = EventAccumulator(str(runs.killed / "lightning_logs/version_0"), size_guidance={"histograms": 0})
    accumulator.Reload()
    assert [event.step for event in accumulator.Histograms("mark")] == list(range(1, 11))


def test_several_loggers_continue(tmp_path: Path) -> None:
    """Each of several loggers, some of one class, continues in its own version."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        names = [CSVLogger(directory, name="a"), TensorBoardLogger(directory, name="b"), CSVLogger(directory, name="c")]
        fit_logging(callbacks, directory, lambda _: names)

    runs = run_whole_and_killed(main, tmp_path, [7])
    assert sorted(set(files_below(runs.killed))) == files_below(runs.whole)
    for name in ("a", "c"):
        path = f"{name}/version_0/metrics.csv"
        assert (runs.killed / path).read_bytes() == (runs.whole / path).read_bytes()


@pytest.mark.usefixtures("whole_reports")
def test_logger_that_had_begun_before_the_fit(tmp_path: Path) -> None:
    """If the script logs before fit, the run continues in its version, and the report names the version begun."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        logger = CSVLogger(directory)
        logger.log_hyperparams({"seed": 5})
        logger.log_metrics({"before": 1.0}, step=0)
        fit_logging(callbacks, directory, lambda _: logger)

    runs = run_whole_and_killed(main, tmp_path, [7])
    for name in ("metrics.csv", "hparams.yaml"):
        path = f"lightning_logs/version_0/{name}"
        assert (runs.killed / path).read_bytes() == (runs.whole / path).read_bytes()
    assert "version_1 before the fit; it continues in" in runs.outputs[-1]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("fold", [0, 1])
def test_several_fits(fold: int, shares: bool, tmp_path: Path) -> None:
    """Each fit of a script continues in its own version, or in a version that the fits share."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        shared = CSVLogger(directory)
        for number in range(2):
            faults = [callback for callback in callbacks if not isinstance(callback, KillAt) or number == fold]
            logger = shared if shares else CSVLogger(directory)
            trainer = fit_logging(faults, directory, lambda _, logger=logger: logger, max_epochs=1)
            logger.log_metrics({"between": 1.0}, step=trainer.global_step)
            logger.save()

    runs = run_whole_and_killed(main, tmp_path, [2])
    names = files_below(runs.whole)
    assert names == files_below(runs.killed)
    assert len(names) == (2 if shares else 4)
    for name in names:
        assert (runs.killed / name).read_bytes() == (runs.whole / name).read_bytes(), name


CHANGES: dict[str, tuple[Loggers, Loggers, str]] = {
    "directory": (
        lambda d: CSVLogger(d / "one"),
        lambda d: CSVLogger(d / "two"),
        "two/lightning_logs; what was logged so far is in",
    ),
    "version": (lambda d: CSVLogger(d, version="1"), lambda d: CSVLogger(d, version="2"), "was given version '2'"),
    "class": (lambda d: CSVLogger(d), lambda d: TensorBoardLogger(d), "CSVLogger#0, which logged to"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_logger_is_left_alone_and_told(change: str, tmp_path: Path) -> None:
    """A different logger uses its own version, and the report says so."""
    first, then, note = CHANGES[change]
    options = {"every_n_train_steps": 1}
    run(lambda: fit_logging([FaultTolerance(**options), KillAt(2)], tmp_path, first))
    [before] = tmp_path.rglob("metrics.csv")
    rows = before.read_bytes()
    ended = run(lambda: fit_logging([FaultTolerance(**options)], tmp_path, then), seed=99)
    assert ended.exit_code == 0, ended.output
    assert note in ended.output
    assert before.read_bytes() == rows


@pytest.mark.parametrize("gone", ["metrics.csv", ""])
def test_deleted_files_are_reported(gone: str, tmp_path: Path) -> None:
    """Deleted rows are not invented: the run continues, and the report says what is missing."""
    options = {"every_n_train_steps": 1}
    run(lambda: fit_logging([FaultTolerance(**options), KillAt(2)], tmp_path, CSV["default"]))
    path = tmp_path / "lightning_logs/version_0" / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    ended = run(lambda: fit_logging([FaultTolerance(**options)], tmp_path, CSV["default"]), seed=99)
    assert ended.exit_code == 0, ended.output
    assert ("does not exist anymore" if not gone else "0 rows, but 2 were logged before the autosave") in ended.output


class PlainLogger(Logger):
    """Counts how often it is saved."""

    name, version = "plain", 0

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        return

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        return

    def save(self) -> None:
        self.asked += 1


def test_other_loggers_are_left_alone(tmp_path: Path) -> None:
    """The package calls nothing on a logger that is neither of the two."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        logger = PlainLogger()
        fit_net(callbacks, directory, logger=logger)
        (directory / "asked").write_text(str(logger.asked))

    runs = run_whole_and_killed(main, tmp_path, [])
    assert (runs.whole / "asked").read_text() == (runs.killed / "asked").read_text() != "0"


def test_nothing_is_left_on_loggers(tmp_path: Path) -> None:
    """After the fit a logger and its writer are as they are without us, except for the version."""

    def main(directory: Path, *callbacks: Callback) -> None:
        loggers = [CSVLogger(directory), TensorBoardLogger(directory, name="t")]
        fit_logging([*callbacks], directory, lambda _: loggers)
        assert vars(loggers[0].experiment).keys() == vars(CSVLogger(directory).experiment).keys()
        assert type(loggers[0].experiment) is type(CSVLogger(directory).experiment)
        assert "purge_step" not in str(vars(loggers[1]))
        assert not [key for logger in loggers for key, value in vars(logger).items() if "faulttolerant" in repr(value)]

    protected = {"every_n_train_steps": 1}
    assert run(lambda: main(tmp_path, FaultTolerance(**protected), KillAt(2))).exit_code == -signal.SIGKILL
    ended = run(lambda: main(tmp_path, FaultTolerance(**protected)), seed=99)
    assert ended.exit_code == 0, ended.output
