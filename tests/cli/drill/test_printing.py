from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_faulttolerant.cli.drill import result
from lightning_faulttolerant.cli.drill.command import print_result
from lightning_faulttolerant.cli.drill.result import (
    Cause,
    Difference,
    DrillResult,
    DrillVerdict,
    PlainProgress,
    RichProgress,
    Status,
    Value,
    progress_on,
)
from tests.cli.drill.made import strike

ADVICE = "Keep a generator in an attribute of the data set, so that it is found, and not in a global of the module."


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True


def drill_result(word: str, **verdict: Any) -> DrillResult:
    """Return a drill with this verdict."""
    return DrillResult(
        command=("python", "train.py"),
        verdict=DrillVerdict(
            word=word, text="A sentence that says what came of it, long enough to be broken " * 2, **verdict
        ),
        strikes=(strike(2),),
        num_wanted=1,
        kind="KILL",
        seed=1,
        began=0.0,
        seconds=1.0,
        directory="/tmp/drill",
    )


def printed(found: DrillResult, stream: io.StringIO, *, is_kept: bool = False) -> str:
    """Return the printed text of the drill."""
    print_result(found, stream, is_kept=is_kept)
    return stream.getvalue()


def test_a_verdict_fits_a_terminal() -> None:
    """No line has more than 80 columns, whatever the verdict, and values, cause, and advice are all shown."""
    values = tuple(Value(name=f"metric {number}", expected="0." + "1" * 30, found="none") for number in range(12))
    difference = Difference(
        place="batch 3 of epoch 0",
        number=3,
        rank=1,
        values=values,
        equal=("order of the samples", "content of the batch", "random generators"),
        num_equal=3,
        process=1,
    )
    cause = Cause(part="augmentation", text=ADVICE, advice=(ADVICE, ADVICE))
    text = printed(
        drill_result(result.DIFFERS, difference=difference, cause=cause, notes=(ADVICE,)), io.StringIO(), is_kept=True
    )
    assert max(map(len, text.splitlines())) <= 80
    assert "Likely cause: augmentation" in text
    assert "and 4 more values" in text
    assert "on rank 1: 3 batches, 1 of them after a restart" in text
    assert "/tmp/drill" in text
    assert " ".join(text.split()).count(ADVICE) == 4


def test_the_verdict_has_a_colour_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a pipe, or with NO_COLOR set, no control character for a terminal is written."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[1;32mEXACT" in printed(drill_result(result.EXACT), Terminal())
    assert "\x1b" not in printed(drill_result(result.EXACT), io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(drill_result(result.EXACT), Terminal())


def test_plain_progress_says_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of text come when a run begins and ends, and every ten seconds."""
    clock = iter([0.0, 1.0, 12.0, 13.0])
    # Not the shared clock: a thread of some client may read that at any moment.
    own = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("lightning_faulttolerant.cli.drill.result.time", own)
    stream = io.StringIO()
    progress = PlainProgress(stream)
    for done in range(4):
        progress.update(Status(run="interrupted", done=done, num_batches=9, num_wanted=2, saved=1))
    progress.end(Status(run="interrupted", done=9, num_strikes=2, num_wanted=2), 75.0)
    assert stream.getvalue().splitlines() == [
        "interrupted: started",
        "interrupted: batch 2 of 9, 0 of 2 strikes, autosave at 1",
        "interrupted    9 batches, 2 strikes, 75 s",
    ]


def test_live_progress_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal with rich, all that is known is in two lines of less than 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with progress_on(Terminal()) as progress:
        assert isinstance(progress, RichProgress)
    monkeypatch.setenv("TERM", "dumb")  # without the codes that move lines and color them
    status = Status(
        run="uninterrupted",
        done=123_456,
        num_batches=1_234_567,
        num_strikes=3,
        num_wanted=10,
        saved=123_400,
        batches_per_second=123.4,
    )
    stream = Terminal()
    with RichProgress(stream) as progress:
        progress._console.print(progress._lines(status))
    lines = stream.getvalue().splitlines()
    assert any("batch 123,456 of 1,234,567" in line for line in lines)
    assert any("3 of 10 strikes, autosave at 123,400, 123 batches/s" in line for line in lines)
    assert max(map(len, lines)) < 80


@pytest.mark.parametrize(
    ("stream", "terminal"),
    [(io.StringIO(), "xterm"), (Terminal(), ""), (Terminal(), "dumb"), (Terminal(), "unknown")],
    ids=["a pipe", "without rich", "a dumb terminal", "an unknown terminal"],
)
def test_progress_is_plain_where_no_lines_can_move(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, terminal: str
) -> None:
    """Without rich, a viewer, or a terminal that can move lines, lines are written."""
    monkeypatch.setenv("TERM", terminal)
    if not terminal:
        monkeypatch.setattr("lightning_faulttolerant.cli.drill.result.find_spec", lambda _: None)
    with progress_on(stream) as progress:
        assert isinstance(progress, PlainProgress)
