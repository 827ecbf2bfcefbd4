"""ModelCheckpoints continue after a resume as if uninterrupted: their attributes and their files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, model_checkpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.files import compat as files
from lightning_faulttolerant.trainer.files.compat import model_checkpoint_state
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.callbacks import Clock
from tests.kills import Runs, files_below, run_whole_and_killed
from tests.model_checkpoints import assert_equal_weights, at, fit_saving
from tests.processes import run

pytestmark = [
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:`ModelCheckpoint.monitor='loss'.* could not find:UserWarning"),
]


def assert_same(runs: Runs, num_files: int | None = None) -> None:
    """Check that both runs have the same files, links, attributes, and weights."""
    names = [name for name in files_below(runs.whole) if "tfevents" not in name]
    assert [name for name in files_below(runs.killed) if "tfevents" not in name] == names
    assert (runs.killed / "known.json").read_text() == (runs.whole / "known.json").read_text()
    checkpoints = [name for name in names if name.endswith(".ckpt")]
    assert len(checkpoints) == num_files or num_files is None, checkpoints
    for name in checkpoints:
        killed, whole = runs.killed / name, runs.whole / name
        assert killed.is_symlink() == whole.is_symlink()
        if whole.is_symlink():
            assert os.readlink(killed) == os.readlink(whole)
        else:
            assert_equal_weights(killed, whole)


@dataclass(frozen=True, kw_only=True, slots=True)
class Saving:
    """ModelCheckpoints and the number of files they write; `kills` are right after a save and between two."""

    make: Callable[[Path], list[ModelCheckpoint]]
    num_files: int
    kills: tuple[int, ...] = (6, 5)
    every: int = 2
    arguments: dict[str, Any] = field(default_factory=dict)


SAVINGS = {
    "best two": Saving(
        make=lambda d: [at(d, monitor="val_loss", save_top_k=2)], num_files=2, arguments={"val_check_interval": 2}
    ),
    "best two, of training": Saving(
        make=lambda d: [at(d, monitor="loss", save_top_k=2, every_n_train_steps=2, mode="max")], num_files=2
    ),
    "all, and the last": Saving(
        make=lambda d: [at(d, save_top_k=-1, save_last=True, every_n_train_steps=3)], num_files=6
    ),
    "link": Saving(make=lambda d: [at(d, save_last="link", every_n_train_steps=3, save_top_k=1)], num_files=2),
    "one name": Saving(
        make=lambda d: [at(d, save_top_k=-1, filename="model", every_n_train_steps=2, monitor="loss")], num_files=8
    ),
    "slash": Saving(
        make=lambda d: [at(d, save_top_k=-1, filename="{step}/{loss:.0f}", every_n_train_steps=3, monitor="loss")],
        num_files=5,
        every=5,
    ),
    "every epoch": Saving(
        make=lambda d: [at(d, every_n_epochs=1, save_on_train_epoch_end=True, save_top_k=-1, save_last=True)],
        num_files=3,
        kills=(9, 3),
        every=3,
    ),
    "two": Saving(
        make=lambda d: [
            at(d, monitor="val_loss", save_top_k=2, save_last=True),
            at(d, save_top_k=-1, every_n_train_steps=3, save_last="link"),
        ],
        num_files=9,
        arguments={"val_check_interval": 2},
    ),
}


@pytest.mark.parametrize("saving", SAVINGS)
def test_model_checkpoint_continues(saving: str, tmp_path: Path) -> None:
    """Killed after a save and killed again, the run has the uninterrupted run's files and attributes."""
    case = SAVINGS[saving]

    def main(callbacks: list[Callback], directory: Path) -> None:
        fit_saving(callbacks, directory, case.make(directory), **case.arguments)

    runs = run_whole_and_killed(main, tmp_path, case.kills, every_n_train_steps=case.every)
    assert_same(runs, case.num_files)


@pytest.mark.parametrize("kill", range(1, 16, 2))
def test_killed_anywhere(kill: int, tmp_path: Path) -> None:
    """The same holds wherever the run is killed between two autosaves."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        both = [
            at(directory, name="a", monitor="val_loss", save_top_k=2, save_last=True),
            at(
                directory,
                name="b",
                filename="m",
                every_n_train_steps=3,
                save_last="link",
                save_top_k=-1,
                monitor="loss",
            ),
        ]
        fit_saving(callbacks, directory, both, val_check_interval=2)

    assert_same(run_whole_and_killed(main, tmp_path, [kill], every_n_train_steps=7))


@pytest.mark.parametrize("kills", [[12, 1], [13, 3, 1]], ids=str)
def test_killed_before_it_has_written_again(kills: list[int], tmp_path: Path) -> None:
    """Leftover files of the first process are still known as such in the third; links count as files."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        both = [
            at(directory, filename="m", every_n_train_steps=3, save_top_k=-1, monitor="loss", save_last="link"),
            at(directory, filename="m", every_n_epochs=1, save_top_k=-1, monitor="val_loss", save_last="link"),
        ]
        fit_saving(callbacks, directory, both, val_check_interval=2)

    assert_same(run_whole_and_killed(main, tmp_path, kills, every_n_train_steps=7))


class OwnState(ModelCheckpoint):
    """Has another state than Lightning's class."""

    given: Any = None

    def state_dict(self) -> Any:
        return self.given

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == self.given


@pytest.mark.parametrize("given", [{}, None, {"mine": 1}], ids=str)
def test_subclass_with_its_own_state(given: Any, tmp_path: Path) -> None:
    """Whatever state a subclass returns, Lightning's part of its attributes continues."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        saving = OwnState(directory / "own", monitor="val_loss", save_top_k=2, save_last=True, every_n_train_steps=2)
        saving.given = given
        fit_saving(callbacks, directory, [saving], val_check_interval=2)

    assert_same(run_whole_and_killed(main, tmp_path, [6, 5], every_n_train_steps=2), 3)


LOGGERS: dict[str, Callable[[Path], Any]] = {
    "default": lambda directory: True,
    "named": lambda directory: TensorBoardLogger(directory, name="mine", version="first"),
    "csv": lambda directory: CSVLogger(directory, name="mine"),
    "none": lambda directory: False,
}


@pytest.mark.parametrize("logger", LOGGERS)
def test_directory_of_the_logger(logger: str, tmp_path: Path) -> None:
    """Without a dirpath it continues in the logger's version."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        saving = [ModelCheckpoint(monitor="val_loss", save_top_k=2, every_n_train_steps=2, save_last=True)]
        fit_saving(callbacks, directory, saving, logger=LOGGERS[logger](directory), val_check_interval=2)

    assert_same(run_whole_and_killed(main, tmp_path, [6, 5], every_n_train_steps=2), 3)


def test_default_callback_of_the_trainer(tmp_path: Path) -> None:
    """The ModelCheckpoint that Lightning adds itself continues in the default logger's version."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        fit_saving(callbacks, directory, [], logger=True)

    assert_same(run_whole_and_killed(main, tmp_path, [6, 5], every_n_train_steps=2), 1)


@pytest.mark.parametrize("hook", ["end", "validation"])
def test_stopped_by_a_signal(hook: str, tmp_path: Path) -> None:
    """The same holds for a stop, even in a validation run, where the state was captured earlier."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        saving = [at(directory, monitor="val_loss", save_top_k=2, save_last=True, every_n_train_steps=2)]
        fit_saving(callbacks, directory, saving, val_check_interval=2)

    stop = KillAt(5, signum=signal.SIGTERM, hook=hook)
    assert_same(run_whole_and_killed(main, tmp_path, [stop], every_n_train_steps=4), 3)


def test_files_of_another_run_keep_their_names(tmp_path: Path) -> None:
    """A name that was taken before the run started is still taken after the resume."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        (directory / "checkpoints").mkdir(exist_ok=True)
        (directory / "checkpoints/epoch=0-step=6.ckpt").write_bytes(b"of another run")
        fit_saving(callbacks, directory, [at(directory, save_top_k=-1, every_n_train_steps=3)])

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    run(lambda: main([], whole))
    protected = {"every_n_train_steps": 5, "dirpath": tmp_path}
    run(lambda: main([FaultTolerance(**protected), KillAt(8)], killed))
    ended = run(lambda: main([FaultTolerance(**protected)], killed), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "checkpoints/epoch=0-step=6-v1.ckpt" in files_below(whole)
    assert files_below(killed) == files_below(whole)
    assert (killed / "checkpoints/epoch=0-step=6.ckpt").read_bytes() == b"of another run"
    assert (killed / "known.json").read_text() == (whole / "known.json").read_text()


@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_moved_run_knows_its_best(tmp_path: Path) -> None:
    """If the logger's directory has changed, the best files so far are still known, under their old paths."""

    def main(directory: Path, *callbacks: Callback) -> None:
        saving = [ModelCheckpoint(monitor="val_loss", save_top_k=-1, every_n_train_steps=2)]
        fit_saving([*callbacks], tmp_path, saving, logger=CSVLogger(directory), val_check_interval=2)

    protected = {"every_n_train_steps": 1, "dirpath": tmp_path / "autosaves"}
    run(lambda: main(tmp_path / "one", FaultTolerance(**protected), KillAt(14)))
    ended = run(lambda: main(tmp_path / "two", FaultTolerance(**protected)), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "what was logged so far is in" in ended.output
    [found] = json.loads((tmp_path / "known.json").read_text())
    assert len(found["best_k_models"]) == 8


class Told(ModelCheckpoint):
    """Records at each batch the time since its last save, on a clock on which a batch takes a second."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        model_checkpoint.time = files.time = Clock()
        super().on_train_start(trainer, module)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        files.time.pass_seconds(1)
        with open(Path(trainer.default_root_dir) / "seconds", "a") as file:
            file.write(f"{model_checkpoint_state(self)['seconds']}\n")
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)


def test_elapsed_time_continues(tmp_path: Path) -> None:
    """The time since the last save continues after a resume."""

    def main(*callbacks: Callback) -> None:
        fit_saving([*callbacks], tmp_path, [Told(dirpath=tmp_path, train_time_interval=timedelta(hours=1))])

    run(lambda: main(FaultTolerance(every_n_train_steps=1), KillAt(4)))
    ended = run(lambda: main(FaultTolerance(every_n_train_steps=1)), seed=99)
    assert ended.exit_code == 0, ended.output
    seconds = [float(line) for line in (tmp_path / "seconds").read_text().split()]
    assert seconds == list(range(1, 17))
