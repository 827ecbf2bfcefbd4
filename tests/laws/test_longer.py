"""A finished fit that is started again: it stays as it is, it gets more training, or it says why it can't get it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from syrupy.assertion import SnapshotAssertion

from tests.laws.data_sets import NoisyDataset, Unsized
from tests.laws.rows import Group, Row, all_rows, rows_of
from tests.laws.runs import Start, Training, assert_same
from tests.messages import plain


def fit_and_die(trainer: Trainer, module: LightningModule, group: Group) -> None:
    """Finish a fit, and be killed right after it, so that its autosave stays."""
    trainer.fit(module, **group.data())
    os.kill(os.getpid(), signal.SIGKILL)


def again(row: Row, root: Path, first: dict[str, Any], then: dict[str, Any]) -> Start:
    """Finish a fit with some arguments of the Trainer, and start it again with others."""
    training = Training(group=Group(rows=(row, Row(name="first", trainer=first))), root=root, stage=fit_and_die)
    training.ended(code=-signal.SIGKILL)
    training.group, training.stage = Group(rows=(row, Row(name="then", trainer=then))), "fit"
    return training.start()


PERSISTENT = Row(name="persistent", train=rows_of(24, num_workers=2, persistent_workers=True))
AVERAGED = all_rows()["stochastic weight averaging"]


@pytest.mark.parametrize(("row", "epochs"), [(PERSISTENT, (2, 3)), (AVERAGED, (3, 3))], ids=["longer", "finished"])
def test_started_again(row: Row, epochs: tuple[int, int], tmp_path: Path) -> None:
    """More epochs equal those of one long fit; without more, nothing is trained, and the end is the same."""
    first, then = ({"max_epochs": number} for number in epochs)
    whole = Training(group=Group(rows=(row, Row(name="then", trainer=then))), root=tmp_path / "whole").finished()
    start = again(row, tmp_path / "again", first, then)
    assert start.codes == [0], start.output
    [(_, end)] = assert_same(whole.events, start, name="the second start")
    assert end == len(whole.events[0])
    assert sum(event["kind"] == "batch" for event in start.events[0]) == 6 * (epochs[1] - epochs[0])


def limits(steps: int, epochs: int = -1) -> dict[str, Any]:
    """Return arguments of the Trainer."""
    return {"max_steps": steps, "max_epochs": epochs}


REFUSED: dict[str, Callable[[], tuple[Row, dict[str, Any], dict[str, Any]]]] = {
    "inside an epoch": lambda: (Row(name="steps"), limits(3), limits(10)),
    "averaged": lambda: (AVERAGED, {"max_epochs": 3}, {"max_epochs": 5}),
    "exponential average": lambda: (all_rows()["exponential average"], {"max_epochs": 2}, {"max_epochs": 3}),
    "pruned": lambda: (all_rows()["pruning"], {"max_epochs": 2}, {"max_epochs": 3}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_that_cannot_be_longer(name: str, tmp_path: Path, snapshot: SnapshotAssertion) -> None:
    """More training is refused where the end of the fit is not where more of it would begin."""
    if name == "exponential average" and name not in all_rows():
        pytest.skip("Lightning 2.5 has none")
    row, first, then = REFUSED[name]()
    start = again(row, tmp_path, first, then)
    assert start.codes == [1], start.output
    assert not start.events[0]
    assert plain(start.output.rpartition("Error: ")[2], DIR=tmp_path) == snapshot


# From files of a fit that ``max_steps`` or ``max_epochs`` has ended.


def files() -> list[ModelCheckpoint]:
    """Return callbacks that save after each epoch and after each batch."""
    named: dict[str, Any] = {"save_top_k": -1, "filename": "{step}", "auto_insert_metric_name": False}
    return [ModelCheckpoint("epochs", **named), ModelCheckpoint("batches", every_n_train_steps=1, **named)]


def fit(root: Path, trainer: dict[str, Any], path: str | None = None, *, strict: bool = True, **values: Any) -> Start:
    """Fit 5 batches an epoch up to a limit, from a file, and not from an autosave."""
    trainer = {"limit_val_batches": 0, "enable_checkpointing": True, **trainer}
    row = Row(name="cut", callbacks=files, trainer=trainer, **{"train": rows_of(20), **values})
    training = Training(group=Group(rows=(row,)), root=root, ckpt_path=None if path is None else root / path)
    for each in (*root.rglob("autosave-*"), *root.glob("start-*")):
        each.unlink()
    return training.start(strict=strict)


UNSIZED: dict[str, Any] = {"train": lambda: Unsized(NoisyDataset(20), batch_size=4, shuffle=True)}


@pytest.mark.parametrize(("data", "more"), [({}, limits(9)), (UNSIZED, limits(-1, 3))], ids=["steps", "epochs"])
def test_file_of_a_closed_epoch_is_refused_if_more_follows(
    data: dict[str, Any], more: dict[str, Any], tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    """With more steps, the rest of the epoch would be lost: the error says so, and what to resume from."""
    assert fit(tmp_path, limits(3), **data).codes == [0]
    refused = fit(tmp_path, more, "epochs/3.ckpt", **data)
    assert refused.codes == [1], refused.output
    assert plain(refused.output.rpartition("NotExactError: ")[2], DIR=tmp_path) == snapshot
    if data:
        return
    lenient = fit(tmp_path, more, "epochs/3.ckpt", strict=False)
    assert lenient.codes == [0], lenient.output
    assert "NOT EXACTLY" in lenient.output
    [end] = [each for each in fit(tmp_path, limits(3), "epochs/3.ckpt").events[0] if each["kind"] == "end"]
    assert end["step"] == 3, "nothing is lost"


@pytest.mark.parametrize(
    ("path", "first", "whole", "values"),
    [
        ("batches/3.ckpt", limits(3), limits(8), {}),
        ("batches/3.ckpt", limits(3), limits(8), UNSIZED),
        ("epochs/5.ckpt", limits(5), limits(8), UNSIZED),
    ],
    ids=["batch", "batch, unsized", "whole epoch"],
)
def test_other_files_continue(path: str, first: Any, whole: Any, values: Any, tmp_path: Path) -> None:
    """A file of a batch gives the rest of its epoch, and that of an epoch which was whole continues with the next."""
    expected = fit(tmp_path / "whole", whole, **values)
    assert fit(tmp_path / "cut", first, **values).codes == [0]
    continued = fit(tmp_path / "cut", whole, path, **values)
    assert continued.codes == [0], continued.output
    [(begin, end)] = assert_same(expected.events, continued, name="the continued fit")
    assert begin > 0
    assert end == len(expected.events[0])
