"""What follows each start of a supervised run, and what the supervisor does with its processes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from lightning_faulttolerant.cli.supervisor import (
    EndedStart,
    RestartPolicy,
    SupervisionEnded,
    Supervisor,
    Verdict,
    stop_code,
)
from lightning_faulttolerant.supervision.heartbeats import (
    OUTSIDE,
    TRAINING_BATCH,
    Heartbeat,
    TrainingFailure,
    read_failures,
    write_failure,
)
from tests.processes import Child

FAILURE = TrainingFailure(
    kind="ValueError", text="boom", function="fit", epoch=1, batch=5, samples={"train/0": [7, 3]}, time=1.0
)
KILLED = EndedStart(exit_codes=(-9,))


def raised(**changes: Any) -> EndedStart:
    """Return a start that an exception has ended."""
    return EndedStart(exit_codes=(1,), failure=replace(FAILURE, **changes))


def saved(batch: int, ended: EndedStart = KILLED) -> EndedStart:
    """Return a start that has saved at a batch."""
    return replace(ended, saved=(1, 0, batch, 0))


def verdicts(*ended: EndedStart, max_restarts: int = 100) -> list[Verdict]:
    """Return what follows each of several starts."""
    policy = RestartPolicy(max_restarts, command="lightning-faulttolerant run -- python train.py")
    return [policy.judge(each) for each in ended]


AGAIN = [raised(), raised()]
OTHERS = [raised(batch=6), raised(text="other"), raised(kind="KeyError"), raised(evaluated=0), KILLED]
# Starts, how many without a new autosave are allowed, and the exit code after each.
ENDS: dict[str, tuple[list[EndedStart], int, list[int | None]]] = {
    "no new autosave": ([saved(1), KILLED, saved(1), saved(2), KILLED, KILLED, KILLED], 3, [None] * 6 + [4]),
    "always a new autosave": ([saved(batch) for batch in range(50)], 1, [None] * 50),
    "the same exception": ([saved(1, each) for each in (*AGAIN, raised())], 100, [None, None, 3]),
    "in an evaluation": ([raised(evaluated=3)] * 3, 100, [None, None, 3]),
    "addresses in its text": (
        [raised(text=f"<Net object at 0x7f{number:010x}> is wrong") for number in range(3)],
        100,
        [None, None, 3],
    ),
    "a new autosave in between": ([saved(1, raised())] * 2 + [saved(2, raised())] * 3, 100, [None] * 4 + [3]),
    "another failure in between": (
        [each for other in OTHERS for each in (*AGAIN, other)] + [*AGAIN, raised()],
        100,
        [None] * 17 + [3],
    ),
    "no batch, too often": ([raised(batch=None)] * 3, 3, [None, None, 4]),
    "another rank is lost": ([raised(is_lost=True)] * 4, 100, [None] * 4),
    "stopped, and failed": ([EndedStart(exit_codes=(143, 1)), EndedStart(exit_codes=(-9, 143))], 100, [None, None]),
    "stopped": ([EndedStart(exit_codes=(143, 143))], 100, [143]),
    "stopped with a state that could not be saved": ([EndedStart(exit_codes=(74, 74))], 100, [74]),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_run_is_given_up_or_started_again(
    case: str, monkeypatch: pytest.MonkeyPatch, snapshot: SnapshotAssertion
) -> None:
    """Starts without a new autosave, and the same exception, count; a stop on request ends the run with its code.

    The message has the line that leaves the batch out, next to those that are left out already; not for an evaluation.
    """
    monkeypatch.setenv("PL_FAULT_TOLERANT_SKIP_BATCHES", "0:2")
    starts, max_restarts, codes = ENDS[case]
    found = verdicts(*starts, max_restarts=max_restarts)
    assert [verdict.exit_code for verdict in found] == codes
    assert found[-1].text == snapshot


def test_starts_wait_longer_until_there_is_progress() -> None:
    """The default number of starts spans four minutes; an autosave of the next fit, or in an evaluation, is newer."""
    waits = [verdict.wait_seconds for verdict in verdicts(*[KILLED] * 7, saved(4), KILLED, KILLED, saved(4), saved(5))]
    assert waits == [1, 10, 60, 180, 300, 300, 300, 1, 1, 10, 60, 1]
    ended = [replace(KILLED, saved=place) for place in ((1, 0, 8, 0), (1, 0, 8, 3), (1, 2**62, 0, 0), (2, 0, 0, 0))]
    assert [verdict.wait_seconds for verdict in verdicts(*ended)] == [1, 1, 1, 1]


def test_a_stopped_run_says_what_its_processes_say() -> None:
    """A state that could not be saved, and a job that is queued again, are more than the signal."""
    ends: list[tuple[int | None, ...]] = [(143, 143), (143, 74, 76), (75, 76), (75, None), ()]
    assert [stop_code(each, signum=15) for each in ends] == [143, 74, 76, 75, 143]


# Processes.


def test_each_start_forgets_what_the_one_before_has_told() -> None:
    """Also one that comes without a failure, when a machine joins; the autosave before it counts as progress."""
    supervisor = Supervisor(RestartPolicy(2))
    supervisor.begin_start()
    supervisor.after_failure([1])
    supervisor.begin_start()
    Heartbeat(supervisor.directory).note_saved((1, 0, 5, 0))
    write_failure(supervisor.directory, FAILURE)
    supervisor.begin_start()
    assert read_failures(supervisor.directory) == []
    supervisor.after_failure([1])
    with pytest.raises(SupervisionEnded):
        supervisor.after_failure([1])
    supervisor.close()


def ended_in(directory: Path, section: int) -> int:
    """Start a process that ends in a section, and return its id."""

    def main() -> None:
        heartbeat = Heartbeat(directory)
        heartbeat.describe(rank=0, num_ranks=1, hang=0, hang_timeout_ms=100)
        heartbeat.begin(section)

    child = Child(main)
    assert child.wait() == 0
    return child.process_id


@pytest.mark.parametrize(("section", "is_cut"), [(TRAINING_BATCH, True), (OUTSIDE, False)])
def test_a_process_that_ends_with_0_in_a_fit_is_no_success(section: int, is_cut: bool) -> None:
    """Nor does a fit of another process say anything about those that were started."""
    supervisor = Supervisor(RestartPolicy(5))
    supervisor.begin_start()
    started, other = (ended_in(supervisor.directory, each) for each in (section, TRAINING_BATCH))
    for ids, expected in (([started], is_cut), ([other], True), ([], False)):
        supervisor.note_started(ids)
        assert supervisor.is_cut() == expected
    supervisor.close()
