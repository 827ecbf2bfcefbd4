from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.run import Suite, describe, find_files

FILES = {
    "test_good.py": "def test_one(): pass\n\ndef test_two(tmp_path): assert tmp_path.is_dir()\n",
    "test_bad.py": "def test_one(): pass\n\ndef test_two(): assert 'this' == 'that'\n",
    "test_dies.py": "import os, signal\n\ndef test_it():\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "test_exits.py": "import os\n\ndef test_it():\n    os._exit(0)\n",
    "test_broken.py": "import a_module_that_is_not_there\n",
    "test_main.py": "import sys\n\ndef test_it(): assert not hasattr(sys.modules['__main__'], '__file__')\n",
    "test_empty.py": "",
}


def make_suite(directory: Path, *options: str, num_jobs: int = 2) -> Suite:
    """Return a suite of the files above."""
    for name, source in FILES.items():
        (directory / name).write_text(source)
    (directory / "run").mkdir()
    common = ["-q", "-c", "/dev/null", f"--rootdir={directory}", "--import-mode=importlib"]
    options = (*common, *options)
    return Suite(num_jobs=num_jobs, options=[*options], directory=directory / "run")


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    """A suite of the files above."""
    return make_suite(tmp_path)


def run(suite: Suite, tmp_path: Path, *names: str) -> None:
    """Run some of the files."""
    suite.run({name: [str(tmp_path / name)] for name in names})


def test_outcomes_are_added_up(suite: Suite, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each file runs its tests. A failure is named immediately, and printed in full at the end."""
    run(suite, tmp_path, "test_good.py", "test_bad.py", "test_empty.py")
    assert suite.reports["test_good.py"].outcomes == {"passed": 2}
    assert suite.reports["test_bad.py"].outcomes == {"passed": 1, "failed": 1}
    assert "test_empty.py" not in suite.reports
    [failure] = suite.failures.values()
    assert "assert 'this' == 'that'" in failure
    assert "not passed: test_bad.py::test_two" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["test_dies.py", "test_exits.py", "test_broken.py"])
def test_a_file_that_does_not_come_to_its_end_is_a_failure(suite: Suite, tmp_path: Path, name: str) -> None:
    """If a process is killed or a file can't be imported, the suite fails, and the other files still run."""
    run(suite, tmp_path, name, "test_good.py")
    assert len(suite.failures) == 1
    assert suite.reports["test_good.py"].outcomes == {"passed": 2}


def test_the_first_failure_ends_all_if_that_is_asked_for(tmp_path: Path) -> None:
    """With pytest's ``-x``, no other file begins after the first failure."""
    suite = make_suite(tmp_path, "-x", num_jobs=1)
    run(suite, tmp_path, "test_bad.py", "test_good.py")
    assert list(suite.reports) == ["test_bad.py"]


def test_nothing_is_left(suite: Suite, tmp_path: Path) -> None:
    """The directories of the processes are removed as they end."""
    run(suite, tmp_path, "test_good.py", "test_dies.py")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_worker_that_is_spawned_does_not_import_the_runner(suite: Suite, tmp_path: Path) -> None:
    """The main module in the test processes contains nothing of the process that forks them."""
    run(suite, tmp_path, "test_main.py")
    assert suite.reports["test_main.py"].outcomes == {"passed": 1}


def test_what_is_asked_for_is_gathered_by_file() -> None:
    """Tests of one file run in one process. A folder stands for the files below it."""
    one, other = "tests/test_layers.py::test_the_package_passes", "tests/test_layers.py::test_another"
    assert find_files([one, other]) == {"tests/test_layers.py": [one, other]}
    assert "tests/harness/test_run.py" in find_files(["tests/harness"])
    assert find_files(["tests/laws/test_resume.py"])["tests/laws/test_resume.py 2/4"][1:] == ["--part=1/4"]
    with pytest.raises(SystemExit, match="There is no tests/nothing"):
        find_files(["tests/nothing"])


def test_outcomes_read_as_pytest_writes_them() -> None:
    """Programs that read pytest's closing line can read this one."""
    assert describe({"passed": 3, "failed": 1, "error": 2}) == "1 failed, 3 passed, 2 errors"
    assert describe({}) == "no tests ran"
