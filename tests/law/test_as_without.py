"""The hooks of a fit that starts from a checkpoint see the same as without the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.process import VARIABLE
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.runs import Net, assert_exact, fit_net

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")


class Sees(Callback):
    """Writes the trainer's epoch and step to a file when training starts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(f"epoch {trainer.current_epoch}, step {trainer.global_step}")


def fit_saving(directory: Path, **arguments: Any) -> None:
    """Fit, and save a checkpoint at the end of each epoch."""
    saving = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    fit_net([Sees(directory / "seen"), saving], directory, enable_checkpointing=True, **arguments)


@pytest.mark.parametrize("arguments", [{"max_epochs": 3}, {"max_epochs": None, "max_steps": 15}])
@pytest.mark.parametrize("epoch", [0, 1])
def test_epoch_that_hooks_see(
    epoch: int, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fit from the checkpoint of an epoch's end starts in the next epoch, although it still finishes that end."""
    seen = []
    for name, value in (("without", ""), ("with", "1")):
        monkeypatch.setenv(VARIABLE, value)
        first, second = tmp_path / name / "first", tmp_path / name / "second"
        fit_saving(first)
        fit_saving(second, ckpt_path=first / f"epoch={epoch}.ckpt", **arguments)
        seen.append((second / "seen").read_text())
    assert seen[1] == seen[0]
    assert seen[0].endswith(f"step {5 * (epoch + 1)}")


class KeyedByType(Callback):
    """Keeps its state under its type, as callbacks of Lightning 1.x did."""

    num_batches = 0

    @property
    def state_key(self) -> Any:
        return type(self)

    def on_train_batch_end(self, *_: Any) -> None:
        self.num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_batches = state["num_batches"]


def test_state_under_a_type_is_restored() -> None:
    """An autosave, which is trusted, restores a state that is kept under a type, and all others."""
    [cost] = assert_exact(lambda: [KeyedByType()], KillAt(3))
    assert cost.batch == 3


class SavesWhatStepsMake(Net):
    """Has nothing to save before its first step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.last = super().training_step(batch, batch_idx)
        return self.last

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["last"] = self.last.detach()


def test_hook_that_saves_what_steps_make(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A hook that fails before the first step does not end the fit: the first autosave comes after a batch."""
    [cost] = assert_exact(list, KillAt(2), module=SavesWhatStepsMake, options={"every_n_train_steps": 100})
    assert (cost.epoch, cost.batch) == (0, 1)
    with caplog.at_level("INFO"):
        fit_net([FaultTolerance()], tmp_path, module=SavesWhatStepsMake(), max_steps=1)
    assert caplog.text.count("on_save_checkpoint can't be called before the first batch") == 1


class NeverSaves(Net):
    """Has a hook that always fails."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        raise KeyError("wrong")


def test_hook_that_is_wrong_is_raised_at_the_second_boundary(tmp_path: Path) -> None:
    """A fit that can't save anything raises the hook's error at the second boundary."""
    with pytest.raises(KeyError, match="wrong"):
        fit_net([FaultTolerance()], tmp_path, module=(net := NeverSaves()))
    assert net.global_step == 1
