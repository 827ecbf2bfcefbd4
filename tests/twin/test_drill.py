from __future__ import annotations

from pathlib import Path

import pytest

from lightning_faulttolerant.cli.drill import result
from lightning_faulttolerant.twin import TRANSLATION
from tests.cli.drill import real_drills

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kind", ["TERM", "KILL"])
def test_script_of_pytorch_lightning_is_drilled(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training with a Trainer of the other package is struck, continues, and ends as if nothing had happened."""
    script = tmp_path / "training.py"
    script.write_text(TRANSLATION.translated(real_drills.TRAINING.read_text()))
    assert "from pytorch_lightning import" in script.read_text()
    monkeypatch.setattr(real_drills, "TRAINING", script)
    found = real_drills.drill(tmp_path, kind=kind)
    assert found.verdict.word == result.EXACT, found.verdict
    assert found.strikes[0].resumed_at > 0
