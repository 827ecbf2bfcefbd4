"""``export`` makes one plain file of an autosave; ``inspect`` and ``prune`` know the bases of incremental ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.checkpoint.autosave_files import bases_in
from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from tests.cli.checkpoints import call, checkpoint, save, save_series, told

Capture = pytest.CaptureFixture[str]
NUM_VALUES = 3000


def incremental(folder: Any, *steps: int) -> list[str]:
    """Save incremental autosaves of these steps, and return their paths."""
    series = AutosaveSeries(folder, keep_last=100, incremental=True)
    for step in steps:
        content = checkpoint(step=step, batch=step)
        content["state_dict"]["frozen"] = torch.arange(NUM_VALUES)
        series.save(content, epoch=0, batch=step, global_step=step)
    return series.paths()


def test_the_output_is_plain(tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion) -> None:
    """It loads without a base, with everything in it; a plain autosave is copied byte by byte; both may be URLs."""
    paths = incremental(tmp_path / "fit-1", 1, 2)
    output = tmp_path / "out" / "plain.ckpt"
    found = call(capsys, "export", paths[1], output)
    assert told(found, DIR=tmp_path) == snapshot
    assert f"{os.path.getsize(output) / 1000:.3g} kB" in found.out
    content = torch.load(output, weights_only=True)
    assert content["global_step"] == 2
    assert torch.equal(content["state_dict"]["frozen"], torch.arange(NUM_VALUES))
    assert call(capsys, "verify", output).out == f"{output}: verified\n"
    assert os.listdir(output.parent) == ["plain.ckpt"]
    [path] = save_series(tmp_path / "fit-2", 1)
    url = f"memory://export-{tmp_path.name}/plain.ckpt"
    assert call(capsys, "export", path, url).status == 0
    assert call(capsys, "export", url, tmp_path / "copy.ckpt").status == 0
    assert (tmp_path / "copy.ckpt").read_bytes() == Path(path).read_bytes()


def test_what_is_not_exported(tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion) -> None:
    """An output that exists is never replaced; a missing autosave and a directory are named."""
    [path] = incremental(tmp_path / "fit-1", 1)
    other = save(tmp_path / "other.ckpt")
    before = other.read_bytes()
    pairs = [(path, output) for output in (other, path, tmp_path / "fit-1", f"{tmp_path}/new/")]
    pairs += [(tmp_path / "none.ckpt", tmp_path / "plain.ckpt"), (tmp_path, tmp_path / "plain.ckpt")]
    found = [call(capsys, "export", *pair) for pair in pairs]
    assert {each.status for each in found} == {2}
    assert "\n".join(told(each, DIR=tmp_path) for each in found) == snapshot
    assert other.read_bytes() == before


@pytest.mark.parametrize("what", ["base", "autosave", "no base"])
def test_damage_is_not_exported(tmp_path: Path, capsys: Capture, what: str) -> None:
    """The status says so, and there is no output."""
    [path] = incremental(tmp_path / "fit-1", 1)
    [name] = bases_in(os.listdir(tmp_path / "fit-1"))
    base = tmp_path / "fit-1" / name
    if what == "no base":
        base.unlink()
    else:
        file = base if what == "base" else Path(path)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    found = call(capsys, "export", path, tmp_path / "plain.ckpt")
    assert (found.status, found.out) == (1, "")
    assert name in found.err or what == "autosave"
    assert not (tmp_path / "plain.ckpt").exists()
    assert call(capsys, "verify", path).status == 1


def test_inspect_names_the_base(tmp_path: Path, capsys: Capture) -> None:
    """With what it contains for this autosave; a plain one has none."""
    [path] = incremental(tmp_path / "fit-1", 1)
    [base] = bases_in(os.listdir(tmp_path / "fit-1"))
    assert f"base             {base}, with 1 of its tensors, 24 kB" in call(capsys, "inspect", path).out
    shown = json.loads(call(capsys, "inspect", path, "--json").out)
    assert shown["base"] == {"name": base, "num_tensors": 1, "num_bytes": 24000}
    assert json.loads(call(capsys, "inspect", save(tmp_path / "a.ckpt"), "--json").out)["base"] is None


def test_pruning_deletes_a_base_with_its_last_autosave(tmp_path: Path, capsys: Capture) -> None:
    """And only then; a dry run tells it, and deletes nothing."""
    folder = tmp_path / "run" / "fit-1"
    incremental(folder, 1, 2, 3)
    old = sorted(bases_in(os.listdir(folder)))
    assert call(capsys, "prune", tmp_path, "--keep-last", 2).lines[-1].startswith("1 autosave deleted")
    assert sorted(bases_in(os.listdir(folder))) == old
    incremental(folder, 4)
    freed = {name: f"{os.path.getsize(folder / name) / 1000:.3g} kB" for name in old}
    dry = call(capsys, "prune", tmp_path, "--keep-last", 1, "--dry-run")
    assert all(f"would delete {name}, {size}" in dry.out for name, size in freed.items())
    assert set(old) < set(os.listdir(folder))
    found = call(capsys, "prune", tmp_path, "--keep-last", 1)
    assert all(f"deleted {name}, {size}" in found.out for name, size in freed.items())
    [left], [new] = folder.glob("autosave-*"), bases_in(os.listdir(folder))
    assert new not in old
    assert call(capsys, "verify", left).status == 0
