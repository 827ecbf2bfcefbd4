"""SLURM's notice before a fit, with and without the callback: the fit stops, and its job is queued again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.early_signals import EARLY
from tests.rank_runs import for_ranks
from tests.trainer.ranks.slurm_jobs import Job

pytestmark = [
    *for_ranks,
    pytest.mark.filterwarnings("ignore:The `srun` command is available"),
]


def notice() -> None:
    """Send the notice while the script is still being imported."""
    # As an import of the package does; ours came before the job's environment, and test ranks have torchrun's.
    EARLY.begin({name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"})
    os.kill(os.getpid(), signal.SIGUSR1)


def assert_queued_again_at_the_start(job: Job) -> None:
    """Check that ``scontrol`` was called once, after a verified autosave of the first boundary existed."""
    assert job.log.read_text().splitlines() == ["requeue 4711"]
    [autosave] = job.kept.rglob("autosave-*.ckpt")
    assert load_file(str(autosave))["global_step"] == 0


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fit_stops_and_the_job_is_queued_again(num_ranks: int, tmp_path: Path) -> None:
    """The fit stops at its first boundary, saved, with the code of a requeue; the next start trains to the end."""
    job = Job(tmp_path, num_ranks=num_ranks)
    with job.start(before=notice, num_sanity_val_steps=0) as processes:
        ended = processes.wait(seconds=40)
    assert [each.exit_code for each in ended] == [76] * num_ranks, ended[0].output
    assert all("train 0" not in each.output for each in ended)
    assert_queued_again_at_the_start(job)
    with job.start() as processes:
        again = processes.wait(seconds=40)
    assert [each.exit_code for each in again] == [0] * num_ranks, again[0].output
    assert "Resumed exactly" in again[0].output
    assert "has trained 16 steps" in again[0].output


def test_fit_with_a_sanity_check_stops_in_it(tmp_path: Path) -> None:
    """There is nothing to save yet, but the job is queued again."""
    job = Job(tmp_path)
    with job.start(before=notice) as processes:
        [ended] = processes.wait(seconds=40)
    assert ended.exit_code == 76, ended.output
    assert job.log.read_text().splitlines() == ["requeue 4711"]


def test_job_that_is_not_queued_again_ends_by_the_signal(tmp_path: Path) -> None:
    """If neither SLURM's plugin nor stop_signals handles the signal, it ends the process as it would have."""
    job = Job(tmp_path)
    with job.start(before=notice, auto_requeue=False) as processes:
        [ended] = processes.wait(seconds=40)
    assert ended.exit_code == -signal.SIGUSR1
    assert "the job is not queued again" in ended.output
    assert not job.log.exists()


def test_stop_signal_of_the_callback_stops_without_a_requeue(tmp_path: Path) -> None:
    """A callback with the signal among its stop signals stops, saved, with the signal's own exit code."""
    job = Job(tmp_path)
    options = {"stop_signals": ("SIGUSR1",)}
    with job.start(before=notice, auto_requeue=False, options=options, num_sanity_val_steps=0) as processes:
        [ended] = processes.wait(seconds=40)
    assert ended.exit_code == 128 + signal.SIGUSR1, ended.output
    assert list((tmp_path / "autosaves").rglob("autosave-*.ckpt"))


def start_script(directory: Path, *lines: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run lines of Python as the only task of a job."""
    script = directory / "train.py"
    script.write_text("\n".join(("import os, signal, sys", "from pathlib import Path", *lines)))
    base = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "PYTHONPATH": os.getcwd()}
    return subprocess.run(
        [sys.executable, script],
        env={**base, **variables},
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_script_that_validates_first_is_queued_again(tmp_path: Path) -> None:
    """The validation run stops at its first batch instead of being killed, and the job is queued again."""
    job = Job(tmp_path)
    ended = start_script(
        tmp_path,
        "from lightning_faulttolerant import FaultTolerance",
        "from lightning.fabric.plugins.environments.slurm import SLURMEnvironment",
        "from tests.runs import Net, eight_batches, make_trainer",
        "trainer = make_trainer([FaultTolerance()], Path(), plugins=[SLURMEnvironment()])",
        "os.kill(os.getpid(), signal.SIGUSR1)",
        "trainer.validate(Net(), eight_batches(), verbose=False)",
        **job.environment,
    )
    assert ended.returncode == 76, ended.stderr
    assert job.log.read_text().splitlines() == ["requeue 4711"]


@pytest.mark.slow
def test_notice_after_the_end_of_the_script(tmp_path: Path) -> None:
    """The autosaves of a run that has finished are gone: a job that is queued again then would train it again."""
    ended = start_script(
        tmp_path,
        "import atexit",
        "def end():",
        "    print(*Path().rglob('autosave-*'), 'left', flush=True)",
        "    os.kill(os.getpid(), signal.SIGUSR1)",
        "    print('continues', flush=True)",
        "atexit.register(end)  # called after all that is registered later",
        "from lightning_faulttolerant import FaultTolerance",
        "from tests.runs import fit_net",
        "fit_net([FaultTolerance()], Path())",
        **Job(tmp_path).environment,
    )
    assert (ended.returncode, ended.stdout.splitlines()[-2:]) == (0, ["left", "continues"]), ended.stderr
