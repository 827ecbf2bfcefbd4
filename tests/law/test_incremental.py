"""Incremental autosaves: the law holds whoever changes a tensor that is not trained, and whatever happens to a file."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import nn

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint import increments
from lightning_faulttolerant.checkpoint.archive import VERSION_RECORD, RecordWriter
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.records.runs import RESUME_FROM_VARIABLE, VARIABLE
from lightning_faulttolerant.testing import NotTheSame, assert_resumes_exactly
from lightning_faulttolerant.testing.processes import run_ranks
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.cli.checkpoints import call
from tests.modules import FrozenNet
from tests.processes import Ended, run
from tests.rank_runs import SECONDS, for_ranks, rank_fit
from tests.runs import fit_net
from tests.scripts import autosaves, protection, tell, told, weights
from tests.sharded import ShardedNet, fsdp2

INCREMENTAL = {"every_n_train_steps": 1, "incremental": True}


class Wide(FrozenNet):
    """Has a frozen table that is far larger than all the rest."""

    def __init__(self) -> None:
        super().__init__(changes=False)
        self.table = nn.Parameter(torch.randn(300_000), requires_grad=False)


def fit(callbacks: list[Callback], directory: Path, **arguments: Any) -> Any:
    """Fit `FrozenNet` for two epochs of 5 batches."""
    return fit_net(callbacks, directory, module=FrozenNet(), **arguments)


def fit_blindly(callbacks: list[Callback], directory: Path) -> Any:
    """Fit the same, but take every tensor for unchanged."""
    increments.is_equal = lambda *_: True  # type: ignore[attr-defined,assignment]  # in its own process
    return fit(callbacks, directory)


def test_a_change_that_is_not_saved_is_found() -> None:
    """The law sees it if the comparison misses what a frozen tensor became: a negative control."""
    with pytest.raises(NotTheSame, match=r"Event .* of the interrupted run differs"):
        assert_resumes_exactly(fit_blindly, [KillAt(4)], options=INCREMENTAL)


@for_ranks[0]
@for_ranks[1]
@pytest.mark.slow
def test_ranks_continue_exactly() -> None:
    """Rank 0 writes for all, and each rank reads the base."""
    fit_ranks = rank_fit(2, module=FrozenNet, max_epochs=1)
    costs = assert_resumes_exactly(fit_ranks, [KillAt(3)], options=INCREMENTAL, num_ranks=2, timeout_seconds=SECONDS)
    assert [cost.exit_code for cost in costs] == [-signal.SIGKILL]


def _main(directory: Path, *faults: Callback, module: type[LightningModule] = Wide, **options: Any) -> Ended:
    def main() -> None:
        if "resume_from" in options:
            os.environ[RESUME_FROM_VARIABLE] = options.pop("resume_from")
        own = protection(**{**INCREMENTAL, "dirpath": directory / "saved", **options})
        trainer = fit_net([*own, *faults], directory, module=module())
        tell(directory, "weights", weights(trainer))

    return run(main)


def bases(directory: Path) -> list[Path]:
    """Return the bases below a directory."""
    return list(directory.rglob("base-*.tensors"))


def test_the_files_are_small(tmp_path: Path) -> None:
    """Two bases contain the frozen tensors, and each autosave a hundredth of them; the end leaves no file."""
    ended = _main(tmp_path, KillAt(4))
    assert ended.exit_code == -signal.SIGKILL, ended.output
    assert [path.stat().st_size > 1_200_000 for path in bases(tmp_path)] == [True, True]
    assert [path.stat().st_size < 100_000 for path in autosaves(tmp_path)] == [True, True]
    ended = _main(tmp_path)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly" in ended.output
    assert (autosaves(tmp_path), bases(tmp_path)) == ([], [])


def test_files_of_hostile_depth_or_size_are_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON of any depth and length is read like any damage: by the commands, and by a resume from an older autosave."""
    deep, registry = b"[" * 200_000 + b"\n", tmp_path / "registry"
    for name in ("expected", "found"):
        (tmp_path / name).mkdir()
    _main(tmp_path / "expected")
    monkeypatch.setenv(VARIABLE, str(registry))
    assert _main(tmp_path / "found", KillAt(4)).exit_code == -signal.SIGKILL
    _, newest = autosaves(tmp_path)
    with open(newest, "wb") as file:
        writer = RecordWriter(file)
        for name, content in (("data.pkl", b"\x80\x02K\x03."), ("base.json", deep), VERSION_RECORD):
            writer.add(name, [memoryview(content)])
        writer.end()
    [run_json] = tmp_path.rglob("run.json")
    run_json.write_bytes(deep)
    for name in ("section-times.json", "history.jsonl", "run.lock"):
        with open(run_json.parent / name, "ab") as file:
            file.write(deep)
    (registry / "deep.json").write_bytes(deep)
    (registry / "large.json").touch()
    os.truncate(registry / "large.json", 1 << 36)
    for command, *arguments in (["list"], ["verify"], ["report"], ["prune", "--keep-last", 1, "--dry-run"]):
        assert call(capsys, command, tmp_path / "found", *arguments).status in (0, 1)
    assert "damaged" in call(capsys, "inspect", newest).err
    ended = _main(tmp_path / "found")
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly before batch 3 of epoch 0" in ended.output
    assert told(tmp_path / "found", "weights") == told(tmp_path / "expected", "weights")


def test_kept_ones_and_branches_and_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the end, kept autosaves load, a branch begins from one, and a plain file of one continues alone."""
    assert _main(tmp_path, module=FrozenNet, keep_every=4).exit_code == 0
    [expected] = told(tmp_path, "weights")
    kept = autosaves(tmp_path)
    assert [load_file(path)["global_step"] for path in kept] == [4, 8]
    ended = _main(tmp_path, module=FrozenNet, resume_from=str(kept[1]))
    assert (ended.exit_code, told(tmp_path, "weights")[1]) == (0, expected), ended.output

    plain = tmp_path / "plain.ckpt"
    exported = call(capsys, "export", kept[0], plain)
    assert (exported.status, exported.err) == (0, "")
    content = torch.load(plain, weights_only=True)
    assert content["global_step"] == 4

    def main(*callbacks: Callback) -> None:
        if not callbacks:  # Lightning alone warns that it starts the epoch's loader over
            warnings.simplefilter("ignore")
        trainer = fit_net([*callbacks], tmp_path / "plain", module=FrozenNet(), ckpt_path=plain)
        tell(tmp_path, "weights", weights(trainer))

    for callbacks in ((FaultTolerance(),), ()):
        ended = run(lambda callbacks=callbacks: main(*callbacks))
        assert ended.exit_code == 0, ended.output
    assert told(tmp_path, "weights")[2] == expected  # without the callback, Lightning restores less


@for_ranks[0]
@for_ranks[1]
@pytest.mark.slow
def test_shards_are_written_whole(tmp_path: Path) -> None:
    """A strategy that shards says at its first save that the argument has no effect."""

    def main(_: int) -> None:
        own = FaultTolerance(tmp_path / "saved", **INCREMENTAL)
        fit_ranks = rank_fit(2, module=ShardedNet, strategy=fsdp2(), max_epochs=1, limit_train_batches=2)
        fit_ranks([own], tmp_path)

    outputs = [tmp_path / f"{rank}.txt" for rank in range(2)]
    code = run_ranks(main, outputs=outputs, seed=1, timeout_seconds=100)
    said = outputs[0].read_text()
    assert code == 0, said
    assert "incremental=True has no effect with a strategy that shards: its autosaves are written whole." in said
