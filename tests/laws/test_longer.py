"""A finished fit that is started again: it stays as it is, it gets more epochs, or it says why it can't get them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningModule, Trainer
from syrupy.assertion import SnapshotAssertion

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
    assert training.start().codes == [-signal.SIGKILL], training.starts[0].output
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


REFUSED: dict[str, Callable[[], tuple[Row, dict[str, Any], dict[str, Any]]]] = {
    "inside an epoch": lambda: (
        Row(name="steps"), {"max_epochs": -1, "max_steps": 3}, {"max_epochs": -1, "max_steps": 10},
    ),
    "averaged": lambda: (AVERAGED, {"max_epochs": 3}, {"max_epochs": 5}),
    "exponential average": lambda: (all_rows()["exponential average"], {"max_epochs": 2}, {"max_epochs": 3}),
    "pruned": lambda: (all_rows()["pruning"], {"max_epochs": 2}, {"max_epochs": 3}),
}  # fmt: skip


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
