"""The example's job script on a real SLURM cluster: whatever stops a job, its weights are those of a run without it.

All jobs run side by side: each waits most of the time, for SLURM or for a signal.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass
class Place:
    """Where the jobs of this file run."""

    cluster: Cluster
    directory: Path
    is_quiet: threading.Event
    """Set when the jobs whose time is short have begun to train: beside many others, Python takes long to start."""

    def job(self, name: str, *options: str, **variables: str) -> Job:
        """Submit a job."""
        return Job(self.cluster, self.directory / name, *options, **variables)


def time_is_over(place: Place) -> Job:
    """Two tasks on two nodes; SLURM sends its notice before the end of the time."""
    # A minute after the start: SLURM looks every 30 s, and sends the notice up to 30 s earlier than asked.
    job = place.job("time", "--nodes=2", "--time=2", "--signal=USR1@35")
    try:
        job.wait_for_line("third batch")
    finally:
        place.is_quiet.set()
    job.wait_for_more_time()
    job.wait()
    return job


def nothing_is_sent(place: Place) -> Job:
    """No notice: the end of the time is known."""
    job = place.job("deadline", "--time=1", "--signal=B:CONT@1")
    job.wait_for_more_time()
    job.wait()
    return job


def tasks_of_an_array(place: Place) -> Job:
    """Each task of an array gets the notice."""
    place.is_quiet.wait(SECONDS)
    job = place.job("array", "--array=0-1")
    for task in ("_0", "_1"):
        job.wait_for_line("third batch", task)
        job.signal("USR1", task)
    for task in ("_0", "_1"):
        job.wait(task)
    return job


def cancelled(place: Place) -> tuple[Job, str]:
    """The job is canceled, and submitted again."""
    place.is_quiet.wait(SECONDS)
    job = place.job("canceled")
    job.wait_for_line("third batch")
    job.cancel()
    state = job.wait()["JobState"]
    first = job.number
    job.submit()
    job.wait()
    assert job.number != first
    return job, state


def preempted(place: Place) -> Job:
    """A job of a partition with a higher priority takes the node."""
    place.is_quiet.wait(SECONDS)
    job = place.job("preempted", "--partition=spot")
    job.wait_for_line("third batch")
    place.cluster.ask(
        "sbatch", "--partition=urgent", "--exclusive", "--output=none", "--wrap=sleep 1", directory=job.directory
    )
    job.wait()
    return job


def notice_during_imports(place: Place) -> Job:
    """The notice comes while the only task has not yet imported anything."""
    place.is_quiet.wait(SECONDS)
    job = place.job("imports", SECONDS_BEFORE_IMPORTS="60")
    job.wait_for((job.directory / "began--0").exists, "the beginning")
    job.signal("USR1")
    job.wait()
    return job


def notice_while_a_task_waits(place: Place) -> Job:
    """The notice comes while one task has not yet imported anything, and the other waits for it."""
    place.is_quiet.wait(SECONDS)
    job = place.job("waits", "--nodes=2", SECONDS_BEFORE_IMPORTS="120")
    job.wait_for_line("Initializing distributed")
    job.signal("USR1")
    job.wait()
    return job


ALL: tuple[Callable[[Place], Any], ...] = (
    time_is_over,
    nothing_is_sent,
    tasks_of_an_array,
    cancelled,
    preempted,
    notice_during_imports,
    notice_while_a_task_waits,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[object, Future[Any]]]:
    """Start all jobs, and yield what becomes of them."""
    short = Path(tempfile.mkdtemp(prefix="slurm-"))  # sockets need a short path
    directory = tmp_path_factory.mktemp("jobs")
    cluster = Cluster(short)
    place = Place(cluster, directory, threading.Event())
    pool = ThreadPoolExecutor(len(ALL) + 2)
    try:
        cluster.start()
        futures: dict[object, Future[Any]] = {each: pool.submit(each, place) for each in ALL}
        for num_tasks in (1, 2):
            futures[num_tasks] = pool.submit(_whole, place, num_tasks)
        yield futures
    finally:
        place.is_quiet.set()
        cluster.stop()  # whatever still waits for a job fails now
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(short)


def _whole(place: Place, num_tasks: int) -> str:
    place.is_quiet.wait(SECONDS)
    return without_slurm(place.directory / f"whole-{num_tasks}", num_tasks)


def assert_went_on(job: Job, task: str = "", *, is_requeued: bool = True) -> None:
    """Check that a job has come to its end, has been queued again or not, and has resumed after its first batch."""
    fields = job.fields(task)
    assert (fields["JobState"], fields["Restarts"] != "0") == ("COMPLETED", is_requeued), job.log(task)
    resumed = re.findall("Resumed exactly (before batch .* of epoch .*?)[.,;]", job.log(task))
    assert set(resumed) - {"before batch 0 of epoch 0"}, job.log(task)


def test_the_notice_before_the_end_of_the_time(runs: dict[object, Future[Any]]) -> None:
    """Two tasks stop for SLURM's own signal, queue the job again, and end with the weights of a run without SLURM."""
    job = runs[time_is_over].result()
    assert_went_on(job)
    assert "Stopped by SIGUSR1" in job.log()
    assert job.weights() == runs[2].result()


def test_the_end_of_the_time_without_a_notice(runs: dict[object, Future[Any]]) -> None:
    """The job asks SLURM for its end, stops before it, and queues itself again."""
    job = runs[nothing_is_sent].result()
    assert_went_on(job)
    assert "Stopped by the deadline" in job.log()
    assert job.weights() == runs[1].result()


def test_each_task_of_an_array_queues_itself_again(runs: dict[object, Future[Any]]) -> None:
    """Each task has its own run in one directory, and continues it."""
    job = runs[tasks_of_an_array].result()
    for task in ("_0", "_1"):
        assert_went_on(job, task)
        assert job.weights(task) == runs[1].result()
    names = {re.search(r"run/([^/\s]+)/", job.log(task)) for task in ("_0", "_1")}
    assert len({name[1] for name in names if name}) == 2


def test_a_canceled_job_that_is_submitted_again(runs: dict[object, Future[Any]]) -> None:
    """It saves and is not queued again; the next job, with another number, continues its run."""
    job, state = runs[cancelled].result()
    assert state == "CANCELLED"
    assert "Stopped by SIGTERM" in job.log()
    assert_went_on(job, is_requeued=False)
    assert job.weights() == runs[1].result()


def test_a_preempted_job(runs: dict[object, Future[Any]]) -> None:
    """It saves when it gets SIGTERM, and SLURM queues it again."""
    job = runs[preempted].result()
    assert_went_on(job)
    assert "Stopped by SIGTERM" in job.log()
    assert job.weights() == runs[1].result()


@pytest.mark.parametrize(("scenario", "num_tasks"), [(notice_during_imports, 1), (notice_while_a_task_waits, 2)])
def test_a_notice_before_the_imports(
    scenario: Callable[[Place], Job], num_tasks: int, runs: dict[object, Future[Any]]
) -> None:
    """It ends a task that can't handle it yet, and any that waits for that one; the job script queues the job again."""
    job = runs[scenario].result()
    assert (job.fields()["JobState"], job.fields()["Restarts"] != "0") == ("COMPLETED", True), job.log()
    assert job.weights() == runs[num_tasks].result()
