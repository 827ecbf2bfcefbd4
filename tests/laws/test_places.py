"""Where a run's files are: with its first start, whatever directory the next one gets; and those of other runs stay."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from syrupy.assertion import SnapshotAssertion

from tests.laws.cuts import Cut
from tests.laws.files import Knows, contents
from tests.laws.rows import Group, Net, Row
from tests.laws.runs import Training
from tests.messages import plain

pytestmark = [
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]

LOGGERS: dict[str, Callable[[str], Any]] = {
    "csv": lambda root: CSVLogger(f"{root}/logs", name="mine", version=3),
    "default": lambda root: TensorBoardLogger(root),
    "two": lambda root: [CSVLogger(root), TensorBoardLogger(root, name="board", sub_dir="sub")],
    "none": lambda root: [],
}
FIRST, SECOND = Cut(at=(0, 4), every=2), Cut(at=(1, 2), every=2)


def writing_to(root: Path, logger: str = "csv", *more: Callback, **arguments: Any) -> Group:
    """Return a training that writes to a directory."""

    def callbacks() -> list[Callback]:
        best = ModelCheckpoint(monitor="val_loss", save_top_k=2, every_n_train_steps=2, save_last=True)
        return [Knows(), best, ModelCheckpoint(f"{root}/all", save_top_k=-1, every_n_train_steps=3), *more]

    trainer = {"default_root_dir": root, "logger": lambda: LOGGERS[logger](str(root)), "val_check_interval": 2}
    trainer |= {"enable_checkpointing": True, **arguments}
    return Group(rows=(Row(name="files", callbacks=callbacks, trainer=trainer, options={"dirpath": "start-saves"}),))


def whole(root: Path, logger: str = "csv") -> dict[str, Any]:
    """Return the files of the uninterrupted run without the callback."""
    Training(group=writing_to(root / "one", logger), root=root, with_callback=False).finished()
    return contents(root)


@pytest.mark.parametrize("logger", ["csv", *(pytest.param(name, marks=pytest.mark.slow) for name in [*LOGGERS][1:])])
def test_files_stay_with_the_first_start(logger: str, tmp_path: Path) -> None:
    """A run that is killed twice leaves the uninterrupted run's files in its first directory, and none elsewhere."""
    root = tmp_path / "cut"
    training = Training(group=writing_to(root / "one", logger), root=root)
    training.start(FIRST)
    training.group = writing_to(root / "two", logger)
    training.start(SECOND)
    training.group = writing_to(root / "three", logger)
    training.finished()
    assert contents(root) == whole(tmp_path / "whole", logger)


class Fails(Callback):
    """Ends the fit before the run restores anything."""

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        raise ZeroDivisionError


def test_directories_that_do_not_continue(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A fit that fails, or is refused, before it resumes changes nothing; a removed directory is not made again."""
    training = Training(group=writing_to(tmp_path / "one"), root=tmp_path)
    training.start(FIRST)
    before = contents(tmp_path)
    two = tmp_path / "two"
    for training.group in (writing_to(two, "csv", Fails()), writing_to(two, accumulate_grad_batches=5)):
        assert training.start().codes == [1]
        assert {name: content for name, content in contents(tmp_path).items() if not name.startswith("two")} == before
    shutil.rmtree(tmp_path / "one")
    training.group = writing_to(tmp_path / "three")
    lines = plain(training.finished().output, DIR=tmp_path).splitlines()
    assert not (tmp_path / "one").exists()
    assert (tmp_path / "three/logs/mine/version_3/metrics.csv").exists()
    assert "\n".join(line for line in lines if "DIR/" in line) == snapshot


class Falling(Net):
    """Logs a score that is best in its last epoch, and worse in its second than in its first."""

    def on_train_epoch_end(self) -> None:
        self.log("score", 5.0 if self.current_epoch == 1 else -float(self.current_epoch))


def test_a_file_that_a_run_starts_from_stays(tmp_path: Path) -> None:
    """A run that starts from another run's file leaves that run's files alone, also when it is killed and resumes."""

    def training(run_id: str, **arguments: Any) -> Training:
        saving = lambda: ModelCheckpoint("files", monitor="score", save_top_k=1, filename="{epoch}")  # noqa: E731
        trainer = {"logger": lambda: CSVLogger("."), "enable_checkpointing": True, **arguments}
        row = Row(name="files", module=Falling, callbacks=saving, trainer=trainer, options={"run_id": run_id})
        return Training(group=Group(rows=(row,)), root=tmp_path)

    training("a", max_epochs=1).finished()
    before = contents(tmp_path)
    other = training("b", max_epochs=3)
    other.ckpt_path = tmp_path / "files" / "epoch=0.ckpt"
    other.start(Cut(at=(1, 3)))
    other.finished()
    after = contents(tmp_path)
    assert {name: after[name] for name in before} == before
    assert sorted(name for name in after if name.endswith(".ckpt")) == ["files/epoch=0.ckpt", "files/epoch=2.ckpt"]
    assert "lightning_logs/version_1/metrics.csv" in after
