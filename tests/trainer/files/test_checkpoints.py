"""The files that would exist without the interruption."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_faulttolerant.trainer.files.checkpoints import CheckpointFiles
from lightning_faulttolerant.trainer.patches import Patches
from tests.runs import make_trainer


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """Return a trainer whose ModelCheckpoint writes to ``tmp_path``; `old`, `now` and `aside/now` exist."""
    (tmp_path / "aside").mkdir()
    for name in ("old", "now", "aside/now"):
        (tmp_path / name).touch()
    return make_trainer([ModelCheckpoint(dirpath=tmp_path)], tmp_path, enable_checkpointing=True)


def resumed(trainer: Trainer, directory: Path, names: list[str]) -> CheckpointFiles:
    """Return the files of a run that resumed from a state in which `names` existed."""
    files = CheckpointFiles(trainer, Patches())
    files.follow()
    files.resume({"found": {str(directory): names}}, "elsewhere.ckpt")
    return files


def there(trainer: Trainer, *paths: Path) -> list[bool]:
    """Return whether the ModelCheckpoint considers each file to exist."""
    [callback] = trainer.checkpoint_callbacks
    assert isinstance(callback, ModelCheckpoint)
    return [callback.file_exists(str(path), trainer) for path in paths]


def test_what_was_there_then_is_there(trainer: Trainer, tmp_path: Path) -> None:
    """A file written since then doesn't exist, one removed since then does; a directory created since then is empty."""
    resumed(trainer, tmp_path, ["old", "gone"])
    paths = (tmp_path / "old", tmp_path / "gone", tmp_path / "now", tmp_path / "never", tmp_path / "aside/now")
    assert there(trainer, *paths) == [True, True, False, False, False]


def test_directory_that_was_not_listed_is_looked_into(trainer: Trainer, tmp_path: Path) -> None:
    """In a directory that existed but was not listed, the existing files count."""
    resumed(trainer, tmp_path, ["aside"])
    assert there(trainer, tmp_path / "aside/now", tmp_path / "aside/never") == [True, False]
    assert there(trainer, tmp_path.parent) == [True]


def test_what_this_process_removes_is_gone(trainer: Trainer, tmp_path: Path) -> None:
    """A file that existed then, and that this process removes, no longer exists."""
    files = resumed(trainer, tmp_path, ["old", "gone"])
    for name in ("old", "gone", "now"):
        trainer.strategy.remove_checkpoint(tmp_path / name)
    assert there(trainer, tmp_path / "old", tmp_path / "gone", tmp_path / "now") == [False] * 3
    assert files.state_dict()["found"] == {str(tmp_path): []}


def test_what_this_process_makes_is_there(trainer: Trainer, tmp_path: Path) -> None:
    """A link that is created again exists, although no hook reports it."""
    resumed(trainer, tmp_path, [])
    [callback] = trainer.checkpoint_callbacks
    assert isinstance(callback, ModelCheckpoint)
    callback.last_model_path = str(tmp_path / "now")
    assert there(trainer, tmp_path / "now", tmp_path / "old") == [True, False]


def test_state_is_that_of_the_uninterrupted_run(trainer: Trainer, tmp_path: Path) -> None:
    """The next autosave lists the files that would exist, not the files that the killed process has left."""
    files = resumed(trainer, tmp_path, ["old", "gone"])
    assert files.state_dict()["found"] == {str(tmp_path): ["gone", "old"]}


def test_directory_is_read_only_when_something_was_written(trainer: Trainer, tmp_path: Path) -> None:
    """A file of another process is seen at the next save or removal: boundaries don't list directories."""
    files = CheckpointFiles(trainer, Patches())
    files.follow()
    assert files.state_dict()["found"] == {str(tmp_path): ["aside", "now", "old"]}
    (tmp_path / "more").touch()
    assert files.state_dict()["found"] == {str(tmp_path): ["aside", "now", "old"]}
    trainer.strategy.remove_checkpoint(tmp_path / "old")
    assert files.state_dict()["found"] == {str(tmp_path): ["aside", "more", "now"]}
