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
    """Script and arguments decide, not how the interpreter was called; the id is valid."""
    one = default_run_id(["train.py", *arguments], {})
    assert one == default_run_id(["/elsewhere/train.py", *arguments], {"HOME": "/root"})
    assert check_run_id(one) == one
    assert one.startswith("train-")


@settings(max_examples=20, deadline=None)
@given(one=st.lists(st.text(alphabet="ab -=", max_size=4), max_size=3), other=st.data())
def test_other_arguments_other_run(one: list[str], other: st.DataObject) -> None:
    """Another list of arguments is another run, even if both lists read alike when joined."""
    two = other.draw(st.lists(st.text(alphabet="ab -=", max_size=4), max_size=3))
    same = default_run_id(["train.py", *one], {}) == default_run_id(["train.py", *two], {})
    assert same == (one == two)


def test_other_script_other_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Scripts with the same name in two directories are two runs."""
    one = default_run_id(["train.py"], {})
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "other" / "train.py"))
    assert default_run_id(["train.py"], {}) != one


@pytest.mark.parametrize("variable", ARRAYS)
def test_each_task_of_an_array_is_a_run(variable: str) -> None:
    """Tasks of one array differ; a task that is submitted again, with a new job id, is the same run."""
    tasks = [default_run_id(["train.py"], {variable: str(n), "SLURM_JOB_ID": "77"}) for n in range(3)]
    assert len({*tasks, default_run_id(["train.py"], {})}) == 4
    assert default_run_id(["train.py"], {variable: "1", "SLURM_JOB_ID": "78"}) == tasks[1]


def test_variable_names_the_run() -> None:
    """The environment's run id is used as it is; an empty one does not count; a bad one is refused."""
    assert default_run_id(["train.py", "--x"], {"PL_FAULT_TOLERANT_RUN_ID": "mine"}) == "mine"
    empty = default_run_id(["train.py"], {"PL_FAULT_TOLERANT_RUN_ID": ""})
    assert empty == default_run_id(["train.py"], {})
    with pytest.raises(ValueError, match=r"got '\.\./mine'"):
        default_run_id(["train.py"], {"PL_FAULT_TOLERANT_RUN_ID": "../mine"})


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


def test_interactive_session_is_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook without a script, the arguments are the kernel's own and don't count."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    assert default_run_id(["kernel", "/tmp/1.json"], {}) == default_run_id(["kernel", "/tmp/2.json"], {})
    assert default_run_id(["kernel"], {}).startswith("interactive-")


@pytest.mark.parametrize("name", ["Fälle.py", "my train.py", "-.py", "a" * 200 + ".py", "...py"])
def test_script_of_any_name_gives_a_good_id(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The id can name a directory, whatever the script's name is."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / name))
    check_run_id(default_run_id(["x"], {}))


@pytest.mark.parametrize("run_id", ["", ".", "..", "a/b", "a\\b", "-a", ".a", "a b", "ä", "a\n", "a" * 129])
def test_bad_ids_are_refused(run_id: str) -> None:
    """An id that can't name a directory everywhere, or leads out of it, is refused with its value."""
    with pytest.raises(ValueError, match="run_id must be 1 to 128 letters") as error:
        check_run_id(run_id)
    assert repr(run_id) in str(error.value)


@pytest.mark.parametrize("run_id", ["a", "0", "A.b_c-d", "a" * 128])
def test_good_ids_are_kept(run_id: str) -> None:
    """Good ids come back unchanged."""
    assert check_run_id(run_id) == run_id
