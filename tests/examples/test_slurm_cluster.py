"""The example's job script on a real SLURM cluster: whatever stops a job, its weights are those of a run without it.

All jobs run side by side: each waits most of the time, for SLURM or for a signal.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.harness.slurm import Cluster, missing

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "slurm"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
IS_QUIET = threading.Event()
"""Set when the jobs whose time is short have begun to train: beside many others, Python takes long to start."""
SECONDS = 170.0
"""How long anything may take."""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")
_VARIABLES = {
    "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
    "PYTHONPATH": str(ROOT),
    "EXAMPLE": str(EXAMPLE / "train.py"),
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
        shutil.copy(ROOT / "tests" / "slurm" / "train.py", directory)
        small = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=0", "--cpus-per-task=1", "--output=log.txt")
        self._command = ["--parsable", *small, *options, str(EXAMPLE / "train.sbatch")]
        self._variables = {**_VARIABLES, "SECONDS_PER_BATCH": "0.5", **variables}
        self.submit()

    def submit(self) -> None:
        self.number = self._cluster.ask("sbatch", *self._command, directory=self.directory, **self._variables)

    def signal(self, name: str) -> None:
        """Send a signal to all tasks of the job, not to its shell."""
        self._cluster.ask("scancel", f"--signal={name}", self.number)

    def fields(self) -> dict[str, str]:
        shown = self._cluster.ask("scontrol", "--oneliner", "show", "job", self.number)
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def wait_for(self, is_so: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + SECONDS
        while not is_so():
            assert time.monotonic() < deadline, f"not within {SECONDS:g} s: {what}\n{self.fields()}\n{self.log()}"
            time.sleep(0.3)

    def wait_for_line(self, text: str) -> None:
        self.wait_for(lambda: text in self.log(), text)

    def wait_for_more_time(self) -> None:
        """Wait until the job is queued again, and give it more time: on a busy machine, Python starts slowly."""
        self.wait_for(lambda: self.fields()["Restarts"] != "0", "a requeue")
        self._cluster.ask("scontrol", "update", f"JobId={self.number}", "TimeLimit=10")

    def wait(self) -> dict[str, str]:
        """Wait until the job has ended for good; return what SLURM knows about it."""
        self.wait_for(lambda: self.fields()["JobState"] in ENDED, "the end")
        return self.fields()

    def log(self) -> str:
        """Return what the job has printed in all its parts."""
        path = self.directory / "log.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def weights(self) -> str:
        """Return the digest of the weights that the job has printed at its end."""
        [found] = set(re.findall(r"^weights (\w{16})$", self.log(), flags=re.MULTILINE)) or [self.log()]
        return found


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job, what happens to it, and what its log says of that."""

    strike: Callable[[Job, Cluster], object]
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    waits: bool = True
    num_ranks: int = 1
    is_requeued: bool = True
    said: str = ""
    resumes: bool = True

    def play(self, cluster: Cluster, directory: Path) -> Job:
        if self.waits:
            IS_QUIET.wait(SECONDS)
        job = Job(cluster, directory, *self.options, **self.variables)
        self.strike(job, cluster)
        job.wait()
        return job


def time_is_over(job: Job, _: Cluster) -> None:
    """SLURM sends its notice before the end of the time."""
    try:
        job.wait_for_line("third batch")
    finally:
        IS_QUIET.set()
    job.wait_for_more_time()


def canceled(job: Job, cluster: Cluster) -> None:
    """The job is canceled, saves, is not queued again, and is submitted again."""
    job.wait_for_line("third batch")
    cluster.ask("scancel", job.number)
    assert job.wait()["JobState"] == "CANCELLED"
    job.submit()


def notice_while_a_task_waits(job: Job, _: Cluster) -> None:
    """The notice comes while one task has not yet imported anything, and the other waits for it."""
    job.wait_for_line("Initializing distributed")
    job.signal("USR1")


FAST = {"SECONDS_PER_BATCH": "0"}
SCENARIOS = {
    "whole": Scenario(strike=lambda *_: None, variables=FAST, is_requeued=False, resumes=False),
    "whole, of two": Scenario(
        strike=lambda *_: None, options=("--nodes=2",), variables=FAST, num_ranks=2, is_requeued=False, resumes=False
    ),
    # A minute after the start: SLURM looks every 30 s, and sends the notice up to 30 s earlier than asked.
    "time": Scenario(
        strike=time_is_over,
        options=("--nodes=2", "--time=2", "--signal=USR1@35"),
        waits=False,
        num_ranks=2,
        said="Stopped by SIGUSR1",
    ),
    "deadline": Scenario(
        strike=lambda job, _: job.wait_for_more_time(),
        options=("--time=1", "--signal=B:CONT@1"),  # no notice: the end of the time is known
        waits=False,
        said="Stopped by the deadline",
    ),
    "canceled": Scenario(strike=canceled, is_requeued=False, said="Stopped by SIGTERM"),
    "waits": Scenario(
        strike=notice_while_a_task_waits,
        options=("--nodes=2",),
        variables={"SECONDS_BEFORE_IMPORTS": "120"},
        num_ranks=2,
        resumes=False,
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Job]]]:
    """Start all jobs; yield what becomes of them."""
    short = Path(tempfile.mkdtemp(prefix="slurm-"))  # sockets need a short path
    directory = tmp_path_factory.mktemp("jobs")
    cluster = Cluster(short)
    pool = ThreadPoolExecutor(len(SCENARIOS))
    try:
        cluster.start()
        yield {name: pool.submit(each.play, cluster, directory / name) for name, each in SCENARIOS.items()}
    finally:
        IS_QUIET.set()
        cluster.stop()  # whatever still waits for a job fails now
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(short)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job_ends_as_one_that_nothing_stops(name: str, runs: dict[str, Future[Job]]) -> None:
    """It has come to its end, was queued again or not, resumed after its first batch, and has the same weights."""
    scenario, job = SCENARIOS[name], runs[name].result()
    fields, log = job.fields(), job.log()
    assert (fields["JobState"], fields["Restarts"] != "0") == ("COMPLETED", scenario.is_requeued), log
    resumed = set(re.findall("Resumed exactly (before batch .* of epoch .*?)[.,;]", log))
    assert resumed - {"before batch 0 of epoch 0"} or not scenario.resumes, log
    assert scenario.said in log
    whole = runs["whole" if scenario.num_ranks == 1 else "whole, of two"].result()
    assert job.weights() == whole.weights()
