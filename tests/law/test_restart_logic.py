"""If a script's own restart logic passes a checkpoint of its run as ``ckpt_path``, the furthest one wins."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_faulttolerant.checkpoint.schema import KEY, MARK
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.damage import change_a_weight, cut_file
from tests.processes import Ended, run
from tests.runs import fit_net
from tests.scripts import autosaves, protected, tell, told, weights

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning"),
]

ONCE = "pass FaultTolerance(auto_resume=False) once"


def saving(directory: Path) -> ModelCheckpoint:
    """Return a ModelCheckpoint that saves at each second step, under names that ``"last"`` does not find."""
    return ModelCheckpoint(directory / "checkpoints", filename="{step}", every_n_train_steps=2, save_top_k=-1)


def at_step(directory: Path, step: int) -> Path:
    """Return the file of a step."""
    return directory / "checkpoints" / f"step={step}.ckpt"


def newest(directory: Path) -> Path | None:
    """Return the file that a script's restart logic finds."""
    found = sorted((directory / "checkpoints").glob("*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))
    return found[-1] if found else None


def train(directory: Path, path: Path | None, *faults: Callback, **options: Any) -> None:
    """Fit from a checkpoint, and record the weights."""
    callbacks = [protected(**options), saving(directory), *faults]
    trainer = fit_net(callbacks, directory, enable_checkpointing=True, ckpt_path=path)
    tell(directory, "weights", weights(trainer))


def killed(directory: Path, path: Path | None, kill: int, **options: Any) -> None:
    """Run `train` until it is killed at a batch."""
    ended = run(lambda: train(directory, path, KillAt(kill), **options))
    assert ended.exit_code == -signal.SIGKILL, ended.output
    assert "superseded" not in ended.output


def restarted(directory: Path, path: Path | None, **options: Any) -> Ended:
    """Run `train` to its end, with another seed."""
    ended = run(lambda: train(directory, path, **options), seed=99)
    assert ended.exit_code == 0, ended.output
    return ended


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the weights of the uninterrupted run."""
    directory = tmp_path_factory.mktemp("whole")
    assert run(lambda: train(directory, None)).exit_code == 0
    return told(directory, "weights")


@pytest.mark.parametrize(
    ("interval", "expected", "line"),
    [(1, "before batch 3", f"step=2.ckpt is not further. To start from ckpt_path anyway, {ONCE}"),
     (100, "after the step of batch 1", "step=2.ckpt, which is further than")],
)  # fmt: skip
def test_the_furthest_wins(interval: int, expected: str, line: str, whole: Any, tmp_path: Path) -> None:
    """The autosave or the script's file of this run wins, whichever is further: the log says which, and why."""
    killed(tmp_path, newest(tmp_path), 3, every_n_train_steps=interval)
    assert newest(tmp_path) == at_step(tmp_path, 2)
    ended = restarted(tmp_path, newest(tmp_path), every_n_train_steps=interval)
    assert f"Resumed exactly {expected} of epoch 0" in ended.output
    assert line in ended.output
    assert "superseded" not in ended.output
    assert told(tmp_path, "weights") == whole


def test_killed_again_and_again(whole: Any, tmp_path: Path) -> None:
    """The furthest wins at each start: a file, then an autosave after it, then a later file."""
    killed(tmp_path, newest(tmp_path), 3, every_n_train_steps=100)
    killed(tmp_path, newest(tmp_path), 2, every_n_train_steps=1)
    killed(tmp_path, newest(tmp_path), 1, every_n_train_steps=100)
    ended = restarted(tmp_path, newest(tmp_path))
    assert "superseded" not in ended.output
    assert told(tmp_path, "weights") == whole


def test_going_back_takes_one_start(whole: Any, tmp_path: Path) -> None:
    """A restart from an earlier file of the run works as the log says, and a kill then continues from there."""
    killed(tmp_path, None, 8)
    killed(tmp_path, at_step(tmp_path, 4), 1, auto_resume=False)
    ended = restarted(tmp_path, at_step(tmp_path, 4))
    assert "Resumed exactly before batch 0 of epoch 1" in ended.output
    assert told(tmp_path, "weights") == whole


def test_one_of_another_run_wins(tmp_path: Path) -> None:
    """A file with another run's mark wins, however far our autosaves are."""
    for name in ("one", "other"):
        killed(tmp_path / name, None, 3)
    ended = restarted(tmp_path / "one", at_step(tmp_path / "other", 2))
    assert "superseded" in ended.output
    assert "Resumed exactly after the step of batch 1" in ended.output


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended:UserWarning")
def test_one_without_our_part_wins(tmp_path: Path) -> None:
    """A file without our part also wins, even among the files of this run."""
    killed(tmp_path, None, 3)
    path = at_step(tmp_path, 2)
    content = torch.load(path, weights_only=True)
    del content[KEY]
    torch.save(content, path)
    ended = run(lambda: train(tmp_path, path, strict=False))
    assert "superseded" in ended.output
    assert "the checkpoint was saved without lightning_faulttolerant" in ended.output


def test_run_that_was_started_from_a_pretrained_model(tmp_path: Path) -> None:
    """The run's own files are candidates, and its pretrained model leads to the autosaves, as before."""
    killed(tmp_path / "pretraining", None, 3)
    pretrained, run_directory = at_step(tmp_path / "pretraining", 2), tmp_path / "run"
    restarted(tmp_path / "whole", pretrained)
    killed(run_directory, pretrained, 3, every_n_train_steps=100)
    path = newest(run_directory)
    assert path is not None
    marks = [torch.load(file, weights_only=True)[KEY][MARK] for file in (pretrained, path)]
    assert marks[0] != marks[1]
    killed(run_directory, path, 1, every_n_train_steps=1)
    ended = restarted(run_directory, pretrained)
    assert "superseded" not in ended.output
    assert "Resumed exactly before batch 0 of epoch 1" in ended.output
    assert told(run_directory, "weights") == told(tmp_path / "whole", "weights")


def test_damaged_file_of_the_run_leads_to_the_autosave(whole: Any, tmp_path: Path) -> None:
    """A file that claims to be of this run but does not verify does not keep the run from its autosave."""
    killed(tmp_path, None, 3, every_n_train_steps=100)
    change_a_weight(at_step(tmp_path, 2))
    ended = restarted(tmp_path, newest(tmp_path))
    assert "step=2.ckpt can't be used" in ended.output
    assert ONCE in ended.output
    assert told(tmp_path, "weights") == whole


def test_file_that_nobody_can_read_is_an_error(tmp_path: Path) -> None:
    """A file that can't be read is an error from Lightning, since its run is unknown; the autosaves stay."""
    killed(tmp_path, None, 3)
    cut_file(at_step(tmp_path, 2))
    ended = run(lambda: train(tmp_path, at_step(tmp_path, 2)))
    assert ended.exit_code == 1
    assert autosaves(tmp_path) != []
