from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_faulttolerant.cli.supervisor import EndedStart, RestartPolicy, Verdict, stop_code
from lightning_faulttolerant.supervision.heartbeats import TrainingFailure

FAILURE = TrainingFailure(
    kind="ValueError", text="boom", function="fit", epoch=1, batch=5, samples={"train/0": [7, 3]}, time=1.0
)
KILLED = EndedStart(exit_codes=(-9,))


def raised(**changes: object) -> EndedStart:
    """Return a start that an exception has ended."""
    return EndedStart(exit_codes=(1,), failure=replace(FAILURE, **changes))  # type: ignore[arg-type]


def verdicts(*ended: EndedStart, max_restarts: int = 100) -> list[Verdict]:
    """Return what follows each of several starts."""
    policy = RestartPolicy(max_restarts)
    return [policy.judge(each) for each in ended]


def saved(batch: int, ended: EndedStart = KILLED) -> EndedStart:
    """Return a start that has saved at a batch."""
    return replace(ended, saved=(1, 0, batch, 0))


def test_starts_wait_longer_until_there_is_progress() -> None:
    """The default number of starts spans four minutes, so a short failure of a file system ends no run."""
    waits = [verdict.wait_seconds for verdict in verdicts(*[KILLED] * 7, saved(4), KILLED, KILLED, saved(4), saved(5))]
    assert waits == [1, 10, 60, 180, 300, 300, 300, 1, 1, 10, 60, 1]


def test_a_run_is_given_up_after_starts_without_a_new_autosave() -> None:
    """Only starts without a new autosave count, and the same autosave again is not a new one."""
    found = verdicts(saved(1), KILLED, saved(1), saved(2), KILLED, KILLED, KILLED, max_restarts=3)
    assert [verdict.exit_code for verdict in found] == [None] * 6 + [4]
    assert "3 starts in a row ended without a new autosave" in found[-1].text
    assert [verdict.exit_code for verdict in verdicts(*map(saved, range(50)), max_restarts=1)] == [None] * 50


def test_a_later_fit_and_its_evaluations_are_progress() -> None:
    """An autosave of the next fit is newer, though its batch is less."""
    ended = [replace(KILLED, saved=place) for place in ((1, 0, 8, 0), (1, 0, 8, 3), (1, 2**62, 0, 0), (2, 0, 0, 0))]
    assert [verdict.wait_seconds for verdict in verdicts(*ended)] == [1, 1, 1, 1]


def test_the_same_exception_three_times_in_a_row_ends_the_run() -> None:
    """The message has the exception, the batch, and its samples. The first of them may have saved before it."""
    found = verdicts(saved(1, raised()), saved(1, raised()), saved(1, raised()))
    assert [verdict.exit_code for verdict in found] == [None, None, 3]
    for text in ("ValueError: boom", "in batch 5 of epoch 1", "train/0: 7, 3"):
        assert text in found[-1].text


def test_the_message_has_the_line_that_leaves_the_batch_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds to the batches that are left out already. A batch of an evaluation can't be left out."""
    monkeypatch.setenv("PL_FAULT_TOLERANT_SKIP_BATCHES", "0:2")
    policy = RestartPolicy(100, command="lightning-faulttolerant run -- python train.py")
    text = [policy.judge(raised()) for _ in range(3)][-1].text
    line = "lightning-faulttolerant run --skip 0:2 --skip 1:5 -- python train.py"
    assert text.endswith(f"To continue without this batch, type: {line}")
    assert "--skip" not in verdicts(*[raised(evaluated=3)] * 3)[-1].text


@pytest.mark.parametrize(
    "other", [raised(batch=6), raised(text="other"), raised(kind="KeyError"), raised(evaluated=0), KILLED]
)
def test_another_failure_in_between_is_not_the_same_again(other: EndedStart) -> None:
    """An exception at another batch, another one at the same batch, and a kill all begin to count again."""
    found = verdicts(raised(), raised(), other, raised(), raised(), raised())
    assert [verdict.exit_code for verdict in found] == [None] * 5 + [3]


def test_addresses_in_a_message_make_no_other_exception() -> None:
    """The address of an object differs from start to start."""
    texts = [f"<Net object at 0x7f{number:010x}> is wrong" for number in range(3)]
    assert [verdict.exit_code for verdict in verdicts(*(raised(text=text) for text in texts))] == [None, None, 3]


@pytest.mark.parametrize(
    ("codes", "expected"), [((143, 143), 143), ((143, 74, 76), 74), ((75, 76), 76), ((75, None), 75), ((), 143)]
)
def test_a_stopped_run_says_what_its_processes_say(codes: tuple[int | None, ...], expected: int) -> None:
    """A state that could not be saved, and a job that is queued again, are more than the signal."""
    assert stop_code(codes, signum=15) == expected


@pytest.mark.parametrize("changes", [{"batch": None}, {"is_lost": True}])
def test_an_exception_that_names_no_batch_is_never_the_same(changes: dict[str, object]) -> None:
    """A connection that fails in the setup may work later, and a rank that has lost another one knows no cause."""
    assert [verdict.exit_code for verdict in verdicts(*[raised(**changes)] * 4)] == [None] * 4
    assert verdicts(*[raised(**changes)] * 3, max_restarts=3)[-1].exit_code == 4


def test_a_new_autosave_begins_to_count_exceptions_again() -> None:
    """The same batch of a later fit is another one."""
    found = verdicts(saved(1, raised()), saved(1, raised()), saved(2, raised()), saved(2, raised()), saved(2, raised()))
    assert [verdict.exit_code for verdict in found] == [None, None, None, None, 3]


@pytest.mark.parametrize("code", [74, 75, 76, 129, 130, 131, 143])
def test_a_stop_on_request_ends_the_run_with_its_own_code(code: int) -> None:
    """Processes that were asked to stop are not started again, unless one of them has failed."""
    [verdict] = verdicts(EndedStart(exit_codes=(code, code)))
    assert verdict.exit_code == code
    assert [
        each.exit_code for each in verdicts(EndedStart(exit_codes=(code, 1)), EndedStart(exit_codes=(-9, code)))
    ] == [
        None,
        None,
    ]
