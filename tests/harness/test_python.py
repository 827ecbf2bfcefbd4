"""A process forked in place of Python finds the same as a started process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import python

PROBE = """
import atexit, json, multiprocessing, os, signal, sys, threading

def stack():
    frame, files = sys._getframe(1), []
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    return [file for file in files if os.path.isfile(file)]

atexit.register(print, "at exit")
place = {
    "argv": sys.argv,
    "words": sys.orig_argv[1:3],
    "path": sys.path[0],
    "name": __name__,
    "directory": os.getcwd(),
    "variables": sorted({**os.environ, "LC_CTYPE": "", "PWD": "", "TESTS_MARK": ""}),
    "main": getattr(sys.modules["__main__"], "__file__", None),
    "stack": stack(),
    "signals": [str(signal.getsignal(signum)) for signum in (signal.SIGTERM, signal.SIGINT)],
    "is main": threading.current_thread() is threading.main_thread(),
    "child": multiprocessing.parent_process() is not None,
    "last": hasattr(sys, "last_value"),
}
print(json.dumps(place))
print("to stderr", file=sys.stderr)
threading.Thread(target=print, args=("a thread is waited for",)).start()
"""


def run(words: list[str], directory: Path, *, forks: bool) -> tuple[int, str]:
    """Run Python with these arguments; return the exit code and the output."""
    environment = {"PATH": os.environ["PATH"], "VARIABLE": "set", "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}
    command = python.Command(words=[sys.executable, *words], directory=str(directory), environment=environment)
    if not forks:
        done = subprocess.run(
            command.words, cwd=directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return done.returncode, done.stdout
    return python.run(command, scratch=directory / "scratch")


@pytest.mark.parametrize(
    "words", [["probe.py", "--x", "1"], ["-u", "./probe.py"], ["-m", "probe", "2"]], ids=["script", "flag", "module"]
)
def test_finds_what_a_started_process_finds(words: list[str], tmp_path: Path) -> None:
    """Arguments, paths, variables, stack, signals, and all output until the end are the same."""
    (tmp_path / "probe.py").write_text(PROBE)
    code, printed = run(words, tmp_path, forks=True)
    real_code, real_printed = run(words, tmp_path, forks=False)
    assert (code, sorted(printed.splitlines())) == (real_code, sorted(real_printed.splitlines()))
    assert "at exit" in printed


@pytest.mark.parametrize(
    "text",
    [
        "import sys; sys.exit(7)",
        "import sys; sys.exit('a reason')",
        "import atexit, sys; atexit.register(lambda: print(sys.last_value)); raise ValueError('wrong')",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); os.kill(os.getpid(), 15)",
    ],
)
def test_ends_as_a_started_process_ends(text: str, tmp_path: Path) -> None:
    """Exit codes, signals, and the printed exceptions are the same."""
    code, printed = run(["-c", text], tmp_path, forks=True)
    real_code, real_printed = run(["-c", text], tmp_path, forks=False)
    assert code == real_code
    assert printed.splitlines()[-1:] == real_printed.splitlines()[-1:]


def test_nothing_of_this_process_is_written(tmp_path: Path) -> None:
    """The log handlers of pytest write nothing into a file that the forked process opens."""
    assert not logging.getLogger("lightning.pytorch").propagate  # pytest has a handler there, too
    text = """
import logging
files = [open(str(number), "w") for number in range(40)]
for name in (None, "lightning.pytorch"):
    logging.getLogger(name).error("said")
"""
    code, printed = run(["-c", text], tmp_path, forks=True)
    assert (code, "said" in printed) == (0, True)
    assert [number for number in range(40) if (tmp_path / str(number)).read_text()] == []


def test_what_a_command_leaves_behind_is_killed(tmp_path: Path) -> None:
    """A command has ended when `run` returns, and so have its children, even those that would run longer."""
    child = "[sys.executable, '-c', 'import time; time.sleep(60)']"
    text = f"import subprocess, sys; subprocess.Popen({child}, start_new_session=True); print('done'); sys.exit(3)"
    command = python.Command(words=[sys.executable, "-c", text], directory=str(tmp_path), environment=dict(os.environ))
    assert python.run(command, scratch=tmp_path / "scratch") == (3, "done\n")
    assert python.marked(tmp_path / "scratch" / "open") == []
