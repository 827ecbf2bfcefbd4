"""The law for files beside a run: ModelCheckpoints and loggers leave the files of the uninterrupted run.

They are with its first start, whatever directory the next one gets; and those of other runs stay.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from syrupy.assertion import SnapshotAssertion

from tests.laws.cuts import Cut, ends_in
from tests.laws.files import Knows, Late, contents
from tests.laws.rows import Group, Row
from tests.laws.runs import Training
from tests.messages import plain

pytestmark = [
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*could not find the monitored key"),
    pytest.mark.filterwarnings("ignore:.ModelCheckpoint.monitor='loss'.* could not find"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
]

# A name, which is also the directory, and the arguments of a ModelCheckpoint.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "best": {"monitor": "val_loss", "save_top_k": 2},
    "of training": {"monitor": "loss", "save_top_k": 2, "every_n_train_steps": 2, "mode": "max"},
    "all": {"save_top_k": -1, "save_last": True, "every_n_train_steps": 3},
    "link": {"save_last": "link", "every_n_train_steps": 3, "save_top_k": 1},
    "one name": {"save_top_k": -1, "filename": "model", "every_n_train_steps": 2, "monitor": "loss"},
    "slash": {"save_top_k": -1, "filename": "{step}/{loss:.0f}", "every_n_train_steps": 3, "monitor": "loss"},
    "epochs": {"every_n_epochs": 1, "save_on_train_epoch_end": True, "save_top_k": -1, "save_last": True},
    "waits": {"monitor": "val_loss", "save_top_k": 2, "every_n_train_steps": 2, "save_last": True},
    "clock": {"train_time_interval": timedelta(0), "save_last": True},
}
LOGGERS: dict[str, Callable[[], Any]] = {
    "default": lambda: TensorBoardLogger("."),
    "csv": lambda: CSVLogger(".", name="csv"),
    "kept in memory": lambda: CSVLogger(".", name="memory", prefix="p", flush_logs_every_n_steps=1000),
    "without a name": lambda: CSVLogger("nameless", name=None),
    "version": lambda: CSVLogger(".", name="third", version=3),
    "text": lambda: CSVLogger(".", name="text", version="mine"),
    "tensorboard": lambda: TensorBoardLogger(".", name="tensorboard", sub_dir="sub", version="mine"),
}


class LogsAside(Callback):
    """Logs directly to the loggers, which Lightning does not flush then."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"aside": float(batch_idx)}, step=trainer.global_step)


def writing(names: list[str], loggers: list[str], **arguments: Any) -> Group:
    """Return a training with these ModelCheckpoints and loggers, which validates three times in an epoch."""

    def callbacks() -> list[Callback]:
        saving = [ModelCheckpoint(dirpath=f"checkpoints/{name}", **CHECKPOINTS[name]) for name in names]
        return [Knows(), LogsAside(), *saving]

    logger = lambda: [LOGGERS[name]() for name in loggers]  # noqa: E731
    settings = {"enable_checkpointing": True, "val_check_interval": 2, "logger": logger, **arguments}
    return Group(rows=(Row(name="files", module=Late, callbacks=callbacks, trainer=settings),))


def whole(group: Group, root: Path) -> dict[str, Any]:
    """Return the files of the uninterrupted run without the callback."""
    training = Training(group=group, root=root, with_callback=False)
    training.finished()
    return contents(root)


SPLITS = [
    (["best", "of training", "all"], ["default", "csv"]),
    (["one name", "slash", "epochs"], ["kept in memory", "without a name", "version"]),
    (["link", "waits", "clock"], ["text", "tensorboard"]),
]
CHAINS = {
    "killed": [Cut(at=(0, 3), every=2), Cut(at=(1, 1), hook="step", every=4), Cut(at=(1, 4), every=7)],
    "stopped": [
        Cut(at=(0, 2), hook="validation", by=signal.SIGTERM, every=4),
        Cut(at=(1, 3), by=signal.SIGTERM, every=7),
    ],
    "before another save": [Cut(at=(1, 4), every=5), Cut(at=(1, 4), every=9), Cut(at=(1, 4), hook="backward", every=9)],
}


@pytest.mark.parametrize(("split", "chain"), list(zip(range(3), CHAINS, strict=True)))
def test_files_of_an_interrupted_run(split: int, chain: str, tmp_path: Path) -> None:
    """Names, rows, weights, links, and what ModelCheckpoints know are those of the uninterrupted run."""
    group = writing(*SPLITS[split])
    expected = whole(group, tmp_path / "whole")
    training = Training(group=group, root=tmp_path / "cut")
    for cut in CHAINS[chain]:
        training.ended(cut)
    training.finished()
    assert contents(tmp_path / "cut") == expected


class KillAfterSave(Callback):
    """Kills the process right after a save of a ModelCheckpoint, before the rest of its hook; notes the path."""

    def __init__(self, num_saves: int, note: Path) -> None:
        self.num_saves, self.note = num_saves, note

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        write = trainer.save_checkpoint

        def save_checkpoint(path: Any, *arguments: Any) -> None:
            write(path, *arguments)
            saved = [*(self.note.read_text().splitlines() if self.note.exists() else []), str(path)]
            self.note.write_text("\n".join(saved))  # not an attribute, which would be state of the run
            if len(saved) == self.num_saves:
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


QUICK = ("all", "one name", "waits")


@pytest.mark.parametrize("name", [pytest.param(e, marks=[pytest.mark.slow] * (e not in QUICK)) for e in CHECKPOINTS])
def test_start_from_its_own_file(name: str, tmp_path: Path) -> None:
    """A start from a file of its ModelCheckpoint finishes the hook that wrote it, and leaves the same files."""
    group, note = writing([name], ["csv"], max_epochs=3), tmp_path / "note"
    expected = whole(group, tmp_path / "whole")
    killed = Training(group=group, root=tmp_path / "killed", more=lambda: [KillAfterSave(3, note)])
    killed.ended(code=-signal.SIGKILL, every_n_train_steps=1000)
    path = Path(note.read_text().splitlines()[-1])
    resumed = Training(group=group, root=killed.root, ckpt_path=path)
    resumed.starts = killed.starts  # so that the next one is not the first
    start = resumed.ended(every_n_train_steps=1000)
    assert "Resumed exactly" in start.output
    found = contents(killed.root)
    kept = str(path.relative_to(killed.root))
    assert {name: content for name, content in found.items() if name in expected or name != kept} == expected


class Own(ModelCheckpoint):
    """Runs its own code after Lightning's part."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.done = True


def test_own_hook_of_a_model_checkpoint(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """The rest of a user's hook can't be repeated: a start resumes from an autosave instead, or refuses the file."""
    arguments = {"enable_checkpointing": True}
    row = Row(name="own", callbacks=lambda: Own(dirpath="checkpoints", every_n_train_steps=3), trainer=arguments)
    training = Training(group=Group(rows=(row,)), root=tmp_path / "run")
    training.ended(Cut(at=(1, 1), every=1000))
    training.ckpt_path = training.root / "checkpoints/epoch=0-step=6.ckpt"
    training.ended(Cut(at=(0, 3), every=1000))
    training.ended(code=1, every_n_train_steps=1000, auto_resume=False)
    lines = plain("\n".join(start.output for start in training.starts), DIR=training.root).splitlines()
    assert "\n".join(line for line in lines if ("exact" in line or "Own." in line) and "self._" not in line) == snapshot


# Places.

ELSEWHERE: dict[str, Callable[[str], Any]] = {
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

    trainer = {"default_root_dir": root, "logger": lambda: ELSEWHERE[logger](str(root)), "val_check_interval": 2}
    trainer |= {"enable_checkpointing": True, **arguments}
    return Group(rows=(Row(name="files", callbacks=callbacks, trainer=trainer, options={"dirpath": "start-saves"}),))


@pytest.mark.parametrize("logger", ["csv", *(pytest.param(name, marks=pytest.mark.slow) for name in [*ELSEWHERE][1:])])
def test_files_stay_with_the_first_start(logger: str, tmp_path: Path) -> None:
    """A run that is killed twice leaves the uninterrupted run's files in its first directory, and none elsewhere."""
    root = tmp_path / "cut"
    training = Training(group=writing_to(root / "one", logger), root=root)
    training.start(FIRST)
    training.group = writing_to(root / "two", logger)
    training.start(SECOND)
    training.group = writing_to(root / "three", logger)
    training.finished()
    assert contents(root) == whole(writing_to(tmp_path / "whole" / "one", logger), tmp_path / "whole")


def test_directories_that_do_not_continue(tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A fit that fails, or is refused, before it resumes changes nothing; a removed directory is not made again."""
    training = Training(group=writing_to(tmp_path / "one"), root=tmp_path)
    training.start(FIRST)
    before = contents(tmp_path)
    two = tmp_path / "two"
    for training.group in (
        writing_to(two, "csv", ends_in("on_fit_start", 0)),
        writing_to(two, accumulate_grad_batches=5),
    ):
        training.ended(code=1)
        assert {name: content for name, content in contents(tmp_path).items() if not name.startswith("two")} == before
    shutil.rmtree(tmp_path / "one")
    training.group = writing_to(tmp_path / "three")
    lines = plain(training.finished().output, DIR=tmp_path).splitlines()
    assert not (tmp_path / "one").exists()
    assert (tmp_path / "three/logs/mine/version_3/metrics.csv").exists()
    assert "\n".join(line for line in lines if "DIR/" in line) == snapshot
