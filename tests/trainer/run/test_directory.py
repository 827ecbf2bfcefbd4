"""The same command is the same run; any other command is another run."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from lightning_faulttolerant.trainer.identity.starts import start_of_process
from lightning_faulttolerant.trainer.run.directory import check_run_id, run_id_of

ARRAYS = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "LSB_JOBINDEX", "SGE_TASK_ID")


@pytest.fixture(autouse=True)
def _script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make this process look as if it was started with a script."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False)


def default_run_id(argv: list[str], environment: Mapping[str, str]) -> str:
    """Return the run id of a command."""
    return run_id_of(None, start_of_process(argv, environment).run_id, environment)


@settings(max_examples=20, deadline=None)
@given(arguments=st.lists(st.text(max_size=20), max_size=5))
def test_same_command_same_run(arguments: list[str]) -> None:
    """Script and arguments decide, also if they read alike when joined, not how Python was called; the id is valid."""
    one = default_run_id(["train.py", *arguments], {})
    assert one == default_run_id(["/elsewhere/train.py", *arguments], {"HOME": "/root"})
    assert check_run_id(one) == one
    assert one.startswith("train-")
    assert default_run_id(["train.py", "a b"], {}) != default_run_id(["train.py", "a", "b"], {})


@pytest.mark.parametrize("variable", ARRAYS)
def test_each_task_of_an_array_is_a_run(variable: str) -> None:
    """Tasks of one array differ; a task that is submitted again, with a new job id, is the same run."""
    tasks = [default_run_id(["train.py"], {variable: str(n), "SLURM_JOB_ID": "77"}) for n in range(3)]
    assert len({*tasks, default_run_id(["train.py"], {})}) == 4
    assert default_run_id(["train.py"], {variable: "1", "SLURM_JOB_ID": "78"}) == tasks[1]


@pytest.mark.parametrize(
    ("own", "expected"), [(None, "drill-1-interrupted"), ("mine", "drill-1-interrupted-mine"), ("a" * 128, None)]
)
def test_a_drill_has_its_own_runs(own: str | None, expected: str | None) -> None:
    """This holds even if the script names its run: two names give two runs, and neither is an existing one."""
    variables = {"PL_FAULT_TOLERANT_RUN_ID": "drill-1-interrupted"}
    assert run_id_of(own, "train-0", variables) == (own or "drill-1-interrupted")
    drilled = run_id_of(own, "train-0", {**variables, "PL_FAULT_TOLERANT_DRILL": "drill-1-interrupted-0"})
    assert check_run_id(drilled).startswith("drill-1-interrupted")
    assert drilled != own
    assert expected in (None, drilled)
    assert drilled != run_id_of("a" * 127 + "b", "train-0", {**variables, "PL_FAULT_TOLERANT_DRILL": "x"})


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "a\\b", "-a", ".a", "a b", "ä", "a\n", "a" * 129])
def test_bad_ids_are_refused(run_id: str) -> None:
    """An id that can't name a directory everywhere, or leads out of it, is refused with its value."""
    with pytest.raises(ValueError, match="run_id must be 1 to 128 letters") as error:
        check_run_id(run_id)
    assert repr(run_id) in str(error.value)
