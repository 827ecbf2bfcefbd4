"""The report shows at a glance whether a resume was exact, and if not, why."""

from __future__ import annotations

import pytest

from lightning_faulttolerant import ResumeReport
from lightning_faulttolerant.trainer.resume.report import OBJECTS, ORDER


def make(**arguments: object) -> ResumeReport:
    """Return a report of an exact resume, except for `arguments`."""
    defaults = {
        "path": "run/autosave-3.ckpt",
        "position": "before batch 3 of epoch 1",
        "epoch": 1,
        "batch": 3,
        "global_step": 11,
        "exact": ("random generators", "loaders"),
    }
    return ResumeReport(**{**defaults, **arguments})


def test_exact_resume_reads_as_one() -> None:
    """The report shows place, step, seconds, file and parts, and no part that is not exact."""
    report = make(seconds=0.125)
    assert report.is_exact
    assert str(report).splitlines() == [
        "Resumed exactly before batch 3 of epoch 1, global step 11, in 0.12 s",
        "  from      run/autosave-3.ckpt",
        "  exact     random generators, loaders",
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
    ("reason", "lost"),
    [
        ("metrics: nothing to restore 'a' into", "metrics"),
        ("module.parameters.a: [1] when it was saved, [2] now", "weights"),
        ("optimizers.0.lr: 1 when it was saved, 2 now", "optimizers"),
        ("train/0.num_workers: 2 when it was saved, 0 now", ORDER),
        ("something else", ""),
    ],
)
def test_what_is_not_exact_is_no_longer_among_what_is(reason: str, lost: str) -> None:
    """A part with a reason against it isn't listed as exact; the others are."""
    parts = ("weights", "optimizers", "metrics", ORDER, OBJECTS)
    assert make(exact=parts).as_known_now([reason], []).exact == tuple(part for part in parts if part != lost)


def test_reasons_of_loaders_and_objects() -> None:
    """A reason from a loader is about the order; objects that were not restored are about the objects."""
    report = make(exact=(ORDER, OBJECTS)).as_known_now([], ["any"])
    assert (report.exact, report.not_exact) == ((OBJECTS,), ("any",))
    assert make(exact=(ORDER, OBJECTS), objects=("any",)).as_known_now([], []).exact == (ORDER,)
