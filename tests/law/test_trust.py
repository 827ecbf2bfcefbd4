"""Objects in an autosave are unpickled only if no other user could have written it, or if the user allows it."""

from __future__ import annotations

import os
import pickle
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.preprocessing import LabelEncoder

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.cli import main as command_line
from lightning_faulttolerant.records.lines import append_line, read_lines
from lightning_faulttolerant.state.packing import blob_to_tensor
from lightning_faulttolerant.testing import KillAt
from lightning_faulttolerant.trainer.resume.choice import Trust
from tests.damage import Payload
from tests.processes import Ended, run
from tests.runs import fit_net
from tests.scripts import autosaves

KEY = "lightning_faulttolerant"


class Describes(Callback):
    """Has an encoder and a path in its state, and prints them after a restore."""

    def __init__(self) -> None:
        self.encoder = LabelEncoder().fit(["left", "right"])

    def state_dict(self) -> dict[str, Any]:
        return {"encoder": self.encoder, "where": Path("/data")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        print("got back", state_dict["encoder"].classes_.tolist(), state_dict["where"], flush=True)


def fit(directory: Path, *faults: Callback, before: Callable[[], object] = lambda: None, **options: Any) -> Ended:
    """Run a fit that saves to a directory at each step, with `faults`."""

    def main() -> None:
        before()
        callback = FaultTolerance(directory, every_n_train_steps=1, **options)
        fit_net([callback, Describes(), *faults], directory.parent, max_epochs=1)

    return run(main)


@pytest.fixture
def outside() -> Iterator[Path]:
    """A directory that other users can enter; they can't reach pytest's own directory, whatever its mode is."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


@pytest.fixture
def private(outside: Path) -> Path:
    """A directory that only this user can write to."""
    directory = outside / "private"
    directory.mkdir(mode=0o755)
    return directory


@pytest.fixture
def shared(outside: Path) -> Path:
    """A directory that every user can write to."""
    directory = outside / "shared"
    directory.mkdir()
    directory.chmod(0o777)
    return directory


def assert_resumed(ended: Ended) -> None:
    """Check that a fit has resumed, with its objects."""
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly before batch 3 of epoch 0" in ended.output
    assert "got back ['left', 'right'] /data" in ended.output


def assert_refused(ended: Ended, reason: str) -> None:
    """Check that a fit ended at its start, with a reason."""
    assert ended.exit_code == 1
    assert "UnsafeCheckpointError" in ended.output
    assert reason in ended.output
    assert "got back" not in ended.output


def test_refused_where_others_write(shared: Path) -> None:
    """The error comes before any batch, with each key and its class, the directory, and the remedy."""
    ended = fit(shared, KillAt(0))
    assert_refused(ended, f"{shared} is writable by everybody (mode 0777)")
    assert "callbacks/Describes/encoder: sklearn.preprocessing._label.LabelEncoder\n" in ended.output
    assert "callbacks/Describes/where: pathlib.PosixPath\n" in ended.output
    assert "FaultTolerance(trust_autosaves=True) or set PL_FAULT_TOLERANT_TRUST=1" in ended.output
    assert autosaves(shared) == []


def test_the_lines_of_the_refusal_work(shared: Path) -> None:
    """With the error's lines in the script, it runs, and its objects are stored unchanged."""
    refused = fit(shared)
    lines = "\n".join(re.findall(r"^    ((?:import|from) .*|torch\.serialization\..*)$", refused.output, re.MULTILINE))
    assert "add_safe_globals" in lines

    def paste() -> None:
        exec(lines, {})

    assert fit(shared, KillAt(3), before=paste).exit_code == -signal.SIGKILL
    assert_resumed(fit(shared, before=paste))


def test_what_the_user_has_allowed_is_stored_plainly(private: Path) -> None:
    """Objects of allowed classes are not stored as bytes, even in a trusted directory."""

    def allow() -> None:
        torch.serialization.add_safe_globals([type(Path("/data"))])

    assert fit(private, KillAt(3), before=allow).exit_code == -signal.SIGKILL
    with torch.serialization.safe_globals([type(Path("/data"))]):
        checkpoint = load_file(autosaves(private)[-1])
    assert checkpoint["callbacks"]["Describes"]["where"] == Path("/data")
    assert list(checkpoint[KEY]["pickled"]) == ["callbacks/Describes/encoder"]


@pytest.mark.parametrize("by", ["argument", "variable"])
def test_granted(by: str, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The argument and the environment grant trust wherever the autosaves are."""
    if by == "variable":
        monkeypatch.setenv("PL_FAULT_TOLERANT_TRUST", "1")
    options = {"trust_autosaves": True} if by == "argument" else {}
    assert fit(shared, KillAt(3), **options).exit_code == -signal.SIGKILL
    assert_resumed(fit(shared, **options))


def test_forbidden(private: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """trust_autosaves=False overrides the rule and the environment."""
    monkeypatch.setenv("PL_FAULT_TOLERANT_TRUST", "1")
    assert_refused(fit(private, trust_autosaves=False), "trust_autosaves forbids it")
    assert fit(private, KillAt(3)).exit_code == -signal.SIGKILL
    assert_refused(fit(private, trust_autosaves=False), "trust_autosaves forbids it")


def test_a_store_is_not_trusted_by_itself(private: Path) -> None:
    """A store is not trusted, since the bucket's writers are unknown here."""

    def main(**options: Any) -> None:
        fit_net([FaultTolerance("memory://runs", **options), Describes()], private, max_epochs=1)

    assert_refused(run(main), "is in a store")
    assert run(lambda: main(trust_autosaves=True)).exit_code == 0


def test_without_strict_it_is_saved_all_the_same(shared: Path) -> None:
    """A warning says that the next start needs trust, and it does."""
    ended = fit(shared, KillAt(3), strict=False)
    assert ended.exit_code == -signal.SIGKILL
    assert "Because strict is off, they are saved anyway" in ended.output
    assert_refused(fit(shared, strict=False), f"{shared} is writable by everybody (mode 0777)")
    assert_resumed(fit(shared, strict=False, trust_autosaves=True))


@pytest.mark.parametrize("what", ["directory", "file"])
def test_trust_is_looked_at_again_when_a_run_resumes(what: str, private: Path) -> None:
    """An autosave that is opened to others after its save is not trusted, and no older autosave replaces it."""
    assert fit(private, KillAt(3)).exit_code == -signal.SIGKILL
    newest = autosaves(private)[-1]
    place = private if what == "directory" else newest
    mode = place.stat().st_mode
    place.chmod(0o777)
    ended = fit(private)
    assert_refused(ended, f"{place} is writable by everybody (mode 0777)")
    assert f"{newest} is not trusted" in ended.output
    assert "callbacks/Describes/encoder: sklearn.preprocessing._label.LabelEncoder\n" in ended.output
    assert autosaves(private)[-1] == newest
    place.chmod(mode)
    assert_resumed(fit(private))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_a_file_of_somebody_else_is_not_trusted(private: Path) -> None:
    """A file that belongs to another user is not unpickled."""
    assert fit(private, KillAt(3)).exit_code == -signal.SIGKILL
    os.chown(autosaves(private)[-1], 12345, 0)
    assert_refused(fit(private), "belongs to the user 12345")


def test_nobody_else_may_write_to_a_file_with_objects(private: Path) -> None:
    """Files with objects are writable only for their owner, whatever the umask is."""
    assert fit(private, KillAt(3), before=lambda: os.umask(0), trust_autosaves=True).exit_code == -signal.SIGKILL
    assert {path.stat().st_mode & 0o777 for path in autosaves(private)} == {0o644}


def plant(directory: Path, payload: Path) -> Path:
    """Make the newest autosave of a directory run code when its objects are unpickled."""
    path = autosaves(directory)[-1]
    checkpoint = load_file(path)
    checkpoint[KEY]["pickled"]["callbacks/Describes/where"]["pickle"] = blob_to_tensor(pickle.dumps(Payload(payload)))
    torch.save(checkpoint, path)
    return path


def test_what_others_have_planted_is_never_run(shared: Path, private: Path, tmp_path: Path) -> None:
    """Planted code does not run from a directory that others can write to; in a private one it would."""
    payload = tmp_path / "run by the payload"
    assert fit(shared, KillAt(3), trust_autosaves=True).exit_code == -signal.SIGKILL
    plant(shared, payload)
    assert_refused(fit(shared), "is writable by everybody")
    assert_refused(fit(shared, strict=False), "is writable by everybody")
    assert not payload.exists()
    assert fit(private, KillAt(3)).exit_code == -signal.SIGKILL
    plant(private, payload)
    fit(private)
    assert payload.exists()


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["inspect", "--json"], ["verify"], ["list"], ["report"], ["prune", "--dry-run"]]
)
def test_no_command_runs_anything(
    arguments: list[str], private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even for a trusted file, commands unpickle nothing: they show objects by place and class."""
    assert fit(private, KillAt(3)).exit_code == -signal.SIGKILL
    path = plant(private, tmp_path / "run by the payload")
    command_line([*arguments, str(path if arguments[0] in ("inspect", "verify") else private)])
    assert not (tmp_path / "run by the payload").exists()
    if arguments == ["inspect"]:
        shown = capsys.readouterr().out
        assert "callbacks/Describes/encoder, sklearn.preprocessing._label.LabelEncoder" in shown
        assert "callbacks/Describes/where, pathlib.PosixPath" in shown


def renamed(name: str) -> Any:
    """Return an object of a class with this name in this module."""
    kind = type(name, (), {"__module__": __name__, "__qualname__": name})
    globals()[name] = kind
    return kind()


def test_a_class_that_is_gone_is_named(private: Path) -> None:
    """The error names the place and the class, and no older autosave replaces it."""

    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"own": renamed(self.name)}

        name = "Before"

    class KeepsAfterwards(Keeps):
        name = "After"

        @property
        def state_key(self) -> str:
            return Keeps.__qualname__

    def main(callback: Callback, *faults: Callback) -> None:
        fit_net([FaultTolerance(private, every_n_train_steps=1), callback, *faults], private, max_epochs=1)

    assert run(lambda: main(Keeps(), KillAt(3))).exit_code == -signal.SIGKILL
    newest = autosaves(private)[-1]
    ended = run(lambda: main(KeepsAfterwards()))
    assert ended.exit_code == 1
    assert f"Keeps/own, an object of the class {__name__}.Before, can't be recreated from its bytes" in ended.output
    assert autosaves(private)[-1] == newest


def test_what_can_not_be_pickled_is_named(private: Path) -> None:
    """A lambda in the checkpoint is refused at the first boundary, with the reason."""

    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"own": lambda: 1, "path": Path("/data")}

    ended = run(lambda: fit_net([FaultTolerance(private), Keeps()], private))
    assert ended.exit_code == 1
    assert "would not load again with torch.load(weights_only=True)" in ended.output
    assert "/own (function: " in ended.output


class Fragile:
    """Pickles, but can't be unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_the_first_autosave_shows_that_it_can_be_unpickled(private: Path) -> None:
    """An object that pickles but does not unpickle is detected before any batch."""

    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"own": Fragile()}

    ended = run(lambda: fit_net([FaultTolerance(private), Keeps()], private))
    assert ended.exit_code == 1
    assert "can't be recreated from its bytes: ValueError" in ended.output


@pytest.mark.filterwarnings("ignore:.*exists and is not empty")
def test_checkpoints_of_others_hold_what_they_held(private: Path, tmp_path: Path) -> None:
    """ModelCheckpoint's files contain the objects themselves, as without us."""

    def main() -> None:
        writes = ModelCheckpoint(dirpath=tmp_path / "own", save_last=True)
        fit_net([FaultTolerance(private), Describes(), writes], private, max_epochs=1, enable_checkpointing=True)

    assert run(main).exit_code == 0
    checkpoint = torch.load(tmp_path / "own" / "last.ckpt", weights_only=False)
    assert checkpoint["callbacks"]["Describes"]["where"] == Path("/data")
    assert "pickled" not in checkpoint[KEY]


def test_an_autosave_that_the_user_names(private: Path, outside: Path, tmp_path: Path) -> None:
    """A fit with an autosave as its ckpt_path gets its objects, by the same rule."""
    assert fit(private, KillAt(3)).exit_code == -signal.SIGKILL
    own = outside / "own.ckpt"
    own.write_bytes(autosaves(private)[-1].read_bytes())

    def main() -> None:
        fit_net([FaultTolerance(tmp_path / "other"), Describes()], tmp_path, max_epochs=1, ckpt_path=own)

    assert_resumed(run(main))
    own.chmod(0o666)
    assert_refused(run(main), f"{own} is writable by everybody")


class Draws:
    """Draws a random number when it is unpickled."""

    def __setstate__(self, state: Any) -> None:
        torch.rand(1)

    def __getstate__(self) -> Any:
        return {"state": 1}

    def __deepcopy__(self, memo: Any) -> Any:
        return self


def test_showing_it_draws_nothing(private: Path) -> None:
    """The random states do not change, although the first autosave is unpickled."""

    class Keeps(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"own": Draws()}

        def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
            if trainer.global_step == 1:
                print("weights", pl_module.layers[0].weight.sum().item(), flush=True)

    def main(*callbacks: Callback) -> None:
        fit_net([*callbacks, Keeps()], private, max_epochs=1)

    alone, followed = run(main), run(lambda: main(FaultTolerance(private)))
    line = re.compile(r"weights .*")
    assert line.findall(alone.output) == line.findall(followed.output) != []


def test_each_file_of_a_directory_counts(private: Path) -> None:
    """A directory autosave is trusted if only its owner can write to its files; a save sets their modes."""
    directory = private / "autosave"
    directory.mkdir()
    for name in (METADATA_NAME, "__0_0.distcp"):
        (directory / name).write_bytes(b"")
    options: Any = SimpleNamespace(trust_autosaves=None, strict=True)
    trust = Trust(options)
    assert trust.why_not(str(directory)) is None
    (directory / "__0_0.distcp").chmod(0o666)
    assert "__0_0.distcp is writable by everybody" in str(trust.why_not(str(directory)))
    trust.written({"key": b""}, str(directory), is_first=False)
    assert trust.why_not(str(directory)) is None


def test_planted_links_are_not_followed_for_writing(tmp_path: Path) -> None:
    """Whatever link another user puts into a run's directory, no file elsewhere is written; a lock names the link."""
    directory, victims = tmp_path / "saved", tmp_path / "victims"
    victims.mkdir()
    assert fit(directory, KillAt(2)).exit_code == -signal.SIGKILL
    [run_json] = directory.rglob("run.json")
    for name in ("run.json", "history.jsonl", "section-times.json", "run.lock"):
        (victims / name).write_bytes(b"of somebody\n" * (50_000 if name == "history.jsonl" else 1))
        (run_json.parent / name).unlink(missing_ok=True)
        (run_json.parent / name).symlink_to(victims / name)
    before = {path.name: path.read_bytes() for path in victims.iterdir()}
    ended = fit(directory)
    assert ended.exit_code != 0
    assert "It is a link" in ended.output
    (run_json.parent / "run.lock").unlink()
    ended = fit(directory)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly" in ended.output
    assert {path.name: path.read_bytes() for path in victims.iterdir()} == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_file_that_another_user_has_put_there_is_refused(tmp_path: Path) -> None:
    """In a directory that everybody may write to, the owner of a file counts; in one's own, it does not."""
    path = tmp_path / "history.jsonl"
    path.touch()
    os.chown(path, 12345, 12345)
    append_line(path, {})
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match=r"belongs to another user \(12345\)"):
        append_line(path, {})
    assert read_lines(path) == [{}]
