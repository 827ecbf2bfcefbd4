"""After a resume inside an epoch, progress bars show the position of the run, and the report has lines of its own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from tests.laws.cuts import Cut
from tests.laws.rows import Group, Row
from tests.laws.runs import Training


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


def test_bar_that_is_switched_off_stays_so(tmp_path: Path) -> None:
    """A bar that is switched off shows nothing after a resume either."""
    training = training_with(lambda: TQDMProgressBar(refresh_rate=0), tmp_path)
    training.more = list
    training.start(Cut(at=(0, 3)))
    assert "Epoch" not in training.finished().output
