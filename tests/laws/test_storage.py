"""The law wherever and however autosaves are written: on a disk, in a store, in the background, in part."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.emulators import EMULATORS, WARNING
from tests.laws.cuts import At, Cut, on_sync
from tests.laws.events import Broken
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import Training, assert_continues, whole_run
from tests.messages import plain

CUTS = [Cut(at=(0, 3)), Cut(at=(0, 5), hook="validation"), Cut(at=(1, 1), by=signal.SIGTERM), Cut(at=(1, 4), every=3)]


class Frozen(Net):
    """Has frozen tensors that training changes unnoticed: through ``.data``, through NumPy, through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.through_data = nn.Parameter(torch.ones(600), requires_grad=False)
        self.through_numpy = nn.Parameter(torch.ones(600), requires_grad=False)
        whole = torch.ones(20, 40)
        self.register_buffer("whole", whole)
        self.register_buffer("transposed", whole.t()[3:])
        self.register_buffer("narrow", torch.ones(1000, dtype=torch.bfloat16))
        self.register_buffer("nothing", torch.zeros(0))
        self.tied = nn.Linear(256, 8).requires_grad_(False)
        self.also_tied = nn.Linear(256, 8).requires_grad_(False)
        self.also_tied.weight = self.tied.weight

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.through_data.data[3] *= 1.5
            self.through_numpy.detach().numpy()[-1] += 0.25
            self.transposed[0, 0] += 0.5
            self.narrow[7] += 1
        frozen = self.through_data.sum() + self.through_numpy.sum() + self.whole.sum() + self.narrow.float().sum()
        return super().training_step(batch + 0.001 * frozen + self.tied(torch.ones(256)).mean(), batch_idx)


PLAIN = Group(rows=(Row(name="frozen", module=Frozen), Row(name="shuffled", train=rows_of(24))))
WORKERS = Group(rows=(Row(name="two workers", train=rows_of(32, num_workers=2)),))

OPTIONS: dict[str, dict[str, Any]] = {
    "at once": {},
    "in the background": {"async_save": True},
    "only what has changed": {"incremental": True},
    "changes in the background": {"async_save": True, "incremental": True},
    "one kept": {"keep_last": 1},
}


def assert_stored(group: Group, root: Path, where: dict[str, Any] | None = None, **options: Any) -> None:
    """Check the law with these options, with the autosaves of the run that is cut in another place."""
    repeats = 12 if "async_save" in options else 1
    group = Group(rows=(*group.rows, Row(name="options", options=options, repeats=repeats)))
    elsewhere = Group(rows=(*group.rows, Row(name="where", options=where or {})))
    assert_continues(whole_run(group, root), Training(group=elsewhere, root=root / "cut"), CUTS)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_on_a_disk(options: dict[str, Any], tmp_path: Path) -> None:
    """However a save is written, the run continues from it exactly."""
    assert_stored(PLAIN, tmp_path, **options)


@pytest.mark.parametrize("group", [PLAIN, pytest.param(WORKERS, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("options", [{}, pytest.param({"async_save": True}, marks=pytest.mark.slow)], ids=str)
def test_in_a_store(s3: str, group: Group, options: dict[str, Any], tmp_path: Path) -> None:
    """A run below a URL continues exactly, and so does one that is killed during an upload."""
    assert_stored(group, tmp_path, {"dirpath": f"{s3}/run"}, **options)


@pytest.mark.slow
@pytest.mark.filterwarnings(WARNING)
@pytest.mark.parametrize("name", sorted(EMULATORS))
def test_in_each_store(emulated: Callable[[str], str], name: str, tmp_path: Path) -> None:
    """The same holds in Azure's store, in Google's, and in another S3."""
    assert_stored(PLAIN, tmp_path, {"dirpath": f"{emulated(name)}/run"})


# A disk that is full for a while.


def fill(training: Training, first: tuple[int, int], last: tuple[int, int]) -> None:
    """Let the disk of a training be full from one batch to another."""
    mark = training.root / "full"

    def strike(in_background: bool) -> None:
        if mark.exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    training.before = on_sync(strike)
    actions = {first: mark.touch, last: lambda: mark.unlink(missing_ok=True)}
    training.more = lambda: [At(actions)]


@pytest.mark.parametrize("options", [{}, {"async_save": True}, {"keep_last": 1}], ids=str)
def test_full_disk(options: dict[str, Any], tmp_path: Path) -> None:
    """While a disk is full, the run trains on and says so once; killed then or later, it continues exactly."""
    group = Group(rows=(*PLAIN.rows, Row(name="options", options=options, repeats=12)))
    training = Training(group=group, root=tmp_path / "cut")
    fill(training, (0, 2), (1, 1))
    cuts = [Cut(at=(0, 4)), Cut(at=(1, 3))]
    assert_continues(whole_run(group, tmp_path), training, cuts)
    [killed, full, _] = training.starts
    assert "No space left on device" in killed.output
    assert full.output.count("could not be saved") == full.output.count("Autosaves can be written again") == 1


def test_stop_on_a_full_disk(tmp_path: Path) -> None:
    """A stop that can't save says by how much the last autosave is older, and has an exit code of its own."""
    training = Training(group=PLAIN, root=tmp_path / "cut")
    fill(training, (0, 3), (9, 9))
    start = training.start(Cut(at=(0, 5), by=signal.SIGTERM))
    assert start.codes == [74], start.output
    assert "The last autosave, before batch 3 of epoch 0, is 3 batches older." in start.output


# Damage.


def autosaves(root: Path) -> list[Path]:
    """Return the autosaves of a run, the newest last."""
    return sorted(root.rglob("autosave-*.ckpt"), key=lambda path: path.name)


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("num_damaged", [1, 2])
def test_damaged_autosaves(incremental: bool, num_damaged: int, tmp_path: Path) -> None:
    """A damaged autosave costs the work of one interval; if all are damaged, that is an error, not a fresh start."""
    group = Group(rows=(*PLAIN.rows, Row(name="options", options={"incremental": incremental}, repeats=2)))
    whole = whole_run(group, tmp_path)
    training = Training(group=group, root=tmp_path / "cut")
    assert training.start(Cut(at=(0, 4))).codes == [-signal.SIGKILL]
    for path in autosaves(training.root)[-num_damaged:]:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        content[len(content) // 2 + 300] ^= 1  # one of them is no padding
        path.write_bytes(content)
    if num_damaged == 2:
        with pytest.raises(Broken, match="NoValidCheckpointError"):
            training.finished()
        return
    start = training.finished()
    assert start.events[0] == whole[0][-len(start.events[0]) :]
    assert ".damaged" in plain(start.output, DIR=training.root)
