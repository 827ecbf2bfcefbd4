"""``inspect`` shows what a checkpoint holds, without loading it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.ranks import as_bytes, joined
from tests.cli.checkpoints import Result, call, checkpoint, foreign, save, told
from tests.damage import Payload

Capture = pytest.CaptureFixture[str]


class Net(BoringModel):
    """Has hyperparameters that don't load with ``weights_only=True``."""

    def __init__(self, folder: Path = Path("/data")) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_what_a_real_run_has_saved_is_shown(tmp_path: Path, capsys: Capture) -> None:
    """The JSON gives all parts of an autosave, as loading would."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"accelerator": "cpu", "default_root_dir": tmp_path, "limit_val_batches": 0, "limit_train_batches": 4}
    callback = FaultTolerance(tmp_path, run_id="mine", every_n_train_steps=1, keep_last=1)
    Trainer(max_epochs=1, enable_checkpointing=False, callbacks=[callback], **quiet).fit(Net())
    [path] = (tmp_path / "mine" / "fit-1").glob("autosave-*")
    shown = json.loads(call(capsys, "inspect", path, "--json").out)
    loaded = torch.load(path, weights_only=True)
    ours, mine = loaded["lightning_faulttolerant"], shown["fault_tolerance"]
    for name in ("version", "world_size", "position", "run", "origin", "surroundings", "fingerprint"):
        assert mine[name] == json.loads(json.dumps(ours[name])), name
    assert list(mine["ranks"][0]) == [name for name in ours["ranks"][0] if name != "blobs"]
    assert mine["opaque"] == {"hyper_parameters": ours["opaque"]["hyper_parameters"].numel()}
    assert shown["num_parameters"] == sum(p.numel() for p in Net().parameters())
    assert (list(shown["keys"]), shown["global_step"]) == (list(loaded), loaded["global_step"])
    assert (shown["lightning"], shown["num_bytes"]) == (loaded["pytorch-lightning_version"], os.path.getsize(path))


def lossy() -> dict[str, Any]:
    """Return a checkpoint of two ranks that says what a resume from it would lack."""
    said = {"inexact": ["the hook of Other"], "pending": ["Mine.on_train_batch_end"]}
    return checkpoint(world_size=2, remarks={"module.rows: a generator": "without"}, **said)


[RANK] = checkpoint()["lightning_faulttolerant"]["ranks"]
SHOWN = {
    "whole": checkpoint(step=12, epoch=1, batch=4, world_size=2, origin="/pretrained.ckpt"),
    "not exact": lossy(),
    "ranks as bytes": checkpoint(world_size=2, **joined([RANK, as_bytes({**RANK, "more": torch.zeros(10)})])),
    "for a terminal": {**foreign(), "key\x07": 1},
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_file_holds(name: str, tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion) -> None:
    """The text gives position, run, ranks, parts with sizes, surroundings, fingerprint, keys, and what is lost."""
    found = call(capsys, "inspect", save(tmp_path / "a.ckpt", SHOWN[name]))
    assert (found.status, all(line.isprintable() for line in found.lines)) == (0, True)
    assert told(found, DIR=tmp_path) == snapshot


def test_keys_that_do_not_fit_are_counted(tmp_path: Path, capsys: Capture) -> None:
    """Of more than 40 keys, the rest is counted."""
    for number in (0, 1):
        keys = dict.fromkeys(map(str, range(40 + number - len(foreign()))), 1)
        out = call(capsys, "inspect", save(tmp_path / "a.ckpt", {**foreign(), **keys})).out
        assert (out.count("more; --json shows all"), out.count("and 1 more;")) == (number, number)


def test_json_sums_nothing(tmp_path: Path, capsys: Capture) -> None:
    """It has the parts of each rank with their bytes, and what is lost of any."""
    ranks = checkpoint(world_size=2, ranks=[RANK, {**RANK, "more": torch.zeros(10)}])
    parts = json.loads(call(capsys, "inspect", save(tmp_path / "a.ckpt", ranks), "--json").out)
    ranks = parts["fault_tolerance"]["ranks"]
    assert [sorted(state) for state in ranks] == [["flags", "metrics", "rng"], ["flags", "metrics", "more", "rng"]]
    assert (ranks[0]["rng"], ranks[1]["more"]) == (185, 40)
    shown = json.loads(call(capsys, "inspect", save(tmp_path / "b.ckpt", lossy()), "--json").out)["fault_tolerance"]
    assert (shown["inexact"], shown["pending"]) == (["the hook of Other"], ["Mine.on_train_batch_end"])
    assert shown["remarks"] == {"module.rows: a generator": "without"}


def test_code_in_a_file_is_not_run(tmp_path: Path, capsys: Capture) -> None:
    """A file with an object that would run code when loaded is shown, and runs nothing."""
    struck, path = tmp_path / "struck", tmp_path / "a.ckpt"
    torch.save(checkpoint(run=Payload(struck)), path)
    found = call(capsys, "inspect", path)
    assert (found.status, struck.exists(), "posix.mkdir" in found.out) == (0, False, True)
    torch.load(path, weights_only=False)
    assert struck.exists()


BOMB: list[Any] = ["x"]  # it would unfold to billions
for _ in range(60):
    BOMB = [BOMB, BOMB]
CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)
STRANGE = {
    "a list": [1, 2],
    "keys of all kinds": {1: 2, (3, 4): 5, None: float("nan"), "part": float("inf")},
    "numbers that JSON has not": checkpoint(run=float("nan"), origin=float("-inf")),
    "our part is a list": {"lightning_faulttolerant": [1]},
    "ranks are numbers": checkpoint(ranks=[1, 2], position=3, opaque="x", fingerprint=[]),
    "lists are numbers": checkpoint(inexact="no", pending=7, remarks=7),
    "large numbers": checkpoint(run=1 << 5000, version=-(1 << 70)),
    "blobs out of range": checkpoint(
        ranks=[{"rng": {"blob": 99}, "held": {"blob": -1}, "blobs": {"lengths": ["x", 10**30]}}]
    ),
    "unfolding": checkpoint(fingerprint={"circle": CIRCLE}, run=BOMB),
}


@pytest.mark.parametrize("name", STRANGE)
def test_strange_files_are_shown_all_the_same(tmp_path: Path, capsys: Capture, name: str) -> None:
    """Any content of a file is shown as text and as valid JSON of limited size, without a traceback."""
    path = tmp_path / "a.ckpt"
    torch.save(STRANGE[name], path)
    assert call(capsys, "inspect", path).status == 0
    found = call(capsys, "inspect", path, "--json")
    assert (found.status, len(found.out) < 10_000_000) == (0, True)
    json.loads(found.out, parse_constant=pytest.fail)


def test_what_is_no_checkpoint_is_an_error(tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion) -> None:
    """A missing file, an empty directory, a text, and a cut file give status 2, no output, and a message."""
    text, cut = tmp_path / "text", save(tmp_path / "more" / "cut.ckpt", foreign())
    text.write_text("hello")
    os.truncate(cut, 1000)
    found: list[Result] = [call(capsys, "inspect", path) for path in (tmp_path / "missing", tmp_path, text, cut)]
    assert [(each.status, each.out) for each in found] == [(2, "")] * 4
    assert "\n".join(told(each, DIR=tmp_path) for each in found) == snapshot
