"""A fit that ``max_steps`` ended in the middle of an epoch is trained on only from where the rest of it still comes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from syrupy.assertion import SnapshotAssertion

from tests.laws.data_sets import NoisyDataset, Unsized
from tests.laws.rows import Group, Net, Row, rows_of
from tests.laws.runs import Start, Training, assert_same
from tests.messages import plain


class Skips(Net):
    """Skips the rest of an epoch from its third batch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def unsized() -> Any:
    """Return a loader of 5 batches that has no length."""
    return Unsized(NoisyDataset(20), batch_size=4, shuffle=True)


def files() -> list[ModelCheckpoint]:
    """Return callbacks that save after each epoch and after each batch."""
    named: dict[str, Any] = {"save_top_k": -1, "filename": "{step}", "auto_insert_metric_name": False}
    return [ModelCheckpoint("epochs", **named), ModelCheckpoint("batches", every_n_train_steps=1, **named)]


def start(root: Path, path: str | None = None, *, train: Any = None, module: Any = None, **arguments: Any) -> Start:
    """Fit up to a limit, from a file, and not from an autosave."""
    limits = {"max_epochs": -1, "limit_val_batches": 0, "enable_checkpointing": True, **arguments}
    strict = limits.pop("strict", True)
    row = Row(name="cut", train=train or rows_of(20), module=module, callbacks=files, trainer=limits)
    training = Training(group=Group(rows=(row,)), root=root, ckpt_path=None if path is None else root / path)
    for each in root.rglob("autosave-*"):
        each.unlink()
    for each in root.glob("start-*"):
        each.unlink()
    return training.start(strict=strict)


@pytest.mark.parametrize("more", [{"max_steps": 9}, {"max_steps": -1, "max_epochs": 3}], ids=["steps", "epochs"])
@pytest.mark.parametrize("data", [{}, {"limit_train_batches": 4}, {"train": unsized}], ids=["", "limited", "unsized"])
def test_file_of_a_closed_epoch_is_refused_if_more_follows(
    data: dict[str, Any], more: dict[str, Any], tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """With more steps, the rest of the epoch would be lost: the error says so, and what to resume from."""
    assert start(tmp_path, max_steps=3, **data).codes == [0]
    refused = start(tmp_path, "epochs/3.ckpt", **{**data, **more})
    assert refused.codes == [1], refused.output
    assert plain(refused.output.rpartition("NotExactError: ")[2], DIR=tmp_path) == snapshot
    if not data and "max_epochs" not in more:
        lenient = start(tmp_path, "epochs/3.ckpt", strict=False, **more)
        assert lenient.codes == [0], lenient.output
        assert "NOT EXACTLY" in lenient.output
        again = start(tmp_path, "epochs/3.ckpt", max_steps=3)
        assert [each["step"] for each in again.events[0] if each["kind"] == "end"] == [3], "nothing is lost"


@pytest.mark.parametrize(
    ("path", "first", "whole", "arguments"),
    [
        ("batches/3.ckpt", {"max_steps": 3}, {"max_steps": 8}, {}),
        ("batches/3.ckpt", {"max_steps": 3}, {"max_steps": 8}, {"train": unsized}),
        ("epochs/5.ckpt", {"max_steps": 5}, {"max_steps": 8}, {"train": unsized}),
        ("epochs/2.ckpt", {"max_epochs": 1}, {"max_epochs": 2}, {"module": Skips}),
    ],
    ids=["batch", "batch, unsized", "whole epoch", "epoch that a hook ended"],
)
def test_other_files_continue(path: str, first: Any, whole: Any, arguments: Any, tmp_path: Path) -> None:
    """A file of a batch gives the rest of its epoch, and that of an epoch which was whole continues with the next."""
    expected = start(tmp_path / "whole", **whole, **arguments)
    assert start(tmp_path / "cut", **first, **arguments).codes == [0]
    continued = start(tmp_path / "cut", path, **whole, **arguments)
    assert continued.codes == [0], continued.output
    [(begin, end)] = assert_same(expected.events, continued, name="the continued fit")
    assert begin > 0
    assert end == len(expected.events[0])
