"""Scripts that copy a trainer's callbacks during a fit: the copies behave as without us, and train separately."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.ledgers import with_ledger
from tests.runs import fit_net


class Probe(Callback):
    """Trains another model with copies of the trainer's callbacks, once, in the middle of an epoch."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 7:
            return
        copies = [
            each for each in copy.deepcopy(trainer.callbacks) if isinstance(each, ModelCheckpoint | FaultTolerance)
        ]
        for number, copied in enumerate(each for each in copies if isinstance(each, ModelCheckpoint)):
            copied.dirpath = str(self.directory / f"copy-{number}")
        fit_net(copies, self.directory / "copied", enable_checkpointing=True, max_epochs=1)


def fit_copying(callbacks: list[Callback], directory: Path) -> Trainer:
    """Fit with a ModelCheckpoint, and with copies of it and of our callback in the middle."""
    saving = ModelCheckpoint(directory / "own", every_n_train_steps=2, save_top_k=-1)
    return fit_net([saving, *callbacks, Probe(directory)], directory, enable_checkpointing=True)


def test_copies_train_on_their_own() -> None:
    """A fit with copies of the callbacks inside a hook changes nothing in the outer fit, wherever that is cut."""
    costs = assert_resumes_exactly(fit_copying, [KillAt(3), KillAt(5)], options={"every_n_train_steps": 1})
    assert [(cost.epoch, cost.batch) for cost in costs] == [(0, 3), (1, 3)]


def test_copied_checkpoint_saves_in_its_own_name(tmp_path: Path) -> None:
    """A copied ModelCheckpoint knows the files that it wrote, and the original does not."""
    found: list[ModelCheckpoint] = []

    class Copies(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            found[:] = [copy.deepcopy(trainer.checkpoint_callbacks[0])]

    saving = ModelCheckpoint(tmp_path / "own", every_n_train_steps=4)
    fit_net([saving, FaultTolerance(), Copies()], tmp_path, enable_checkpointing=True)
    [copied] = found
    copied.dirpath = str(tmp_path / "copy")
    fit_net([copied], tmp_path / "again", enable_checkpointing=True)
    assert Path(copied.best_model_path).parent == tmp_path / "copy"
    assert Path(saving.best_model_path).parent == tmp_path / "own"
    assert len(list((tmp_path / "own").iterdir())) == 1


def test_copy_of_ours_has_its_arguments_and_no_fit(tmp_path: Path) -> None:
    """A copy that is created during a fit works in another trainer, and knows nothing of the fit."""
    copies: list[FaultTolerance] = []

    class Copies(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            copies[:] = [each for each in copy.deepcopy(trainer.callbacks) if isinstance(each, FaultTolerance)]

    ours = with_ledger(tmp_path / "ledger.jsonl", tmp_path / "saves", run_id="copied")
    fit_net([ours, Copies()], tmp_path, max_epochs=1)
    [copied] = copies
    assert vars(copied).keys() == vars(FaultTolerance()).keys()
    assert copied._session is copied._ledger is copied.log is None
    assert copied._options.run_id == "copied"
