"""`AtomicCheckpointIO` under a Trainer, with and without the callback, and by itself."""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from lightning_faulttolerant import AtomicCheckpointIO, DamagedCheckpointError, FaultTolerance, UnsafeCheckpointError
from lightning_faulttolerant.checkpoint.verify import load_file, verify_file
from lightning_faulttolerant.trainer.files import compat
from tests.data_sets import NoisyDataset
from tests.runs import Net, fit_net, make_trainer

CHECKPOINT = {"state_dict": {"weight": torch.arange(3.0)}, "epoch": 1}


def damage(path: Path) -> None:
    """Flip bits among the tensors of a file, where torch.load would not notice the change."""
    content = bytearray(path.read_bytes())
    at = content.index(bytes(CHECKPOINT["state_dict"]["weight"].numpy()))
    content[at + 6] ^= 64
    path.write_bytes(content)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    """Missing parents are created, the file verifies, and plain torch reads it too."""
    path = tmp_path / "a/b/c.ckpt"
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    verify_file(path)
    for loaded in (AtomicCheckpointIO().load_checkpoint(path), torch.load(path, weights_only=True)):
        assert loaded["epoch"] == 1
        assert torch.equal(loaded["state_dict"]["weight"], CHECKPOINT["state_dict"]["weight"])


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


def test_a_save_removes_what_a_killed_one_left_long_ago(tmp_path: Path) -> None:
    """Kills during saves do not fill the disk; temporary files of possibly living writers, and other files, stay."""
    dead = "elsewhere-1-0123456789abcdef"
    names = {f".a.ckpt.tmp-{dead}": 7200, f".b.ckpt.tmp-{dead}": 60, ".c.ckpt.tmp-mine": 7200, "d.ckpt": 7200}
    names[f".e.ckpt.tmp-{os.uname().nodename}-{os.getppid()}-0123456789abcdef"] = 7200
    for name, age in names.items():
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, tmp_path / "new.ckpt")
    assert sorted(os.listdir(tmp_path)) == sorted(["new.ckpt", *list(names)[1:]])


def test_failing_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk error is raised, never swallowed; the old file stays, and no other file is left."""
    path = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)

    def fails(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="Input/output error"):
        AtomicCheckpointIO().save_checkpoint({**CHECKPOINT, "epoch": 2}, path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    assert AtomicCheckpointIO().load_checkpoint(path)["epoch"] == 1


def test_damaged_file_is_never_loaded(tmp_path: Path) -> None:
    """A flipped bit that Lightning's plugin takes for a weight is an error, whatever `weights_only` says."""
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    damage(path)
    assert TorchCheckpointIO().load_checkpoint(path)["state_dict"]["weight"].tolist() != [0, 1, 2]
    for weights_only in (None, True, False):
        with pytest.raises(DamagedCheckpointError, match=r"a\.ckpt is damaged"):
            AtomicCheckpointIO().load_checkpoint(path, weights_only=weights_only)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DamagedCheckpointError):
        AtomicCheckpointIO(weights_only=False).load_checkpoint(path)


def test_missing_file_is_the_error_that_it_is_in_lightning(tmp_path: Path) -> None:
    """Type and message are the same as in Lightning."""
    messages = []
    for plugin in (TorchCheckpointIO(), AtomicCheckpointIO()):
        with pytest.raises(FileNotFoundError) as caught:
            plugin.load_checkpoint(tmp_path / "none.ckpt")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


class RunsCode:
    """Its pickle creates a directory when it is loaded."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.directory),)


def test_code_in_a_file_runs_only_where_it_is_asked_for(tmp_path: Path) -> None:
    """By default no code runs; the error says how to load the file anyway, and that works."""
    path, made = tmp_path / "a.ckpt", tmp_path / "made"
    AtomicCheckpointIO().save_checkpoint({**CHECKPOINT, "code": RunsCode(made)}, path)
    with pytest.raises(UnsafeCheckpointError) as caught:
        AtomicCheckpointIO().load_checkpoint(path)
    assert "Trainer(plugins=[AtomicCheckpointIO(weights_only=False)])" in str(caught.value)
    assert ("fit(..., weights_only=False)" in str(caught.value)) == compat.HAS_WEIGHTS_ONLY
    with pytest.raises(UnsafeCheckpointError):
        AtomicCheckpointIO(weights_only=False).load_checkpoint(path, weights_only=True)
    assert not made.exists()
    AtomicCheckpointIO().load_checkpoint(path, weights_only=False)
    made.rmdir()
    AtomicCheckpointIO(weights_only=False).load_checkpoint(path)
    assert made.exists()


def test_map_location_is_torchs(tmp_path: Path) -> None:
    """By default tensors come back to main memory; the caller's `map_location` wins."""
    path = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint(CHECKPOINT, path)
    assert AtomicCheckpointIO().load_checkpoint(path)["state_dict"]["weight"].device.type == "cpu"
    loaded = AtomicCheckpointIO().load_checkpoint(path, map_location="meta")
    assert loaded["state_dict"]["weight"].device.type == "meta"


def test_directory_is_lightnings_affair(tmp_path: Path) -> None:
    """A sharded checkpoint behaves as in Lightning, and is removed whole."""
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded/.metadata").touch()
    kinds = []
    for plugin in (TorchCheckpointIO(), AtomicCheckpointIO()):
        with pytest.raises(OSError, match="directory") as caught:
            plugin.load_checkpoint(tmp_path / "sharded")
        kinds.append(caught.type)
    assert kinds[0] is kinds[1]
    AtomicCheckpointIO().remove_checkpoint(tmp_path / "sharded")
    assert not list(tmp_path.iterdir())


def test_storage_options_are_refused(tmp_path: Path) -> None:
    """They are refused, as in Lightning."""
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint(CHECKPOINT, tmp_path / "a.ckpt", storage_options={"a": 1})


def test_url_of_another_file_system() -> None:
    """A URL is saved to, loaded, verified and removed like a path."""
    url = "memory://of_checkpoint_io/a.ckpt"
    plugin = AtomicCheckpointIO()
    plugin.save_checkpoint(CHECKPOINT, url)
    assert plugin.load_checkpoint(url)["epoch"] == 1
    plugin.remove_checkpoint(url)
    with pytest.raises(FileNotFoundError, match="Checkpoint file not found: memory://"):
        plugin.load_checkpoint(url)


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a directory without log output."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a web server for `tmp_path`."""
    handler = functools.partial(Handler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()


def test_checkpoint_of_a_web_server(server: str, tmp_path: Path) -> None:
    """It is loaded and verified with weights_only=True; Lightning would run code in it."""
    plugin = AtomicCheckpointIO()
    plugin.save_checkpoint(CHECKPOINT, tmp_path / "a.ckpt")
    assert plugin.load_checkpoint(f"{server}/a.ckpt")["epoch"] == 1
    damage(tmp_path / "a.ckpt")
    with pytest.raises(DamagedCheckpointError):
        plugin.load_checkpoint(f"{server}/a.ckpt")
    with pytest.raises(FileNotFoundError, match=r"Checkpoint file not found: http://.*/none\.ckpt"):
        plugin.load_checkpoint(f"{server}/none.ckpt")
    plugin.save_checkpoint({"code": RunsCode(tmp_path / "made")}, tmp_path / "b.ckpt")
    with pytest.raises(UnsafeCheckpointError):
        plugin.load_checkpoint(f"{server}/b.ckpt")
    assert not (tmp_path / "made").exists()


# Under a Trainer.


def weights(trainer: Trainer) -> list[Any]:
    """Return the final weights."""
    return [parameter.tolist() for parameter in trainer.lightning_module.parameters()]


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
    callbacks = [saver()]
    trainer = fit_net(callbacks, tmp_path, plugins=[plugin()], enable_checkpointing=True, ckpt_path=paths[0])
    assert trainer.global_step == 10


def test_callback_has_it_for_the_length_of_the_fit(tmp_path: Path) -> None:
    """It writes ModelCheckpoint's files during fit; after fit the strategy has Lightning's plugin again."""
    seen: list[Any] = []

    class Looks(Net):
        def on_train_start(self) -> None:
            seen.append(self.trainer.strategy.checkpoint_io)

    saver = ModelCheckpoint(tmp_path / "files", save_last=True)
    callbacks = [FaultTolerance(tmp_path / "autosaves"), saver]
    trainer = fit_net(callbacks, tmp_path, module=Looks(), enable_checkpointing=True)
    assert [type(plugin) for plugin in seen] == [AtomicCheckpointIO]
    assert type(trainer.strategy.checkpoint_io) is TorchCheckpointIO
    for path in (tmp_path / "files").iterdir():
        verify_file(path)


class Own(TorchCheckpointIO):
    """A user's subclass of Lightning's plugin."""


@pytest.mark.parametrize("make", [Own, AsyncCheckpointIO, lambda: AtomicCheckpointIO(weights_only=False)])
def test_what_a_user_has_chosen_is_left_alone(make: Any, tmp_path: Path) -> None:
    """Only the exact default is replaced: a subclass, a wrapper, and an AtomicCheckpointIO of the user's stay."""
    seen: list[Any] = []

    class Looks(Net):
        def on_train_start(self) -> None:
            seen.append(self.trainer.strategy.checkpoint_io)

    plugin = make()
    trainer = fit_net([FaultTolerance(tmp_path)], tmp_path, module=Looks(), plugins=[plugin], max_epochs=1)
    assert seen == [plugin]
    assert trainer.strategy.checkpoint_io is plugin


def test_it_is_put_back_after_a_fit_that_fails(tmp_path: Path) -> None:
    """After an exception too, the strategy has Lightning's plugin again."""

    class Fails(Net):
        def on_train_start(self) -> None:
            raise ZeroDivisionError

    trainer = make_trainer([FaultTolerance(tmp_path)], tmp_path)
    loader = DataLoader(NoisyDataset(20), batch_size=4)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(Fails(), loader, loader)
    assert type(trainer.strategy.checkpoint_io) is TorchCheckpointIO


class Configured(Net):
    """Has a hyperparameter that is not a plain value."""

    def __init__(self, space: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def file_of_before(directory: Path) -> Path:
    """Return a checkpoint of a run without the callback, with a Namespace among its hyperparameters."""
    trainer = fit_net([], directory, module=Configured(argparse.Namespace(a=1)), max_epochs=1)
    trainer.save_checkpoint(directory / "before.ckpt")
    return directory / "before.ckpt"


def test_file_of_before_says_what_to_do_and_so_it_goes(tmp_path: Path) -> None:
    """A file that Lightning 2.5 unpickled without a warning is refused; the remedy in the error loads it."""
    path = file_of_before(tmp_path)
    with pytest.raises(UnsafeCheckpointError, match=r"AtomicCheckpointIO\(weights_only=False\)"):
        fit_net([FaultTolerance(tmp_path / "a")], tmp_path, module=Configured(), ckpt_path=path)
    plugins = [AtomicCheckpointIO(weights_only=False)]
    trainer = fit_net([FaultTolerance(tmp_path / "b")], tmp_path, module=Configured(), ckpt_path=path, plugins=plugins)
    assert trainer.global_step == 10


def test_fit_says_how_its_checkpoint_is_loaded(tmp_path: Path) -> None:
    """Since Lightning 2.6, `fit(weights_only=False)` allows it; earlier versions have no such argument."""
    path = file_of_before(tmp_path)
    trainer = make_trainer([FaultTolerance(tmp_path / "a")], tmp_path)
    loader = DataLoader(NoisyDataset(20), batch_size=4)
    refused = nullcontext() if compat.HAS_WEIGHTS_ONLY else pytest.raises(UnsafeCheckpointError)
    with refused:
        trainer.fit(Configured(), loader, loader, ckpt_path=path, **compat.weights_only_argument(False))
    assert trainer.global_step == (10 if compat.HAS_WEIGHTS_ONLY else 0)


def test_damaged_ckpt_path_is_an_error(tmp_path: Path) -> None:
    """A fit with the callback does not continue from damaged weights."""
    fit_net([], tmp_path, max_epochs=1).save_checkpoint(tmp_path / "a.ckpt")
    content = bytearray((tmp_path / "a.ckpt").read_bytes())
    weight = load_file(tmp_path / "a.ckpt")["state_dict"]["layers.0.weight"]
    content[content.index(bytes(weight.numpy())) + 3] ^= 8
    (tmp_path / "a.ckpt").write_bytes(content)
    with pytest.raises(DamagedCheckpointError):
        fit_net([FaultTolerance(tmp_path / "autosaves")], tmp_path, ckpt_path=tmp_path / "a.ckpt")


def test_best_after_fit_is_loaded_by_lightnings_own(tmp_path: Path) -> None:
    """`test(ckpt_path="best")` after fit works as it does without the callback."""
    saver = ModelCheckpoint(tmp_path / "files", monitor="val_loss")

    class Tested(Net):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.log("tested", self.layers(batch).mean())

    callbacks = [FaultTolerance(tmp_path / "autosaves"), saver]
    trainer = fit_net(callbacks, tmp_path, module=Tested(), enable_checkpointing=True, max_epochs=1)
    [results] = trainer.test(ckpt_path="best", dataloaders=DataLoader(NoisyDataset(4)))
    assert "tested" in results


class Sought(Configured):
    """Has a learning rate that a finder can search for."""

    def __init__(self, space: Any = None) -> None:
        super().__init__(space)
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), self.lr)


def test_finder_restores_what_it_saved_as_without_us(tmp_path: Path) -> None:
    """A file that a finder has just written is read as Lightning reads it, whatever the hyperparameters hold."""

    def fit(callbacks: list[Callback], name: str) -> tuple[str, Any]:
        (tmp_path / name).mkdir()
        seed_everything(1, verbose=False)
        module = Sought(argparse.Namespace(a=1))
        try:
            fit_net([LearningRateFinder(num_training_steps=3), *callbacks], tmp_path / name, module=module)
        except pickle.UnpicklingError:
            return "refused", None
        return "trained", [parameter.tolist() for parameter in module.parameters()]

    without = fit([], "without")
    assert without[0] == ("refused" if compat.HAS_WEIGHTS_ONLY else "trained")  # since 2.6 Lightning itself refuses
    assert fit([FaultTolerance(tmp_path / "autosaves", strict=False)], "with") == without
