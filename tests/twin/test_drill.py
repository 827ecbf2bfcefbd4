from __future__ import annotations

from pathlib import Path

import pytest

from lightning_faulttolerant.twin import TRANSLATION
from tests.cli.trained import TRAINING, on_training

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize("kind", ["TERM", "KILL"])
def test_script_of_pytorch_lightning_is_drilled(kind: str, tmp_path: Path) -> None:
    """A training with a Trainer of the other package is struck, continues, and ends as if nothing had happened."""
    script = tmp_path / "training.py"
    script.write_text(TRANSLATION.translated(TRAINING.read_text()))
    assert "from pytorch_lightning import" in script.read_text()
    options = ("--kills=1", "--seed=1", f"--signal={kind}")
    found = on_training(tmp_path, "drill", *options, arguments=("--functions=fit",), script=script)
    assert found.exit_code == 0, found.output
    assert f"1 {kind}" in found.output
