"""`AtomicCheckpointIO` under a Trainer, with and without the callback, and by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from lightning_faulttolerant import AtomicCheckpointIO, DamagedCheckpointError, UnsafeCheckpointError
from lightning_faulttolerant.checkpoint.verify import verify_file
from lightning_faulttolerant.trainer.files import compat
from tests.damage import Payload, change_a_weight
from tests.messages import error_of
from tests.runs import fit_net

CHECKPOINT = {"state_dict": {"weight": torch.arange(3.0)}, "epoch": 1}


@pytest.mark.parametrize("path", ["plain.ckpt", "file://{directory}/url.ckpt", "~/home.ckpt"])
def test_paths_are_understood_as_lightning_does(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path, a file URL, and a path in the home directory mean the same file to both plugins."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    path = path.format(directory=tmp_path)
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    assert TorchCheckpointIO().load_checkpoint(path)["epoch"] == 1
    assert AtomicCheckpointIO().load_checkpoint(path)["epoch"] == 1
    [file] = tmp_path.iterdir()
    assert file.suffix == ".ckpt"
    AtomicCheckpointIO().remove_checkpoint(path)
    assert not list(tmp_path.iterdir())
    AtomicCheckpointIO().remove_checkpoint(path)


def test_damaged_file_is_never_loaded(tmp_path: Path) -> None:
    """A flipped bit that Lightning's plugin takes for a weight is an error, whatever `weights_only` says."""
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    change_a_weight(path)
    assert TorchCheckpointIO().load_checkpoint(path)["state_dict"]["weight"].tolist() != [0, 1, 2]
    for weights_only in (None, True, False):
        with pytest.raises(DamagedCheckpointError, match=r"a\.ckpt is damaged"):
            AtomicCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedCheckpointError):
        AtomicCheckpointIO(weights_only=False).load_checkpoint(path)


def test_code_in_a_file_runs_only_where_it_is_asked_for(tmp_path: Path) -> None:
    """By default no code runs; the error says how to load the file anyway, and that works."""
    path, made = tmp_path / "a.ckpt", tmp_path / "made"
    AtomicCheckpointIO().save_checkpoint({**CHECKPOINT, "code": Payload(made)}, path)
    said = error_of(UnsafeCheckpointError, lambda: AtomicCheckpointIO().load_checkpoint(path))
    assert "Trainer(plugins=[AtomicCheckpointIO(weights_only=False)])" in said
    assert ("fit(..., weights_only=False)" in said) == compat.HAS_WEIGHTS_ONLY
    with pytest.raises(UnsafeCheckpointError):
        AtomicCheckpointIO(weights_only=False).load_checkpoint(path, weights_only=True)
    assert not made.exists()
    AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    made.rmdir()
    AtomicCheckpointIO(weights_only=False).load_checkpoint(path)
    assert made.exists()


@pytest.mark.parametrize("wrapped", [False, True])
def test_trainer_without_the_callback(wrapped: bool, tmp_path: Path) -> None:
    """As a plugin, or inside AsyncCheckpointIO, it writes the files, and reads the file that fit continues from."""

    def plugin() -> Any:
        return AsyncCheckpointIO(AtomicCheckpointIO()) if wrapped else AtomicCheckpointIO()

    def saver() -> Any:
        return ModelCheckpoint(tmp_path / "files", save_last=True)

    fit_net([saver()], tmp_path, plugins=[plugin()], enable_checkpointing=True, max_epochs=1)
    paths = sorted((tmp_path / "files").iterdir())
    assert [path.name for path in paths] == ["epoch=0-step=5.ckpt", "last.ckpt"]
    for path in paths:
        verify_file(path)
    trainer = fit_net([saver()], tmp_path, plugins=[plugin()], enable_checkpointing=True, ckpt_path=paths[0])
    assert trainer.global_step == 10
