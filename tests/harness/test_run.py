from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.run import Suite, find_files

FILES = {
    "test_good.py": "def test_one(): pass\n\ndef test_two(tmp_path): assert tmp_path.is_dir()\n",
    "test_bad.py": "def test_one(): pass\n\ndef test_two(): assert 'this' == 'that'\n",
    "test_dies.py": "import os, signal\n\ndef test_it():\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "test_exits.py": "import os\n\ndef test_it():\n    os._exit(0)\n",
    "test_broken.py": "import a_module_that_is_not_there\n",
    "test_main.py": "import sys\n\ndef test_it(): assert not hasattr(sys.modules['__main__'], '__file__')\n",
    "test_empty.py": "",
}


def run(directory: Path, *names: str, num_jobs: int = 2, options: tuple[str, ...] = ()) -> Suite:
    """Run some of the files above, and return their suite."""
    for name in names:
        (directory / name).write_text(FILES[name])
    (directory / "run").mkdir()
    common = ["-q", "-c", "/dev/null", f"--rootdir={directory}", "--import-mode=importlib"]
    suite = Suite(num_jobs=num_jobs, options=[*common, *options], directory=directory / "run")
    suite.run({name: [str(directory / name)] for name in names})
    return suite


def test_outcomes_are_added_up(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each file runs its tests. A failure is named immediately, and printed in full at the end."""
    suite = run(tmp_path, "test_good.py", "test_bad.py", "test_empty.py")
    assert suite.reports["test_good.py"].outcomes == {"passed": 2}
    assert suite.reports["test_bad.py"].outcomes == {"passed": 1, "failed": 1}
    assert "test_empty.py" not in suite.reports
    [failure] = suite.failures.values()
    assert "assert 'this' == 'that'" in failure
    assert "not passed: test_bad.py::test_two" in capfd.readouterr().out


@pytest.mark.parametrize("name", ["test_dies.py", "test_exits.py", "test_broken.py"])
def test_a_file_that_does_not_come_to_its_end_is_a_failure(tmp_path: Path, name: str) -> None:
    """A process that is killed or a file that can't be imported is a failure; the others run, and nothing is left."""
    suite = run(tmp_path, name, "test_good.py")
    assert len(suite.failures) == 1
    assert list((tmp_path / "run").iterdir()) == []
    assert suite.reports["test_good.py"].outcomes == {"passed": 2}


def test_a_worker_that_is_spawned_does_not_import_the_runner(tmp_path: Path) -> None:
    """The main module in the test processes contains nothing of the process that forks them."""
    suite = run(tmp_path, "test_main.py")
    assert suite.reports["test_main.py"].outcomes == {"passed": 1}


def test_what_is_asked_for_is_gathered_by_file() -> None:
    """Tests of one file run in one process. A folder stands for the files below it."""
    one, other = "tests/test_layers.py::test_the_package_passes", "tests/test_layers.py::test_another"
    assert find_files([one, other]) == {"tests/test_layers.py": [one, other]}
    assert "tests/harness/test_run.py" in find_files(["tests/harness"])
    assert find_files(["tests/laws/test_resume.py"])["tests/laws/test_resume.py 2/4"][1:] == ["--part=1/4"]
    with pytest.raises(SystemExit, match="There is no tests/nothing"):
        find_files(["tests/nothing"])
