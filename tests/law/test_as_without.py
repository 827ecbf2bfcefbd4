"""What a user's hooks see of a fit that starts from a checkpoint is what they see without us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_faulttolerant.trainer.environment import VARIABLE
from tests.runs import fit_net

pytestmark = pytest.mark.filterwarnings("ignore:The dirpath has changed from:UserWarning")


class Sees(Callback):
    """Notes in a file where the trainer says that it is when training starts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(f"epoch {trainer.current_epoch}, step {trainer.global_step}")


def fit_saving(directory: Path, **arguments: Any) -> None:
    """Fit, with a file of each epoch's end."""
    saving = ModelCheckpoint(directory, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    fit_net([Sees(directory / "seen"), saving], directory, enable_checkpointing=True, **arguments)


@pytest.mark.parametrize("arguments", [{"max_epochs": 3}, {"max_epochs": None, "max_steps": 15}])
@pytest.mark.parametrize("epoch", [0, 1])
def test_epoch_that_hooks_see(
    epoch: int, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A fit from the file of an epoch's end starts in the next epoch, although it still does what that end owes."""
    seen = []
    for name, value in (("without", ""), ("with", "1")):
        monkeypatch.setenv(VARIABLE, value)
        first, second = tmp_path / name / "first", tmp_path / name / "second"
        fit_saving(first)
        fit_saving(second, ckpt_path=first / f"epoch={epoch}.ckpt", **arguments)
        seen.append((second / "seen").read_text())
    assert seen[1] == seen[0]
    assert seen[0].endswith(f"step {5 * (epoch + 1)}")
