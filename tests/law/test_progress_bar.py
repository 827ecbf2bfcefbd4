"""After a resume in the middle of an epoch, progress bars show the run's position."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar, TQDMProgressBar

from tests.hook_saves import assert_continues_from, saver
from tests.kills import run_whole_and_killed
from tests.runs import fit_net


class Look(Callback):
    """Records the bar when a batch begins: batches done, their total, and its text."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        bar = trainer.progress_bar_callback
        if isinstance(bar, TQDMProgressBar):
            tqdm = bar.train_progress_bar
            shown = [tqdm.n, tqdm.total, tqdm.desc]
        else:
            task = bar.train_progress_bar
            shown = [task.completed, task.total, task.description]
        with open(self.path, "a") as file:
            file.write(json.dumps([trainer.current_epoch, batch_idx, *shown]) + "\n")


class OwnText(TQDMProgressBar):
    """A user's bar with its own text, which prints a line when an epoch begins."""

    def init_train_tqdm(self) -> Any:
        bar = super().init_train_tqdm()
        bar.set_description("mine")
        return bar

    def on_train_epoch_start(self, trainer: Any, *args: Any) -> None:
        super().on_train_epoch_start(trainer, *args)
        print(f"begins epoch {trainer.current_epoch}")


BARS: dict[str, Callable[[], ProgressBar]] = {
    "tqdm": TQDMProgressBar,
    "tqdm that leaves": lambda: TQDMProgressBar(leave=True),
    "user's": OwnText,
    "rich": RichProgressBar,
    "rich that leaves": lambda: RichProgressBar(leave=True),
}


@pytest.mark.parametrize("kill", [3, 8])
@pytest.mark.parametrize("bar", BARS)
def test_bar_continues(bar: str, kill: int, tmp_path: Path) -> None:
    """Position and total equal the uninterrupted run's at each batch; in that epoch the text says where it resumed."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        bars: list[Callback] = [BARS[bar](), Look(directory / f"shown-{len(callbacks)}.jsonl")]
        fit_net([*bars, *callbacks], directory, enable_progress_bar=True)

    runs = run_whole_and_killed(main, tmp_path, [kill])
    whole, resumed = (
        [json.loads(line) for line in path.read_text().splitlines()]
        for path in (runs.whole / "shown-0.jsonl", runs.killed / "shown-1.jsonl")
    )
    assert [line[:4] for line in resumed] == [line[:4] for line in whole[kill:]]
    assert [line[:4] for line in whole[:2]] == [[0, 0, 0, 5], [0, 1, 1, 5]]
    assert "-00:00" not in runs.outputs[-1]  # and no rate is below 0
    epoch, batch = divmod(kill, 5)
    for number, _, _, _, text in resumed:
        assert re.match(rf"Epoch {number}\b", text)
        assert (f"resumed at {batch}" in text) == (number == epoch)
    assert f"begins epoch {epoch}" not in runs.outputs[-1]


@pytest.mark.parametrize("is_in_background", [False, True])
@pytest.mark.parametrize(
    ("bar", "hook"),
    [
        ("tqdm", "on_train_epoch_start"),
        ("tqdm", "on_train_batch_end"),
        ("tqdm", "on_validation_end"),
        ("rich", "on_validation_end"),
        ("tqdm that leaves", "on_train_epoch_end"),
    ],
)
def test_bar_is_no_obstacle_after_a_save_in_a_hook(bar: str, hook: str, is_in_background: bool) -> None:
    """A run resumes from a checkpoint of any hook, whether or not the bar's own hook has run by then."""

    def users() -> list[Callback]:
        both = [saver(hook, 1), BARS[bar]()]
        return both if is_in_background else both[::-1]

    assert_continues_from(hook, users=users, enable_progress_bar=True)


@pytest.mark.parametrize("bar", ["tqdm", "rich"])
def test_report_does_not_tear_the_bar(bar: str, tmp_path: Path) -> None:
    """The report is printed once, in separate lines."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        fit_net([BARS[bar](), *callbacks], directory, enable_progress_bar=True)

    output = run_whole_and_killed(main, tmp_path, [3]).outputs[-1]
    assert len(re.findall("Resumed exactly", output)) == 1
    assert re.search(
        r"(^|[\r\n])(INFO: )?Resumed exactly before batch 3 of epoch 0, [^\r\n|]*discard [^\r\n|]*\n", output
    ), output
    assert re.search(r"[\r\n](INFO: )?A kill repeats at most [^\r\n|]*\n", output), output


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_bar_that_is_switched_off_stays_so(bar: type[Any], tmp_path: Path) -> None:
    """A bar that is switched off shows nothing after a resume either."""

    def main(callbacks: list[Callback], directory: Path) -> None:
        fit_net([bar(refresh_rate=0), *callbacks], directory, enable_progress_bar=True)

    output = run_whole_and_killed(main, tmp_path, [3]).outputs[-1]
    assert "resumed at" not in output
    assert "Epoch" not in output
