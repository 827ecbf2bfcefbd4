"""The contract with Lightning: the installed version has each private name that we use."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle

from lightning_faulttolerant.trainer import compat
from lightning_faulttolerant.trainer.compat import SEAMS
from lightning_faulttolerant.trainer.patches import Patches
from tests.contract import missing, private_names
from tests.runs import fit_net


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """Return a real trainer after a short fit with validation."""
    directory = tmp_path_factory.mktemp("compat")
    return fit_net([], directory, max_epochs=1, limit_train_batches=2, limit_val_batches=1)


@pytest.mark.parametrize("path", SEAMS)
def test_each_seam_exists(path: str, trainer: Trainer) -> None:
    """The name exists after a fit; if a new Lightning drops it, the failure names the feature that breaks."""
    found = missing(trainer, path, SEAMS)
    assert found is None, found


@pytest.mark.parametrize("path", SEAMS)
def test_failure_names_the_feature(path: str) -> None:
    """On an object that has none of the names, each check fails and says what breaks."""
    message = missing(object(), path, SEAMS)
    assert message is not None
    assert path in message
    assert SEAMS[path] in message
    assert len(SEAMS[path]) > 5


# Read with a default, or only set: nothing breaks immediately without them.
OTHER_NAMES = {
    "_ckpt_path": "trainer._checkpoint_connector",
    "_restarting": "trainer.fit_loop",
    "_loaded_from_state_dict": "trainer.fit_loop",
    "_should_accumulate": "trainer.fit_loop.epoch_loop",
    "_iterator": "trainer.fit_loop._combined_loader",
    "_resuming_from_checkpoint": "trainer.fit_loop",
    "_skip_next_val": "trainer.fit_loop.epoch_loop",
    "_module_mode": "trainer.fit_loop.epoch_loop.val_loop",
    "_on_evaluation_end": "trainer.fit_loop.epoch_loop.val_loop",
    "_on_evaluation_model_train": "trainer.fit_loop.epoch_loop.val_loop",
    "_first_loop_iter": "trainer._logger_connector",
}


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_each_further_name_on_the_trainer_exists(name: str, trainer: Trainer) -> None:
    """Names besides the seams that compat uses on the loops and connectors exist too."""
    owner: Any = trainer
    for part in OTHER_NAMES[name].split(".")[1:]:
        owner = getattr(owner, part)
    assert hasattr(owner, name), f"This Lightning has no {OTHER_NAMES[name]}.{name}."


def test_no_name_escapes_the_contract() -> None:
    """Some test of this file checks each private name that the source of compat uses."""
    paths = (*SEAMS, *OTHER_NAMES.values())
    checked = {part for path in paths for part in path.split(".")} | OTHER_NAMES.keys() | ELSEWHERE
    assert private_names(compat) - checked == set()


# On fetchers and callbacks rather than on the trainer: checked in the test below.
ELSEWHERE = {
    "_find_last_checkpoints",
    "_early_exit",
    "_OMEGACONF_AVAILABLE",
    "_current_fx_name",
    "_on_after_fetch",
    "_getframe",
    "__name__",
    *("_idx", "_consumed", "_batch_idx"),
    *("_call_callback_hooks", "_call_lightning_module_hook"),
}


def test_names_beside_the_trainer_exist(trainer: Trainer) -> None:
    """Names on finders, ModelCheckpoint and the module exist in the installed Lightning."""
    assert hasattr(ModelCheckpoint, "_find_last_checkpoints"), 'ckpt_path="last" would not be told from a file.'
    for finder in (BatchSizeFinder(), LearningRateFinder()):
        assert hasattr(finder, "_early_exit"), "a Tuner's fits would be taken for trainings."
    assert hasattr(trainer.lightning_module, "_current_fx_name"), "the hook that saved would not be named."
    assert hasattr(trainer.fit_loop.epoch_loop, "_on_after_fetch"), "a stuck fetch would not be noticed."
    for name in ("_idx", "_consumed"):
        assert hasattr(_MaxSizeCycle([]), name), "a cycled loader would lose its place."
    assert hasattr(_DataLoaderIterDataFetcher(), "_batch_idx"), "a step that fetches would count from 0."
    for name in ("_call_callback_hooks", "_call_lightning_module_hook"):
        assert "hook_name" in getattr(call, name).__code__.co_varnames, "a hook that saves would not be known."


def test_patches_on_a_real_trainer_leave_nothing(trainer: Trainer) -> None:
    """The loops and connectors of a trainer have all their original attributes again."""
    owners = {
        trainer.fit_loop.epoch_loop: (compat.BEFORE_FETCH, compat.AFTER_FETCH, "reset"),
        compat.checkpoint_connector(trainer): ("resume_start", "restore_training_state"),
        compat.signal_connector(trainer): ("register_signal_handlers",),
        compat.validation_loop(trainer): ("run", compat.BEFORE_FETCH),
    }
    before = {owner: dict(vars(owner)) for owner in owners}
    patches = Patches()
    for owner, names in owners.items():
        for name in names:
            patches.wrap(owner, name, lambda original: lambda *args: original(*args))
    assert any(vars(owner) != before[owner] for owner in owners)
    patches.undo()
    assert all(vars(owner).keys() == before[owner].keys() for owner in owners)
    assert all(vars(owner)[name] is value for owner in owners for name, value in before[owner].items())


def test_dump_imports_no_omegaconf(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump leaves out this import, which takes longer than the rest of a start, and Lightning's own dumps have it."""
    before = compat.connectors._OMEGACONF_AVAILABLE
    with monkeypatch.context() as patched:
        for name in [name for name in sys.modules if name.partition(".")[0] == "omegaconf"]:
            patched.delitem(sys.modules, name)
        compat.dump_checkpoint(trainer)
        assert "omegaconf" not in sys.modules
    assert compat.connectors._OMEGACONF_AVAILABLE is before
