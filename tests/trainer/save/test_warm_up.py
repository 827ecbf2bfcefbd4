"""The first save of a fit takes about as long as later ones: what a process does once is done before."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.save import autosave
from lightning_faulttolerant.trainer.save.autosave import Autosaver
from tests.processes import run
from tests.runs import fit_net

_NEEDED = ("omegaconf", "torch.utils.serialization")


def forget_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process look like one that has saved nothing yet."""
    for name in [name for name in sys.modules if name.startswith(_NEEDED)]:
        monkeypatch.delitem(sys.modules, name)
    autosave.warm_up.cache_clear()


def test_first_save_imports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has saved nothing yet has what a save needs before its first save begins."""
    forget_imports(monkeypatch)
    came: list[set[str]] = []
    save = Autosaver.save

    def watched(self: Autosaver, *args: object) -> None:
        before = set(sys.modules)
        save(self, *args)
        came.append(set(sys.modules) - before)

    monkeypatch.setattr(Autosaver, "save", watched)
    fit_net([FaultTolerance(tmp_path / "autosaves")], tmp_path, max_epochs=1)
    assert came
    assert not [name for name in came[0] if name.startswith(_NEEDED)]


class Imported(Callback):
    """Writes before each batch whether what a save needs is imported, and ends the process after the third."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, *_: object) -> None:
        with self.file.open("a") as file:
            file.write("yes " if "omegaconf" in sys.modules else "no ")

    def on_train_batch_end(self, *_: object) -> None:
        if len(self.file.read_text().split()) == 3:
            os._exit(1)


def test_resume_imports_after_its_first_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch of a resumed fit does not wait for what only its first save needs."""
    forget_imports(monkeypatch)

    def main(file: Path) -> None:
        callbacks = [FaultTolerance(tmp_path / "autosaves", every_n_train_steps=2), Imported(file)]
        fit_net(callbacks, tmp_path, max_epochs=2)

    run(partial(main, tmp_path / "fresh"))
    run(partial(main, tmp_path / "resumed"))
    assert (tmp_path / "fresh").read_text() == "yes yes yes "
    assert (tmp_path / "resumed").read_text() == "no yes yes "


def test_nothing_is_created_on_the_default_device() -> None:
    """A user's default device may be a GPU, and is not begun to be used by us."""
    autosave.warm_up.cache_clear()
    with torch.device("cuda"):  # this machine need not have one
        autosave.warm_up()
