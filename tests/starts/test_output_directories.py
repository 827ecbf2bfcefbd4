"""Each start writes to a directory of its own; the same command continues all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.starts.started import Project, assert_same_fit, plain, stopped_twice


@pytest.mark.takes_long("four processes import torch and Lightning")
def test_a_directory_named_by_the_time(tmp_path: Path) -> None:
    """``default_root_dir=f"runs/{time}"``: the run is found although its directory is a new one."""
    project = Project(tmp_path / "project")
    starts = stopped_twice(project, "timed.py")
    whole = plain("timed.py")
    assert_same_fit(whole, starts)
    assert project.rows() == whole.rows
