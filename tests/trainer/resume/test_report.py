"""The report shows at a glance whether a resume was exact, and if not, why."""

from __future__ import annotations

from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant import ResumeReport
from lightning_faulttolerant.trainer.log import tell_resumed

PLACE = {"position": "before batch 3 of epoch 1", "epoch": 1, "batch": 3, "global_step": 11}
CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "exact": ({"seconds": 0.125}, True),
    "a note is no blemish": ({"notes": ("threads: 4, then 8",)}, True),
    "two reasons": ({"not_exact": ("metrics: gone", "loader: other"), "notes": ("other CPU",)}, False),
    "inherited and lost": ({"inherited": ("a",), "objects": ("b: gone",)}, False),
    "many": ({"not_exact": tuple("abcde")}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_report_and_console(case: str, caplog: pytest.LogCaptureFixture, snapshot: SnapshotAssertion) -> None:
    """The console has a line or two; each reason and note has a line in the whole report, which is at DEBUG."""
    arguments, is_exact = CASES[case]
    report = ResumeReport(path="run/autosave-3.ckpt", restored=("random generators", "loaders"), **PLACE, **arguments)
    with caplog.at_level("DEBUG"):
        tell_resumed(report, ["surroundings: 1, then 2"] if case == "exact" else [], is_own=False)
    assert report.is_exact is is_exact
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == snapshot
    assert str(report) == caplog.messages[-1]
