"""The report shows at a glance whether a resume was exact, and if not, why."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_faulttolerant import ResumeReport
from lightning_faulttolerant.trainer.log import tell_resumed


def make(**arguments: object) -> ResumeReport:
    """Return a report of an exact resume, except for `arguments`."""
    defaults = {
        "path": "run/autosave-3.ckpt",
        "position": "before batch 3 of epoch 1",
        "epoch": 1,
        "batch": 3,
        "global_step": 11,
        "restored": ("random generators", "loaders"),
    }
    return ResumeReport(**{**defaults, **arguments})


def test_exact_resume_reads_as_one() -> None:
    """The report shows place, step, seconds, file and parts, and no part that is not exact."""
    report = make(seconds=0.125)
    assert report.is_exact
    assert str(report).splitlines() == [
        "Resumed exactly before batch 3 of epoch 1, global step 11, in 0.12 s",
        "  from      run/autosave-3.ckpt",
        "  restored  random generators, loaders",
    ]


def test_each_reason_has_its_line() -> None:
    """A part that is not exact changes the verdict, and each reason and note has its own line."""
    report = make(not_exact=("metrics: gone", "loader: other"), notes=("threads: 4, then 8",))
    assert not report.is_exact
    lines = str(report).splitlines()
    assert lines[0].startswith("Resumed NOT EXACTLY before batch 3")
    assert lines[3:] == [
        "  NOT EXACT metrics: gone",
        "  NOT EXACT loader: other",
        "  note      threads: 4, then 8",
    ]


def test_note_alone_is_no_blemish() -> None:
    """Another machine is worth a note, but the state is still exact."""
    assert make(notes=("other CPU",)).is_exact


def test_report_cant_be_changed() -> None:
    """A report can't be changed."""
    with pytest.raises(AttributeError):
        make().epoch = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ({}, []),
        ({"notes": ("other CPU",)}, []),
        ({"not_exact": ("a", "b")}, ["  NOT EXACT a; b"]),
        ({"inherited": ("a",), "objects": ("b: gone",)}, ["  NOT EXACT a; without b: gone"]),
        ({"not_exact": tuple("abcde")}, ["  NOT EXACT a; b; c; 2 more in the report"]),
    ],
)
def test_console_has_one_line_or_two(
    arguments: dict[str, Any], lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A resume prints what it resumed from where, and in a second line what is not exact; the rest is at DEBUG."""
    report = make(**arguments)
    with caplog.at_level("DEBUG"):
        tell_resumed(report, is_own=False)
    [console, debug] = caplog.records
    verdict = "NOT EXACTLY" if lines else "exactly"
    first = f"Resumed {verdict} before batch 3 of epoch 1, global step 11, from run/autosave-3.ckpt"
    assert console.getMessage().splitlines() == [first, *lines]
    assert (debug.levelname, debug.getMessage()) == ("DEBUG", str(report))


def test_surroundings_that_differ_are_on_the_console(caplog: pytest.LogCaptureFixture) -> None:
    """What may change the last bits is a second line, although the state is exact."""
    with caplog.at_level("INFO"):
        tell_resumed(make(), ["threads: 1, then 2"], is_own=False)
    assert caplog.messages[0].endswith("from run/autosave-3.ckpt\n  note threads: 1, then 2")
