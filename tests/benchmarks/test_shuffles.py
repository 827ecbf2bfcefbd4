"""What the page of the shuffles says of them is measured, and the page holds what is measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import shuffles

DOCS = Path(__file__).parents[2] / "docs"


def test_open_shards_are_those_that_are_read_before_and_again() -> None:
    """Counted by hand on an order of six samples."""
    assert shuffles.open_shards(np.array([0, 1, 0, 2, 1, 2])).tolist() == [1, 2, 2, 2, 2, 1]


def test_the_page_holds_what_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The orders are the same on every machine, and so are the table and what it says of the default."""
    monkeypatch.setattr(shuffles, "NUM_EPOCHS", 1)
    page = (DOCS / "shuffles.md").read_text(encoding="utf-8")
    for case in shuffles.CASES[:4]:
        found = shuffles.measure(case)
        row = shuffles.table({case.name: found}).splitlines()[-1]
        assert row.rpartition(" | ")[0] in page
    (tmp_path / "shuffles.md").write_text("<!-- table -->\n<!-- end -->\n", encoding="utf-8")
    monkeypatch.setattr(shuffles, "CASES", shuffles.CASES[:2])
    shuffles.main(["--output", str(tmp_path)])
    assert "the default" in (tmp_path / "shuffles.md").read_text(encoding="utf-8")
    assert (tmp_path / "shuffles.svg").stat().st_size < 200_000
