"""A killed run continues exactly however its ranks are started: by Lightning's launchers, or by torchrun."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.records.history import FILE_NAME
from lightning_faulttolerant.records.history_parser import history_of
from lightning_faulttolerant.records.lines import read_lines
from lightning_faulttolerant.testing.processes import run_ranks
from tests.harness import python
from tests.launched import NUM_RANKS, assert_same, train
from tests.processes import Ended, run
from tests.rank_runs import for_ranks

pytestmark = for_ranks
ROOT = Path(__file__).parents[2]
SECONDS = 280.0


def uninterrupted(directory: Path, **arguments: Any) -> Path:
    """Run the script, neither protected nor interrupted, on ranks forked by the test; return `directory`."""
    outputs = [directory / f"{rank}.txt" for rank in range(NUM_RANKS)]
    exit_code = run_ranks(
        lambda rank: train(directory, protected=False, **arguments), outputs=outputs, seed=1, timeout_seconds=SECONDS
    )
    assert exit_code == 0, [output.read_text() for output in outputs]
    return directory


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of such a script with two fits."""
    return uninterrupted(tmp_path_factory.mktemp("whole"), num_fits=2)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Return the directory of the script that is killed."""
    found = tmp_path / "killed"
    found.mkdir()
    return found


def forked(directory: Path, **arguments: Any) -> Ended:
    """Run the script, whose ranks Lightning forks, and then Python's cleanup at exit."""
    return run(lambda: print(train(directory, strategy="ddp_fork", **arguments)[-1].resume_report))


@pytest.mark.slow
def test_forked_ranks_continue(whole: Path, directory: Path) -> None:
    """Under ddp_fork a rank is killed in the second fit, which then continues exactly; nothing is left behind."""
    assert forked(directory, kill_fit=1, num_fits=2).exit_code == 1
    assert_same(whole, directory, fit=0, num_processes=1)
    ended = forked(directory, num_fits=2, seed=7)
    assert ended.exit_code == 0, ended.output
    assert "Resumed exactly" in ended.output, ended.output
    assert_same(whole, directory, fit=1)
    assert_only_history_is_left(directory)


def assert_only_history_is_left(directory: Path) -> None:
    """Check that no autosave is left, and that the script's processes recorded their history one at a time."""
    [left] = [path for path in (directory / "autosaves").rglob("*") if path.is_file()]
    assert left.name == FILE_NAME
    [chapter] = history_of(read_lines(left)).chapters
    assert chapter.done is not None
    assert [process.reason for process in chapter.processes][-1] == "finished"
    assert all(fit.num_ranks == NUM_RANKS for fit in chapter.fits)


def command(directory: Path, *, launcher: Sequence[str] = (), forks: bool = False, **arguments: Any) -> tuple[int, str]:
    """Run the script by a command, with a shell's environment; return its exit code and output.

    With `forks`, its processes are forked from this one: see `tests.harness.python`.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "MASTER_"))},
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }
    script = str(ROOT / "tests/launched.py")
    words = [sys.executable, *launcher, script, json.dumps({"directory": str(directory), **arguments})]
    if forks:
        asked = python.Command(words=words, directory=str(directory), environment=environment)
        return python.run(asked, scratch=directory.with_name("scratch"))
    process = subprocess.Popen(
        words,
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, output


@pytest.mark.slow
@pytest.mark.timeout(600)  # each process of a command imports everything
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn"])
def test_ranks_of_a_command_continue(strategy: str, whole: Path, directory: Path) -> None:
    """The same holds under ``python train.py``, whose ranks Lightning starts as commands, or spawns.

    Of ``ddp``, only the start that resumes is a real one.
    """
    exit_code, output = command(directory, forks=strategy == "ddp", strategy=strategy, kill_fit=0)
    assert exit_code != 0, output
    assert (directory / "killed").exists(), output
    exit_code, output = command(directory, strategy=strategy, seed=7)
    assert exit_code == 0, output
    assert "Resumed exactly" in output
    assert_same(whole, directory)
    assert_only_history_is_left(directory)


@pytest.mark.slow
@pytest.mark.timeout(600)  # each process of a command imports everything
def test_torchrun_starts_again(directory: Path, tmp_path: Path) -> None:
    """If SIGKILL ends a rank under torchrun, torchrun restarts all ranks, and they continue exactly."""
    (tmp_path / "whole").mkdir()
    whole = uninterrupted(tmp_path / "whole", num_workers=2)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=3", "--standalone"]
    exit_code, output = command(directory, launcher=torchrun, kill_fit=0, num_workers=2)
    assert exit_code == 0, output
    assert "Resumed exactly" in output
    assert (directory / "killed").exists()
    assert_same(whole, directory)
    assert_only_history_is_left(directory)
