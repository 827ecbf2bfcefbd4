"""The first save of a fit takes about as long as later ones: what a process does once is done before."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.save import autosave
from lightning_faulttolerant.trainer.save.autosave import Autosaver
from tests.runs import fit_net


def test_first_save_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has saved nothing yet has what a save needs before its first save begins."""
    needed = ("omegaconf", "torch.utils.serialization")
    for name in [name for name in sys.modules if name.startswith(needed)]:
        monkeypatch.delitem(sys.modules, name)
    autosave.warm_up.cache_clear()
    came: list[set[str]] = []
    save = Autosaver.save

    def watched(self: Autosaver, *args: object) -> None:
        before = set(sys.modules)
        save(self, *args)
        came.append(set(sys.modules) - before)

    monkeypatch.setattr(Autosaver, "save", watched)
    fit_net([FaultTolerance(tmp_path / "autosaves")], tmp_path, max_epochs=1)
    assert came
    assert not [name for name in came[0] if name.startswith(needed)]


def test_nothing_is_created_on_the_default_device() -> None:
    """A user's default device may be a GPU, and is not begun to be used by us."""
    autosave.warm_up.cache_clear()
    with torch.device("cuda"):  # this machine need not have one
        autosave.warm_up()
