"""The example for SLURM does what its first lines say, with programs in place of SLURM's."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def install(directory: Path, name: str) -> None:
    """Put a substitute for a SLURM program into `directory`, which records its calls."""
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(
        f'#!/bin/sh\n[ "$2" != show ] || exit 0\necho "$@" "in $RUN_DIRECTORY" >> {directory}/{name}.txt\n'
    )
    (directory / name).chmod(0o755)


def test_the_job_script_starts_the_training(tmp_path: Path) -> None:
    """The script creates the directory of the run where the job was submitted, and srun starts the file beside it."""
    install(tmp_path / "bin", "srun")
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    job = EXAMPLES / "slurm" / "train.sbatch"
    subprocess.run(["bash", job], env=environment, check=True)
    assert (tmp_path / "run").is_dir()
    [line] = (tmp_path / "bin" / "srun.txt").read_text().splitlines()
    assert line == f"--kill-on-bad-exit=0 python train.py in {tmp_path}/run"
    options = re.findall(r"^#SBATCH --([a-z-]+)", job.read_text(), flags=re.MULTILINE)
    assert {"requeue", "signal", "open-mode", "nodes", "ntasks-per-node"} <= set(options)
    assert (EXAMPLES / "slurm" / "train.py").is_file()


ARRAY = {"SLURM_JOB_ID": "13", "SLURM_ARRAY_JOB_ID": "10", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.mark.parametrize(
    ("code", "job", "queued"),
    [(138, {}, "requeue 12"), (138, ARRAY, "requeue 10_3"), (0, {}, ""), (76, {}, ""), (143, {}, "")],
)
def test_the_job_script_queues_itself_again_where_the_signal_came_too_early(
    code: int, job: dict[str, str], queued: str, tmp_path: Path
) -> None:
    """If SIGUSR1 has ended Python, the script calls scontrol itself, and its own exit code stays srun's."""
    install(tmp_path / "bin", "scontrol")
    # A task that the signal ends while Python starts: no handler exists yet.
    ends = "kill -USR1 $$" if code == 138 else f"exit {code}"
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/bash\nbash -c '{ends}'\nexit $?\n")
    (tmp_path / "bin" / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    environment |= {"SLURM_JOB_ID": "12", **job}
    ended = subprocess.run(["bash", EXAMPLES / "slurm" / "train.sbatch"], env=environment, check=False)
    assert ended.returncode == code
    called = tmp_path / "bin" / "scontrol.txt"
    assert (called.read_text().split(" in ")[0] if called.exists() else "") == queued
