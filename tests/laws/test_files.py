"""The law for files beside a run: ModelCheckpoints and loggers leave the files of the uninterrupted run."""

from __future__ import annotations

import contextlib
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

from lightning_faulttolerant import FaultTolerance
from tests.laws.cuts import Cut
from tests.laws.files import Knows, Late, contents
from tests.laws.rows import Group, Row, rows_of
from tests.laws.runs import QUIET, Training
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


PAIRS = [(split, chain) for split in range(3) for chain in CHAINS]
ONCE = list(zip(range(3), CHAINS, strict=True))


@pytest.mark.parametrize(
    ("split", "chain"), [*ONCE, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in PAIRS if pair not in ONCE)]
)
def test_files_of_an_interrupted_run(split: int, chain: str, tmp_path: Path) -> None:
    """Names, rows, weights, links, and what ModelCheckpoints know are those of the uninterrupted run."""
    group = writing(*SPLITS[split])
    expected = whole(group, tmp_path / "whole")
    training = Training(group=group, root=tmp_path / "cut")
    for cut in CHAINS[chain]:
        assert training.start(cut).codes == [cut.exit_code], training.starts[-1].output
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


@pytest.mark.parametrize("num_saves", [3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_start_from_its_own_file(name: str, num_saves: int, tmp_path: Path) -> None:
    """A start from a file of its ModelCheckpoint finishes the hook that wrote it, and leaves the same files."""
    group, note = writing([name], ["csv"], max_epochs=3), tmp_path / "note"
    expected = whole(group, tmp_path / "whole")
    killed = Training(group=group, root=tmp_path / "killed", more=lambda: [KillAfterSave(num_saves, note)])
    assert killed.start(every_n_train_steps=1000).codes == [-signal.SIGKILL]
    path = Path(note.read_text().splitlines()[-1])
    resumed = Training(group=group, root=killed.root, ckpt_path=path)
    resumed.starts = killed.starts  # so that the next one is not the first
    start = resumed.start(every_n_train_steps=1000)
    assert start.codes == [0], start.output
    assert "Resumed exactly" in start.output
    found = contents(killed.root)
    kept = str(path.relative_to(killed.root))
    assert {name: content for name, content in found.items() if name in expected or name != kept} == expected


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "directory": (lambda: CSVLogger("one"), lambda: CSVLogger("two")),
    "version": (lambda: CSVLogger(".", version="1"), lambda: CSVLogger(".", version="2")),
    "class": (lambda: CSVLogger("."), lambda: TensorBoardLogger(".")),
    "deleted rows": (lambda: CSVLogger("."), lambda: CSVLogger(".")),
    "deleted directory": (lambda: CSVLogger("."), lambda: CSVLogger(".")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_loggers_are_told(change: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """A logger that writes elsewhere, or whose rows are gone, does not keep the run from its resume, and is told."""
    first, then = CHANGES[change]
    training = Training(group=Group(rows=(Row(name="first", trainer={"logger": first}),)), root=tmp_path / "run")
    cut = Cut(at=(0, 3))
    assert training.start(cut).codes == [cut.exit_code]
    [rows] = training.root.rglob("metrics.csv")
    before = rows.read_text()
    if change.startswith("deleted"):
        rows.unlink() if change == "deleted rows" else shutil.rmtree(rows.parent)
    training.group = Group(rows=(Row(name="then", trainer={"logger": then}),))
    output = training.finished().output
    lines = plain(output, DIR=training.root).splitlines()
    said = [line for line in lines if "Logger#0" in line or "rows" in line or "anymore" in line]
    assert "\n".join(said) == snapshot
    assert change.startswith("deleted") or rows.read_text() == before


@pytest.mark.parametrize("logger", ["none", "csv", *(pytest.param(name, marks=pytest.mark.slow) for name in LOGGERS)])
def test_files_in_the_directory_of_the_logger(logger: str, tmp_path: Path) -> None:
    """A ModelCheckpoint without a directory continues in the logger's version."""
    saving = {"monitor": "val_loss", "save_top_k": 2, "every_n_train_steps": 2, "save_last": True}
    trainer = writing([], [logger] if logger != "none" else []).rows[0].trainer
    row = Row(name="here", callbacks=lambda: [Knows(), ModelCheckpoint(**saving)], trainer=trainer)
    group = Group(rows=(row,))
    expected = whole(group, tmp_path / "whole")
    training = Training(group=group, root=tmp_path / "cut")
    for cut in CHAINS["killed"][:2]:
        training.start(cut)
    training.finished()
    assert contents(tmp_path / "cut") == expected


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
    assert training.start(Cut(at=(1, 1), every=1000)).codes == [-signal.SIGKILL]
    training.ckpt_path = training.root / "checkpoints/epoch=0-step=6.ckpt"
    assert training.start(Cut(at=(0, 3), every=1000)).codes == [-signal.SIGKILL]
    assert training.start(every_n_train_steps=1000, auto_resume=False).codes == [1]
    lines = plain("\n".join(start.output for start in training.starts), DIR=training.root).splitlines()
    assert "\n".join(line for line in lines if ("exact" in line or "Own." in line) and "self._" not in line) == snapshot


@pytest.mark.parametrize("taken", ["checkpoints/all/epoch=0-step=6.ckpt", "csv/version_0/metrics.csv"])
def test_files_of_another_run_keep_their_names(taken: str, tmp_path: Path) -> None:
    """A name that was taken before the run started is still taken after the resume."""
    group = writing(["all"], ["csv"])
    for name in ("whole", "cut"):
        (tmp_path / name / taken).parent.mkdir(parents=True)
        (tmp_path / name / taken).write_text("of another run")
        (tmp_path / name / taken).with_suffix(".txt").write_text("of another run")
    trainings = [Training(group=group, root=tmp_path / name, with_callback=name == "cut") for name in ("whole", "cut")]
    trainings[1].start(Cut(at=(1, 2), every=5))
    for training in trainings:
        training.finished()
        (training.root / taken).rename((training.root / taken).with_suffix(".txt"))
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


class RaisesAt(Callback):
    """Ends a fit with an error."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch:
            raise ZeroDivisionError


def test_nothing_is_left_on_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a resumed fit, loggers and their writers are as they are without us."""
    monkeypatch.chdir(tmp_path)
    for faults in ([RaisesAt(3)], []):
        loggers = [CSVLogger("a"), TensorBoardLogger("b")]
        trainer = Trainer(
            logger=loggers, callbacks=[FaultTolerance(every_n_train_steps=1), *faults], max_epochs=1, **QUIET
        )  # fmt: skip
        with pytest.raises(ZeroDivisionError) if faults else contextlib.nullcontext():
            trainer.fit(Late(), rows_of(24)(), rows_of(8, shuffle=False)())
    assert vars(loggers[0].experiment).keys() == vars(CSVLogger("a").experiment).keys()
    assert not [key for each in loggers for key, value in vars(each).items() if "faulttolerant" in repr(value)]
