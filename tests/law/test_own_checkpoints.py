"""A run that resumes from a file of its ModelCheckpoint also finishes the rest of the hook that wrote the file."""

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
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.kills import files_below
from tests.model_checkpoints import assert_equal_weights, at, fit_saving
from tests.processes import run

pytestmark = [
    pytest.mark.filterwarnings("ignore:Experiment logs directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]


class KillBehindSave(Callback):
    """Kills the process after `num_saves` checkpoints that are not autosaves, and records the last one's path."""

    def __init__(self, num_saves: int, note: Path) -> None:
        self.num_saves = num_saves
        self.note = note

    def on_fit_start(self, trainer: Trainer, *_: Any) -> None:
        write = trainer.save_checkpoint

        def save_checkpoint(path: Any, *args: Any) -> None:
            write(path, *args)
            self.num_saves -= 1
            if self.num_saves == 0:
                self.note.write_text(str(path))
                os.kill(os.getpid(), signal.SIGKILL)

        trainer.save_checkpoint = save_checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run that is killed right after each of these saves, before the rest of that hook."""

    make: Callable[[Path], list[ModelCheckpoint]]
    saves: tuple[int, ...] = (3, 4)
    arguments: dict[str, Any] = field(default_factory=dict)


CASES = {
    "newest, and the last": Case(
        make=lambda d: [at(d, every_n_train_steps=3, save_last=True)],
    ),
    "newest, and a link": Case(
        make=lambda d: [at(d, every_n_train_steps=3, save_last="link")],
    ),
    "best two of training": Case(
        make=lambda d: [at(d, monitor="loss", mode="max", save_top_k=2, every_n_train_steps=1, save_last=True)],
    ),
    "best two of validation": Case(
        make=lambda d: [at(d, monitor="val_loss", save_top_k=2, save_last=True)],
        arguments={"val_check_interval": 2},
    ),
    "waited for validation": Case(
        make=lambda d: [at(d, monitor="val_loss", save_top_k=2, every_n_train_steps=2, save_last=True)],
        arguments={"val_check_interval": 3},
    ),
    "end of the epoch": Case(
        make=lambda d: [at(d, every_n_epochs=1, save_on_train_epoch_end=True, save_last=True)],
        arguments={"max_epochs": 3},
    ),
    "by the clock": Case(
        make=lambda d: [at(d, train_time_interval=timedelta(0), save_last=True)],
    ),
    "two": Case(
        make=lambda d: [
            at(d, name="a", every_n_train_steps=3, save_last=True),
            at(d, name="b", monitor="loss", save_top_k=2, every_n_train_steps=2),
        ],
    ),
    "one name": Case(
        make=lambda d: [at(d, filename="m", monitor="loss", save_top_k=-1, every_n_train_steps=2, save_last=True)],
    ),
}


@pytest.mark.parametrize(("case", "num_saves"), [(case, num) for case in CASES for num in CASES[case].saves])
def test_continues_from_a_file_of_model_checkpoint(case: str, num_saves: int, tmp_path: Path) -> None:
    """ModelCheckpoint's attributes and files equal the uninterrupted run's; of old files only the named one stays."""
    saving = CASES[case]

    def main(callbacks: list[Callback], directory: Path, path: Path | None = None) -> None:
        fit_saving(callbacks, directory, saving.make(directory), ckpt_path=path, **saving.arguments)

    whole, killed, note = tmp_path / "whole", tmp_path / "killed", tmp_path / "note"
    whole.mkdir(), killed.mkdir()
    run(lambda: main([], whole))
    protected = {"every_n_train_steps": 1000, "dirpath": tmp_path / "autosaves"}
    ended = run(lambda: main([FaultTolerance(**protected), KillBehindSave(num_saves, note)], killed), seed=1)
    assert ended.exit_code == -signal.SIGKILL, ended.output
    path = Path(note.read_text())
    ended = run(lambda: main([FaultTolerance(**protected)], killed, path), seed=99)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly" in ended.output, ended.output
    assert (killed / "known.json").read_text() == (whole / "known.json").read_text()
    names = files_below(whole)
    # Lightning never removes the file from which it was told to start.
    assert files_below(killed) == sorted({*names, str(path.relative_to(killed))})
    for same in names:
        if same.endswith(".ckpt"):
            assert_equal_weights(killed / same, whole / same)


@pytest.mark.parametrize("name", ["epoch=0-step=6.ckpt", "last.ckpt"])
def test_copy_of_the_file_is_enough(name: str, tmp_path: Path) -> None:
    """If that file is a copy and the others are gone, the run writes all of them again."""

    def main(callbacks: list[Callback], directory: Path, path: Path | None = None) -> None:
        fit_saving(callbacks, directory, [at(directory, save_top_k=-1, every_n_train_steps=3, save_last=True)],
                   ckpt_path=path)  # fmt: skip

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    run(lambda: main([], whole))
    protected = {"every_n_train_steps": 1000, "dirpath": tmp_path / "autosaves"}
    run(lambda: main([FaultTolerance(**protected), KillAt(7)], killed), seed=1)
    (killed / "checkpoints" / name).rename(tmp_path / "copy.ckpt")
    for path in killed.rglob("*step=6.ckpt"):
        path.unlink()
    ended = run(lambda: main([FaultTolerance(**protected)], killed, tmp_path / "copy.ckpt"), seed=99)
    assert ended.exit_code == 0, ended.output
    assert files_below(killed) == files_below(whole)
    assert (killed / "known.json").read_text() == (whole / "known.json").read_text()


def test_file_of_the_end_of_the_fit(tmp_path: Path) -> None:
    """A file that ModelCheckpoint writes after the very last batch is known after a resume that trains no batch."""

    def main(callbacks: list[Callback], directory: Path, path: Path | None = None) -> None:
        fit_saving(callbacks, directory, [at(directory, every_n_train_steps=100, save_last=True)], ckpt_path=path)

    protected = {"every_n_train_steps": 1000, "dirpath": tmp_path / "autosaves"}
    run(lambda: main([FaultTolerance(**protected)], tmp_path))
    before = (tmp_path / "known.json").read_text()
    assert json.loads(before)[0]["_last_global_step_saved"] == 16
    ended = run(lambda: main([FaultTolerance(**protected)], tmp_path, tmp_path / "checkpoints/last.ckpt"), seed=99)
    assert "Resumed exactly" in ended.output, ended.output
    assert (tmp_path / "known.json").read_text() == before


class Own(ModelCheckpoint):
    """Runs its own code after Lightning's part."""

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        self.done = True


def test_hook_of_the_users_own_is_refused(tmp_path: Path) -> None:
    """The rest of a user's hook can't be repeated: the save reports it, and a restart resumes from an autosave.

    If there is no autosave, or if the user has them set aside, the file is refused.
    """

    def main(callbacks: list[Callback], path: Path | None = None) -> None:
        fit_saving(callbacks, tmp_path, [Own(dirpath=tmp_path, every_n_train_steps=3)], ckpt_path=path)

    protected = {"every_n_train_steps": 1000, "dirpath": tmp_path / "autosaves"}
    saved = run(lambda: main([FaultTolerance(**protected), KillAt(7)]))
    assert "the rest of Own.on_train_batch_end comes after the hook that saved" in saved.output
    ended = run(lambda: main([FaultTolerance(**protected), KillAt(3)], tmp_path / "epoch=0-step=6.ckpt"))
    assert "epoch=0-step=6.ckpt can't be resumed exactly. To start from ckpt_path" in ended.output
    assert "Resumed exactly before batch 0 of epoch 0" in ended.output
    refused = run(lambda: main([FaultTolerance(auto_resume=False, **protected)], tmp_path / "epoch=0-step=6.ckpt"))
    assert refused.exit_code == 1
    assert "NotExactError" in refused.output


@pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")
def test_files_of_a_run_that_came_to_its_end_are_left_alone(tmp_path: Path) -> None:
    """A restart from a file of a finished run gets its own version, as without us."""

    def main(callbacks: list[Callback], path: Path | None = None) -> None:
        saving = [ModelCheckpoint(save_top_k=-1, every_n_train_steps=3)]
        fit_saving(callbacks, tmp_path, saving, logger=CSVLogger(tmp_path), ckpt_path=path)

    run(lambda: main([FaultTolerance()]))
    before = {path: path.read_bytes() for path in (tmp_path / "lightning_logs").rglob("*") if path.is_file()}
    path = tmp_path / "lightning_logs/version_0/checkpoints/epoch=0-step=6.ckpt"
    ended = run(lambda: main([FaultTolerance()], path), seed=99)
    assert "Resumed exactly" in ended.output, ended.output
    assert all(path.read_bytes() == content for path, content in before.items())
    logged = (tmp_path / "lightning_logs/version_1/metrics.csv").read_text().splitlines()
    assert len(logged) == 1 + 11 + 2 * 2
    assert len(list(tmp_path.rglob("version_1/**/*.ckpt"))) == 4


def test_logger_continues_where_the_file_was_written(tmp_path: Path) -> None:
    """A killed run that resumes from its own file logs to its own version, after the rows of that file."""

    def main(callbacks: list[Callback], directory: Path, path: Path | None = None) -> None:
        saving = [ModelCheckpoint(save_top_k=-1, every_n_train_steps=3)]
        fit_saving(callbacks, directory, saving, logger=CSVLogger(directory), ckpt_path=path)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run(lambda: main([], whole))
    protected = {"every_n_train_steps": 1000, "dirpath": tmp_path / "autosaves"}
    run(lambda: main([FaultTolerance(**protected), KillAt(11)], killed))
    path = killed / "lightning_logs/version_0/checkpoints/epoch=0-step=6.ckpt"
    ended = run(lambda: main([FaultTolerance(**protected)], killed, path), seed=99)
    assert ended.exit_code == 0, ended.output
    assert files_below(killed) == files_below(whole)
    for name in ("lightning_logs/version_0/metrics.csv", "known.json"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()
