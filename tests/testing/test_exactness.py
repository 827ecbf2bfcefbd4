"""`assert_resumes_exactly` counts what an interruption costs, and works in a plain script, without pytest."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lightning.pytorch import Callback

from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.harness import python
from tests.runs import fit_net

ROOT = Path(__file__).parents[2]
_SCRIPT = """
from lightning_faulttolerant.testing import KillAt, assert_resumes_exactly
from tests.runs import fit_net

print(assert_resumes_exactly(fit_net, [KillAt(4)], options={"every_n_train_steps": 1}))
"""


def test_runs_of_a_plain_script_do_not_find_each_other(tmp_path: Path) -> None:
    """A script must get the cost of its interruption, and then find nothing else in its directory."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = python.Command(
        words=[sys.executable, str(script)],
        directory=str(tmp_path),
        environment=environment | {"PWD": str(tmp_path), "PYTHONPATH": str(ROOT)},
    )
    exit_code, output = python.run(command, scratch=tmp_path.parent / f"{tmp_path.name}-output")
    assert exit_code == 0, output
    assert output.count("Interruption(") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_killed_in_the_middle_of_an_epoch() -> None:
    """A run that is killed in the middle of an epoch continues exactly."""
    [cost] = assert_resumes_exactly(fit_net, [KillAt(4)], options={"every_n_train_steps": 1})
    assert (cost.exit_code, cost.epoch, cost.batch, cost.num_batches_twice) == (-9, 0, 4, 1)


class Fails(Callback):
    num_begun = 0

    def on_train_batch_start(self, *_):
        self.num_begun += 1
        assert self.num_begun < 3


def test_a_fault_counts_what_happens_in_its_process() -> None:
    """A user's callback that interrupts a run does not continue with it."""
    costs = assert_resumes_exactly(fit_net, [Fails(), Fails()], options={"every_n_train_steps": 1})
    assert [cost.batch for cost in costs] == [2, 4]
