"""The story of the guide to branches: a NaN is found with three commands, and a branch trains without it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.cli.replay.replays import Replayed, _start

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "branches.md"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def command(where: Path, *words: str, **variables: str) -> Replayed:
    """Run a command of ours on the script of the page, in its directory."""
    start = f"import os, runpy; os.chdir({str(where)!r}); runpy.run_path('train.py', run_name='__main__')"
    (where / "start.py").write_text(start)
    script = (sys.executable, str(where / "start.py"))
    ours = ("-m", "lightning_faulttolerant", *words, "--", *script) if words else (str(where / "start.py"),)
    return _start(where, *ours, **variables)


def test_the_story_of_the_page(tmp_path: Path) -> None:
    """The code and the commands of the page do what the page says, with its numbers."""
    pytest.importorskip("sklearn")
    page = PAGE.read_text()
    [script] = re.findall(r"```python[^\n]*\n(.*?)```", page, re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    whole = command(tmp_path)
    assert whole.exit_code == 0, whole.output
    assert "loss nan" in whole.output
    replayed = command(tmp_path, "replay", "--from", "0", "--until", "60")
    [first] = re.findall(r"  the first loss that is not finite: (.*)", page)
    assert f"the first loss that is not finite: {first}" in replayed.output
    dumped = command(tmp_path, "replay", "--until", "0:43", "--dump", "step")
    [sample] = re.findall(r"    (input 0: 1 value is not finite, in row \d+ \(sample \d+\))", page)
    assert sample in dumped.output
    (tmp_path / "train.py").write_text(script.replace('= float("nan")  # the mistake', "= 0.0"))
    [variables] = re.findall(r"export (PL_FAULT_TOLERANT_RESUME_FROM=.*)", page)
    branch = command(tmp_path, **dict(word.split("=", 1) for word in variables.split()))
    assert branch.exit_code == 0, branch.output
    assert "This run is a branch of" in branch.output
    assert branch.output.count("is left out, as") == 1
    [loss] = re.findall(r"^loss (.*)$", branch.output, re.MULTILINE)
    assert float(loss) < 2
