"""`assert_resumes_exactly` works in a plain script, without pytest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.harness import python

_SCRIPT = """
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly


def fit(callbacks, directory):
    trainer = Trainer(callbacks=callbacks, default_root_dir=directory, max_epochs=2, limit_val_batches=0,
                      enable_checkpointing=False, logger=False, enable_progress_bar=False,
                      enable_model_summary=False)
    data = torch.arange(192.0).reshape(6, 32) / 192
    trainer.fit(BoringModel(), torch.utils.data.DataLoader(data, batch_size=2, shuffle=True))
    return trainer


print(assert_resumes_exactly(fit, [KillAt(4)], options={"every_n_train_steps": 1}))
"""


def test_runs_of_a_plain_script_do_not_find_each_other(tmp_path: Path) -> None:
    """A script must get the cost of its interruption, and then find nothing else in its directory."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = python.Command(
        words=[sys.executable, str(script)], directory=str(tmp_path), environment=environment | {"PWD": str(tmp_path)}
    )
    exit_code, output = python.run(command, scratch=tmp_path.parent / f"{tmp_path.name}-output")
    assert exit_code == 0, output
    assert output.count("Interruption(") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
