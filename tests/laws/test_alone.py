"""The law for what no row can show: steps that fetch their batches, a cut that was found, and progress bars."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar
from torch import Tensor

from tests.laws.cuts import Cut
from tests.laws.rows import Group, Net, Row, all_rows, rows_of
from tests.laws.runs import Training, assert_continues, whole_run


class Fetches(Net):
    """Takes two batches a step from the iterator itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        fetched = [next(dataloader_iter) for _ in range(2)]
        loss = torch.stack([self.loss(batch) for batch, _, _ in fetched]).sum()
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        return loss


def test_steps_that_fetch(tmp_path: Path) -> None:
    """The steps of a module that fetches its batches continue."""
    group = Group(rows=(Row(name="fetches", module=Fetches, train=rows_of(48), warns=(".*dataloader_iter",)),))
    [whole] = whole_run(group, tmp_path)
    training = Training(group=group, root=tmp_path / "cut")
    training.ended(Cut(at=(1, 3)))
    [events] = training.finished().events
    steps, rest = ([event for event in each if event["kind"] == "trained"] for each in (whole, events))
    assert rest == steps[-len(rest) :]  # the other events show the batch before
    assert 0 < len(rest) < 6


def test_cut_that_hypothesis_found(tmp_path: Path) -> None:
    """An exception of a start that a kill has cut before, and that a stop ends after it, costs nothing."""
    group = Group(rows=(all_rows()["Outputs"],))
    cuts = [Cut(at=(0, 0), hook="step"), Cut(at=(0, 1), by=0, hook="backward"), Cut(at=(1, 4), by=signal.SIGINT)]
    assert_continues(whole_run(group, tmp_path), Training(group=group, root=tmp_path / "cut"), cuts)


class Looks(Callback):
    """Writes what the bar shows when a batch begins: batches done, their total, and its text."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        bar: Any = trainer.progress_bar_callback.train_progress_bar
        is_tqdm = isinstance(trainer.progress_bar_callback, TQDMProgressBar)
        shown = [bar.n, bar.total, bar.desc] if is_tqdm else [bar.completed, bar.total, bar.description]
        with open("shown.jsonl", "a") as file:
            print(json.dumps([trainer.current_epoch, batch_idx, *shown]), file=file)


BARS: dict[str, Callable[[], ProgressBar]] = {
    "tqdm": TQDMProgressBar,
    "rich that leaves": lambda: RichProgressBar(leave=True),
}


def training_with(bar: Callable[[], ProgressBar], root: Path, *, with_callback: bool = True) -> Training:
    """Return a training with a bar."""
    row = Row(name="bar", callbacks=bar, trainer={"enable_progress_bar": True})
    return Training(group=Group(rows=(row,)), root=root, with_callback=with_callback, more=lambda: [Looks()])


@pytest.mark.parametrize("bar", BARS)
def test_bar_continues(bar: str, tmp_path: Path) -> None:
    """Position and total are the uninterrupted run's at each batch; in that epoch the text says where it resumed."""
    training = training_with(BARS[bar], tmp_path / "cut")
    training.start(Cut(at=(0, 3)))
    output = training.finished().output
    whole = training_with(BARS[bar], tmp_path / "whole", with_callback=False)
    whole.finished()
    expected, found = (
        [json.loads(line) for line in (one.root / "shown.jsonl").read_text().splitlines()] for one in (whole, training)
    )
    assert [line[:4] for line in found] == [line[:4] for line in expected]
    assert expected[1][:4] == [0, 1, 1, 6]
    for epoch, _, _, _, text in found[3:]:
        assert re.match(rf"Epoch {epoch}\b", text)
        assert ("resumed at 3" in text) == (epoch == 0)
    assert "-00:00" not in output  # and no rate is below 0
    assert re.search(r"(^|[\r\n])(INFO: )?Resumed exactly before batch 3 of epoch 0, [^\r\n|]*\n", output), output
