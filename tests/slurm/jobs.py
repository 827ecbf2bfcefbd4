"""Jobs of the example's script on a real cluster, and the same training without SLURM."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.example_runs import EXAMPLES
from tests.harness.slurm import Cluster, free_ports

SECONDS = 170.0
"""How long anything may take."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")
_ROOT = Path(__file__).parents[2]
_VARIABLES = {
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
    "PYTHONPATH": str(_ROOT),
    "EXAMPLE": str(EXAMPLES / "slurm" / "train.py"),
    "NUM_EPOCHS": "4",
    "OMP_NUM_THREADS": "1",
    "MASTER_ADDR": "127.0.0.1",
    "PYTHONUNBUFFERED": "1",
}


class Job:
    """A job of the example's script, which is submitted with less than it asks for.

    Args:
        cluster: The cluster.
        directory: Where the job is submitted. Its logs are there.
        options: More options of ``sbatch``.
        variables: More variables for the job, see `tests/slurm/train.py`.
    """

    def __init__(self, cluster: Cluster, directory: Path, *options: str, **variables: str) -> None:
        self._cluster = cluster
        self.directory = directory
        directory.mkdir(exist_ok=True)
        shutil.copy(Path(__file__).with_name("train.py"), directory)
        small = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--output=log-%a.txt")
        self._command = ["--parsable", *small, *options, str(EXAMPLES / "slurm" / "train.sbatch")]
        self._variables = {**_VARIABLES, "SECONDS_PER_BATCH": "0.5", **variables}
        self.number = self.submit()

    def submit(self) -> str:
        """Submit the job, and return its number."""
        self.number = self._cluster.ask("sbatch", *self._command, directory=self.directory, **self._variables)
        return self.number

    def signal(self, name: str, task: str = "") -> None:
        """Send a signal to all tasks of the job, not to its shell."""
        self._cluster.ask("scancel", f"--signal={name}", self.number + task)

    def cancel(self) -> None:
        """Cancel the job."""
        self._cluster.ask("scancel", self.number)

    def fields(self, task: str = "") -> dict[str, str]:
        """Return what SLURM knows about the job."""
        shown = self._cluster.ask("scontrol", "--oneliner", "show", "job", self.number + task)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait_for(self, is_so: Callable[[], object], what: str) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {what}\n{self.fields()}\n{self.log()}"
            time.sleep(0.3)

    def wait_for_line(self, text: str, task: str = "") -> None:
        """Wait until a text is in the log."""
        self.wait_for(lambda: text in self.log(task), text)

    def wait_for_more_time(self) -> None:
        """Wait until the job is queued again, and give it more time: on a busy machine, Python starts slowly."""
        self.wait_for(lambda: self.fields()["Restarts"] != "0", "a requeue")
        self._cluster.ask("scontrol", "update", f"JobId={self.number}", "TimeLimit=10")

    def wait(self, task: str = "") -> dict[str, str]:
        """Wait until the job has ended for good; return what SLURM knows about it."""
        self.wait_for(lambda: self.fields(task)["JobState"] in ENDED, "the end")
        return self.fields(task)

    def log(self, task: str = "") -> str:
        """Return what the job has printed in all its parts."""
        task = task.removeprefix("_") or "4294967294"  # SLURM's number of a job that is in no array
        path = self.directory / f"log-{task}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def weights(self, task: str = "") -> str:
        """Return the digest of the weights that the job has printed at its end."""
        return weights(self.log(task))


def weights(log: str) -> str:
    """Return the digest of the weights that a training has printed."""
    [found] = set(re.findall(r"^weights (\w{16})$", log, flags=re.MULTILINE)) or [f"none in: {log}"]
    return found


def without_slurm(directory: Path, num_tasks: int) -> str:
    """Run the training without SLURM and without an interruption; return the digest of its weights."""
    directory.mkdir()
    [port] = free_ports(1)
    processes = []
    for rank in range(num_tasks):
        variables = {
            "SLURM_JOB_ID": str(num_tasks),
            "SLURM_JOB_NAME": "none",
            "SLURM_JOB_END_TIME": str(int(time.time()) + 10_000),
            "SLURM_NNODES": str(num_tasks),
            "SLURM_NTASKS": str(num_tasks),
            "SLURM_NTASKS_PER_NODE": "1",
            "SLURM_NODEID": str(rank),
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": "0",
            "SLURM_SUBMIT_DIR": str(directory),
            "RUN_DIRECTORY": str(directory / "run"),
            "MASTER_PORT": str(port),
        }
        with open(directory / f"log-{rank}.txt", "w") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, Path(__file__).with_name("train.py")],
                    env={**os.environ, **_VARIABLES, **variables},
                    cwd=directory,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Linux shares the cores between sessions, and each job has one
                )
            )
    try:
        for process in processes:
            process.wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return weights((directory / "log-0.txt").read_text())
