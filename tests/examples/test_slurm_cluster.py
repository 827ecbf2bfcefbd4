"""The example's job script on a real SLURM cluster: whatever stops a job, its weights are those of a run without it.

All jobs run side by side: each waits most of the time, for SLURM or for a signal.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.harness.slurm import Cluster, missing
from tests.slurm.jobs import SECONDS, Job, without_slurm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
IS_QUIET = threading.Event()
"""Set when the jobs whose time is short have begun to train: beside many others, Python takes long to start."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job, what happens to it, and what its log says of that."""

    strike: Callable[[Job, Cluster], object]
    options: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    waits: bool = True
    tasks: tuple[str, ...] = ("",)
    num_ranks: int = 1
    is_requeued: bool = True
    said: str = ""
    resumes: bool = True

    def play(self, cluster: Cluster, directory: Path) -> Job:
        """Run the job to its end."""
        if self.waits:
            IS_QUIET.wait(SECONDS)
        job = Job(cluster, directory, *self.options, **self.variables)
        self.strike(job, cluster)
        for task in self.tasks:
            job.wait(task)
        return job


def time_is_over(job: Job, _: Cluster) -> None:
    """SLURM sends its notice before the end of the time."""
    try:
        job.wait_for_line("third batch")
    finally:
        IS_QUIET.set()
    job.wait_for_more_time()


def notice_for_each_task(job: Job, _: Cluster) -> None:
    """Each task of an array gets the notice."""
    for task in ("_0", "_1"):
        job.wait_for_line("third batch", task)
        job.signal("USR1", task)


def canceled(job: Job, _: Cluster) -> None:
    """The job is canceled, saves, is not queued again, and is submitted again."""
    job.wait_for_line("third batch")
    job.cancel()
    assert job.wait()["JobState"] == "CANCELLED"
    first = job.number
    assert job.submit() != first


def preempted(job: Job, cluster: Cluster) -> None:
    """A job of a partition with a higher priority takes the node."""
    job.wait_for_line("third batch")
    urgent = ("--partition=urgent", "--exclusive", "--output=none", "--wrap=sleep 1")
    cluster.ask("sbatch", *urgent, directory=job.directory)


def notice_during_imports(job: Job, _: Cluster) -> None:
    """The notice comes while the only task has not yet imported anything."""
    job.wait_for((job.directory / "began--0").exists, "the beginning")
    job.signal("USR1")


def notice_while_a_task_waits(job: Job, _: Cluster) -> None:
    """The notice comes while one task has not yet imported anything, and the other waits for it."""
    job.wait_for_line("Initializing distributed")
    job.signal("USR1")


SCENARIOS = {
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
    "array": Scenario(strike=notice_for_each_task, options=("--array=0-1",), tasks=("_0", "_1")),
    "canceled": Scenario(strike=canceled, is_requeued=False, said="Stopped by SIGTERM"),
    "preempted": Scenario(strike=preempted, options=("--partition=spot",), said="Stopped by SIGTERM"),
    "imports": Scenario(strike=notice_during_imports, variables={"SECONDS_BEFORE_IMPORTS": "60"}, resumes=False),
    "waits": Scenario(
        strike=notice_while_a_task_waits,
        options=("--nodes=2",),
        variables={"SECONDS_BEFORE_IMPORTS": "120"},
        num_ranks=2,
        resumes=False,
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[object, Future[Any]]]:
    """Start all jobs, and two runs without SLURM; yield what becomes of them."""
    short = Path(tempfile.mkdtemp(prefix="slurm-"))  # sockets need a short path
    directory = tmp_path_factory.mktemp("jobs")
    cluster = Cluster(short)
    pool = ThreadPoolExecutor(len(SCENARIOS) + 2)

    def whole(num_ranks: int) -> str:
        IS_QUIET.wait(SECONDS)
        return without_slurm(directory / f"whole-{num_ranks}", num_ranks)

    try:
        cluster.start()
        jobs = {name: pool.submit(each.play, cluster, directory / name) for name, each in SCENARIOS.items()}
        yield {**jobs, **{number: pool.submit(whole, number) for number in (1, 2)}}
    finally:
        IS_QUIET.set()
        cluster.stop()  # whatever still waits for a job fails now
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(short)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_job_ends_as_without_slurm(name: str, runs: dict[object, Future[Any]]) -> None:
    """It has come to its end, was queued again or not, resumed after its first batch, and has the same weights."""
    scenario, job = SCENARIOS[name], runs[name].result()
    for task in scenario.tasks:
        fields, log = job.fields(task), job.log(task)
        assert (fields["JobState"], fields["Restarts"] != "0") == ("COMPLETED", scenario.is_requeued), log
        resumed = set(re.findall("Resumed exactly (before batch .* of epoch .*?)[.,;]", log))
        assert resumed - {"before batch 0 of epoch 0"} or not scenario.resumes, log
        assert scenario.said in log
        assert job.weights(task) == runs[scenario.num_ranks].result()
    found = [re.search(r"run/([^/\s]+)/", job.log(task)) for task in scenario.tasks]
    assert name != "array" or len({each[1] for each in found if each}) == 2  # each task of an array has its own run
