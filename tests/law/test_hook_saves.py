"""A checkpoint that other code saves in a hook can be resumed from, bit for bit."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset, Stream, Unsized
from tests.hook_saves import SavingCheckpoint, assert_continues_from, saver, saving_module
from tests.modules import TwoValidations
from tests.processes import run
from tests.runs import Fetches, Net, TwoLoaders, eight_batches, fit_net
from tests.scripts import autosaves, protected, tell, told, weights

# The hook, and the number of the call that saves; an epoch has 5 batches and 2 validation batches.
CALLS = [
    ("on_train_batch_start", 0),
    ("on_train_batch_start", 7),
    ("on_before_optimizer_step", 3),
    ("on_train_batch_end", 0),
    ("on_train_batch_end", 2),
    ("on_train_batch_end", 4),
    ("on_train_batch_end", 9),
    ("on_train_epoch_start", 0),
    ("on_train_epoch_start", 1),
    ("on_train_epoch_end", 0),
    ("on_train_epoch_end", 1),
    ("on_validation_start", 0),
    ("on_validation_batch_end", 1),
    ("on_validation_end", 0),
    ("on_validation_end", 1),
]
each_call = pytest.mark.parametrize(("hook", "at"), CALLS, ids=[f"{hook}-{at}" for hook, at in CALLS])


@each_call
def test_saved_by_a_callback(hook: str, at: int) -> None:
    """After a save in any hook of a callback, the resumed run equals the rest of the uninterrupted one."""
    assert_continues_from(hook, users=lambda: [saver(hook, at)])


@pytest.mark.parametrize(("hook", "at"), [call for call in CALLS if call[1] not in (0, 1)] + [CALLS[9], CALLS[13]])
def test_saved_by_the_module(hook: str, at: int) -> None:
    """The module may save in its own hooks."""
    assert_continues_from(hook, module=lambda: saving_module(hook, at))


@pytest.mark.parametrize(("hook", "at"), [("on_train_batch_end", 4), ("on_train_epoch_end", 0)])
def test_saved_by_a_callback_that_derives_from_checkpoint(hook: str, at: int) -> None:
    """A callback that derives from ``Checkpoint``, which Lightning calls last, may save."""
    assert_continues_from(hook, users=lambda: [saver(hook, at, kind=SavingCheckpoint)], enable_checkpointing=True)


def two_lengths() -> dict[str, Any]:
    """Return loaders of 8 and 3 batches."""
    return {
        "long": DataLoader(NoisyDataset(), batch_size=4, shuffle=True),
        "short": DataLoader(NoisyDataset(12), batch_size=4, shuffle=True),
    }


def long(**arguments: Any) -> Any:
    """Return a function that creates a shuffled loader of 8 batches."""
    return lambda: DataLoader(NoisyDataset(), batch_size=4, shuffle=True, **arguments)


# A function that creates the loaders, the module, and the number of steps in an epoch.
LOADERS: dict[str, tuple[Any, Any, int]] = {
    "workers": (long(num_workers=2), Net, 8),
    "persistent workers": (long(num_workers=2, persistent_workers=True), Net, 8),
    "without a length": (lambda: Unsized(NoisyDataset(), batch_size=4, shuffle=True), Net, 8),
    "iterable": (lambda: DataLoader(Stream(), batch_size=4), Net, 8),
    "iterable with workers": (lambda: DataLoader(Stream(), batch_size=4, num_workers=2), Net, 8),
    "cycled": (two_lengths, TwoLoaders, 8),
    "up to the longest": (lambda: CombinedLoader(two_lengths(), "max_size"), TwoLoaders, 8),
    "cut to the shortest": (lambda: CombinedLoader(two_lengths(), "min_size"), TwoLoaders, 3),
    "fetched by the step": (long(), Fetches, 8),
    "two fetched by a step": (long(num_workers=2), lambda: Fetches(2), 4),
}


@pytest.mark.filterwarnings("ignore:Trying to infer the .batch_size.")
@pytest.mark.filterwarnings("ignore:.*dataloader_iter")
@pytest.mark.parametrize("place", ["last of an epoch", "within an epoch", "last of all"])
@pytest.mark.parametrize("name", LOADERS)
def test_with_each_kind_of_loader_the_next_epoch_has_all_its_batches(name: str, place: str) -> None:
    """A save after an epoch's last batch, in its middle, or after the last batch of all loses no batch."""
    train, module, num_steps = LOADERS[name]
    at = {"last of an epoch": num_steps - 1, "within an epoch": num_steps + 1, "last of all": 2 * num_steps - 1}[place]
    assert_continues_from(
        "on_train_batch_end",
        users=lambda: [saver("on_train_batch_end", at)],
        train=train,
        module=module,
        max_epochs=2 if place == "last of all" else 3,
    )


INTERVALS: list[dict[str, Any]] = [
    {"val_check_interval": 0.5},
    {"val_check_interval": 3},
    {"val_check_interval": 5, "check_val_every_n_epoch": None},
    {"check_val_every_n_epoch": 2},
]


@pytest.mark.parametrize("arguments", INTERVALS, ids=str)
@pytest.mark.parametrize(
    ("hook", "at"), [("on_train_batch_end", 9), ("on_train_batch_end", 11), ("on_validation_batch_end", 3)]
)
def test_a_validation_run_that_was_due_has_its_results_once(hook: str, at: int, arguments: dict[str, Any]) -> None:
    """Whether a validation run was due, in progress, or finished, its results come once, and are correct."""
    epochs = {"max_epochs": 4} if "check_val_every_n_epoch" in arguments else {}
    assert_continues_from(hook, users=lambda: [saver(hook, at)], train=eight_batches, **arguments, **epochs)


@pytest.mark.filterwarnings("ignore:Your .val_dataloader.*shuffling")
@pytest.mark.parametrize(("hook", "at"), [("on_validation_batch_end", 2), ("on_validation_end", 1)])
def test_two_validation_loaders_one_shuffled(hook: str, at: int) -> None:
    """After a save inside or after the second loader, every validation batch comes once, in order."""
    assert_continues_from(
        hook,
        users=lambda: [saver(hook, at)],
        module=TwoValidations,
        validation=lambda: [
            DataLoader(NoisyDataset(8), batch_size=4),
            DataLoader(NoisyDataset(8), batch_size=4, shuffle=True, num_workers=2, persistent_workers=True),
        ],
    )


@pytest.mark.parametrize("at", [3, 6])
def test_last_step_of_all_by_max_steps(at: int) -> None:
    """After the very last step, the rest of the epoch's end still runs: its validation and its logged means."""
    assert_continues_from(
        "on_train_batch_end", users=lambda: [saver("on_train_batch_end", at)], max_steps=at + 1, val_check_interval=2
    )


class Plateau(Net):
    """Its learning rate depends on the validation loss, once an epoch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


@pytest.mark.parametrize(
    ("hook", "at"), [("on_train_epoch_end", 1), ("on_validation_end", 1), ("on_train_batch_end", 9)]
)
def test_plateau_schedulers_step_once(hook: str, at: int) -> None:
    """A scheduler that is due at the end of the epoch steps once."""
    assert_continues_from(hook, users=lambda: [saver(hook, at)], module=Plateau, max_epochs=4)


# Lightning's ModelCheckpoint: its file can be resumed from.

TRIGGERS: dict[str, tuple[str, dict[str, Any]]] = {
    "steps": ("on_train_batch_end", {"every_n_train_steps": 3}),
    "time": ("on_train_batch_end", {"train_time_interval": timedelta(microseconds=1)}),
    "epoch": ("on_train_epoch_end", {"every_n_epochs": 1, "save_on_train_epoch_end": True}),
    "validation": ("on_validation_end", {"every_n_epochs": 1, "save_on_train_epoch_end": False}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRIGGERS)
def test_file_of_a_model_checkpoint(name: str, tmp_path: Path) -> None:
    """A run that resumes from the file has the same weights and optimizer states as the uninterrupted one."""
    hook, arguments = TRIGGERS[name]

    def main(kind: str, ckpt_path: Path | None) -> None:
        callbacks: list[Callback] = [protected()]
        if ckpt_path is None:
            callbacks.append(ModelCheckpoint(dirpath=tmp_path / "files", filename="{step}", save_top_k=-1, **arguments))
        trainer = fit_net(callbacks, tmp_path / kind, ckpt_path=ckpt_path, max_epochs=3, enable_checkpointing=True)
        tell(tmp_path, kind, weights(trainer))

    assert run(lambda: main("whole", None)).exit_code == 0
    files = sorted((tmp_path / "files").iterdir(), key=lambda path: int(path.stem.removeprefix("step=")))
    path = files[len(files) // 3]
    ended = run(lambda: main("resumed", path), seed=99)
    assert ended.exit_code == 0, ended.output
    assert f"saved in {hook}" in ended.output
    assert told(tmp_path, "resumed") == told(tmp_path, "whole")


# Saves that can't be exact.


class Teacher(Net):
    """Updates a teacher in its own hook, after every callback."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("teacher", torch.zeros(()))

    def on_train_batch_end(self, *_: Any) -> None:
        self.teacher += next(self.parameters()).sum().detach()


def test_hooks_after_the_saving_one_are_named_and_refused(tmp_path: Path) -> None:
    """A teacher that the module updates after the save would stay a step behind: saving warns, and a resume fails."""

    def main(name: str, callbacks: list[Callback], path: Path | None = None) -> None:
        fit_net(callbacks, tmp_path / name, module=Teacher(), ckpt_path=path)

    path = tmp_path / "first" / "theirs.ckpt"
    saved = run(lambda: main("first", [protected(), saver("on_train_batch_end", 3)]))
    assert saved.exit_code == 0, saved.output
    assert "Teacher.on_train_batch_end comes after the hook that saved" in saved.output
    refused = run(lambda: main("second", [protected()], path))
    assert refused.exit_code == 1
    assert "NotExactError" in refused.output
    assert "Teacher.on_train_batch_end comes after" in refused.output
    told_so = run(lambda: main("third", [protected(strict=False)], path))
    assert told_so.exit_code == 0, told_so.output
    assert "NOT EXACT" in told_so.output


@pytest.mark.filterwarnings("ignore")
def test_refusal_names_the_nearest_autosave_and_leaves_it(tmp_path: Path) -> None:
    """If another run's inexact checkpoint is refused, the error names the run's newest autosave, which stays."""

    def main(name: str, callbacks: list[Callback], path: Path | None = None) -> None:
        fit_net(callbacks, tmp_path / name, module=Teacher(), ckpt_path=path)

    run(lambda: main("other", [protected(), saver("on_train_batch_end", 2), KillAt(4)]))
    run(lambda: main("run", [protected(), KillAt(4)]))
    newest = autosaves(tmp_path / "run")[-1]
    refused = run(lambda: main("run", [protected()], tmp_path / "other" / "theirs.ckpt"))
    assert refused.exit_code == 1
    assert f"Resume from the autosave {newest}" in refused.output
    assert newest.exists()


def test_save_after_the_optimizer_step_is_refused(tmp_path: Path) -> None:
    """A save between the optimizer step and the end of the batch is reported, and a resume from it is refused."""

    class Saves(Net):
        def lr_scheduler_step(self, *arguments: Any) -> None:
            super().lr_scheduler_step(*arguments)
            if self.trainer.global_step == 3:
                self.trainer.save_checkpoint(tmp_path / "theirs.ckpt")

    saved = run(lambda: fit_net([protected()], tmp_path / "first", module=Saves()))
    assert "parameters have changed" in saved.output
    refused = run(
        lambda: fit_net([protected()], tmp_path / "second", module=Saves(), ckpt_path=tmp_path / "theirs.ckpt")
    )
    assert refused.exit_code == 1
    assert "parameters have changed" in refused.output
