"""Objects in an autosave are unpickled only if no other user could have written it, or if the user allows it."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.cli import main as command_line
from lightning_faulttolerant.state.packing import blob_to_tensor
from tests.damage import Payload
from tests.laws.starts import Script, Start, one, slow_half, told

pytestmark = pytest.mark.filterwarnings("ignore:.*exists and is not empty")
AT = (0, 3)
TRUST = {"PL_FAULT_TOLERANT_TRUST": "1"}
SOMEBODY = 12345


class Encoder:
    def __init__(self) -> None:
        self.classes = ["left", "right"]


class Describes(Callback):
    """Has an encoder in its state, and prints what it is after a restore."""

    def state_dict(self) -> dict[str, Any]:
        return {"encoder": Encoder()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        print("got back", state_dict["encoder"].classes, flush=True)


@pytest.fixture
def outside() -> Iterator[Path]:
    """Other users can enter this directory, unlike pytest's own: all may write to `shared`, and nobody to `private`."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o755)
        for name, mode in (("private", 0o755), ("shared", 0o777)):
            (Path(directory) / name).mkdir()
            os.chmod(f"{directory}/{name}", mode)
        yield Path(directory)


def at(where: str, cut: Any = None, **more: Any) -> Start:
    """Return a start whose autosaves are in a directory."""
    fit = {"callbacks": Describes, "max_epochs": 1}
    start = {name: more.pop(name) for name in ("before", "environment", "callbacks", "ckpt") if name in more}
    return one(cut, options={"dirpath": where, **more}, **{**fit, **start})


def newest(root: Path) -> Path:
    """Return the newest autosave."""
    return max(root.rglob("autosave-*.ckpt"))


def mode(mode: int, find: Callable[[Path], Path] = newest) -> Callable[[Path], object]:
    """Return what changes the mode of the newest autosave, or of something else."""
    return lambda root: find(root).chmod(mode)


def pastes(root: Path) -> None:
    """Execute the lines that the refusal of the first start gives."""
    lines = re.findall(
        r"^    ((?:import|from) .*|torch\.serialization\..*)$", (root / "start-0.txt").read_text(), re.MULTILINE
    )
    exec("\n".join(lines), {})


def copies(root: Path) -> None:
    """Make the newest autosave the user's own checkpoint."""
    (root / "own.ckpt").write_bytes(newest(root).read_bytes())


SCENARIOS: dict[str, list[Start]] = {
    "private": [at("private", AT), at("private")],
    "lines of the refusal": [at("shared"), at("shared", AT, before=pastes), at("shared", before=pastes)],
    "granted by variable": [at("shared", AT, environment=TRUST), at("shared", environment=TRUST)],
    "store": [at("memory://runs"), at("memory://runs", trust_autosaves=True)],
    "not strict": [at("shared", AT, strict=False), at("shared", strict=False), at("shared", trust_autosaves=True)],
    "file opened later": [at("private", AT), at("private", before=mode(0o666)), at("private", before=mode(0o644))],
    "file of somebody else": [
        at("private", AT), at("private", before=lambda root: os.chown(newest(root), SOMEBODY, 0)),
    ],
    "autosave as ckpt_path": [
        at("private", AT), at("other", before=copies, ckpt="own.ckpt"),
        at("third", before=mode(0o666, lambda root: root / "own.ckpt"), ckpt="own.ckpt"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", slow_half(SCENARIOS))
def test_trust(name: str, outside: Path, snapshot: SnapshotAssertion) -> None:
    """A start gets its objects back, or is refused before any batch with each object, the reason, and the remedy."""
    if name == "file of somebody else" and os.geteuid() != 0:
        pytest.skip("only root may give files away")
    assert told(outside, SCENARIOS[name]) == snapshot


def plant(root: Path) -> None:
    """Make the newest autosave run code when its objects are unpickled."""
    checkpoint = load_file(newest(root))
    pickled = checkpoint["lightning_faulttolerant"]["pickled"]["callbacks/Describes/encoder"]
    pickled["pickle"] = blob_to_tensor(pickle.dumps(Payload(root / "ran")))
    torch.save(checkpoint, newest(root))


@pytest.mark.parametrize(("where", "options", "runs"), [("shared", {}, False), ("shared", {"strict": False}, False),
                                                        ("private", {}, True)])  # fmt: skip
def test_what_others_have_planted_is_never_run(
    where: str, options: dict[str, Any], runs: bool, outside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted code does not run from where others can write; elsewhere it would, but no command runs it."""
    script = Script(outside)
    script.start(at(where, AT, trust_autosaves=True))
    plant(outside)
    for command in ("inspect", "inspect --json", "verify"):
        command_line([*command.split(), str(newest(outside))])
    for command in ("list", "report", "prune --dry-run --keep-last 1"):
        command_line([*command.split(), str(outside / where)])
    assert "callbacks/Describes/encoder, tests.laws.test_trust.Encoder" in capsys.readouterr().out
    assert not (outside / "ran").exists()
    script.start(at(where, **options))
    assert (outside / "ran").exists() == runs


def test_planted_links_are_not_followed_for_writing(outside: Path) -> None:
    """Whatever link another user puts into a run's directory, no file elsewhere is written; a lock names the link."""
    script, victims = Script(outside), outside / "victims"
    victims.mkdir()
    script.start(one(AT))
    [directory] = [path.parent for path in outside.rglob("run.json")]
    for name in ("run.json", "history.jsonl", "section-times.json", "run.lock"):
        (victims / name).write_bytes(b"of somebody\n" * (50_000 if name == "history.jsonl" else 1))
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(victims / name)
    before = {path.name: path.read_bytes() for path in victims.iterdir()}
    assert script.start(one()) == 1
    assert "It is a link" in script.said()
    (directory / "run.lock").unlink()
    assert script.start(one()) == 0
    assert "Resumed exactly" in script.said()
    assert {path.name: path.read_bytes() for path in victims.iterdir()} == before
