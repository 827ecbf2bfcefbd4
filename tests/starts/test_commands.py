"""Ways to start a script, each with the same command for the same run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.starts.started import (
    NUM_BATCHES,
    STOPPED,
    Project,
    assert_same_fit,
    assert_starts_over,
    continues,
    plain,
    stopped_twice,
)

PROFILER = ("-m", "cProfile", "-o", "profile.out")
COMMANDS = {
    "script": ("train.py", "--lr", "0.1"),
    "module": ("-m", "package.train"),
    "debugger": ("-m", "debugpy", "--listen", "127.0.0.1:0", "train.py"),
    "own checkpoints": ("last.py",),
}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """Return a directory with the scripts."""
    return Project(tmp_path / "project")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_stopped_twice(name: str, tmp_path: Path) -> None:
    """A command that is stopped twice ends with the same weights and metrics.

    Of the module and the debugger, the second start is a real one, as from a shell.
    """
    project, command = Project(tmp_path / "project"), COMMANDS[name]
    starts = stopped_twice(project, *command, steps=("TERM@5", "TERM@9"), is_real=name in ("module", "debugger"))
    whole = plain(*command) if name != "debugger" else plain("train.py")
    assert_same_fit(whole, starts)
    assert project.rows() == whole.rows
    assert [start.num_batches() for start in starts] == [5, 4, 3]


@pytest.mark.slow
def test_a_launcher_that_hides_the_exit_code(project: Project) -> None:
    """``cProfile`` ends with 0 after any ``SystemExit``, but a stopped run still does not count as finished."""
    starts = stopped_twice(project, *PROFILER, "train.py", code=0, is_real=True)
    assert_same_fit(plain("train.py"), starts)


@pytest.mark.slow
def test_killed(project: Project) -> None:
    """A command that is killed continues from its last autosave."""
    killed = project.start("train.py", interrupt="KILL@6", sleep=0.5)
    assert killed.exit_code == -signal.SIGKILL
    ended = project.start("train.py")
    assert ended.exit_code == 0, ended.output
    whole = plain("train.py")
    assert_same_fit(whole, [killed, ended])
    assert project.rows() == whole.rows


@pytest.mark.slow
def test_ways_to_name_a_script(project: Project) -> None:
    """``train.py``, its absolute path, and a path with dots are the same script."""
    name = project.directory.name
    first = project.start("train.py", interrupt="TERM@3")
    second = project.start(project.directory / "train.py", interrupt="TERM@6")
    third = project.start(f"../{name}/train.py", interrupt="TERM@9")
    fourth = project.start("./train.py")
    assert fourth.exit_code == 0, fourth.output
    assert_same_fit(plain("train.py"), [first, second, third, fourth])
    assert fourth.num_batches() == 3


@pytest.mark.slow
def test_folds(project: Project) -> None:
    """In a loop of folds, finished ones are not trained again, the stopped one continues, and the rest is trained."""
    first = project.start("folds.py", interrupt="TERM@4@fold-1")
    second = project.start("folds.py", interrupt="TERM@5@fold-2")
    third = project.start("folds.py")
    assert [first.exit_code, second.exit_code, third.exit_code] == [STOPPED, STOPPED, 0], third.output
    continues(first, second, "fold-1")
    continues(second, third, "fold-2")
    assert [second.num_batches(f"fold-{fold}") for fold in range(3)] == [0, 8, 5]
    assert [third.num_batches(f"fold-{fold}") for fold in range(3)] == [0, 0, 7]
    assert third.weights() == plain("folds.py").started.weights()


@pytest.mark.slow
def test_several_fits(project: Project) -> None:
    """A model that is trained twice continues when it is stopped in the first fit and in the second one."""
    first = project.start("fits.py", interrupt="TERM@4@pretrain")
    second = project.start("fits.py", interrupt="TERM@5@finetune")
    third = project.start("fits.py")
    assert [first.exit_code, second.exit_code, third.exit_code] == [STOPPED, STOPPED, 0], third.output
    continues(first, second, "pretrain")
    continues(second, third, "finetune")
    assert third.num_batches("pretrain") == 0
    assert third.num_batches("finetune") == NUM_BATCHES - 5
    assert third.weights() == plain("fits.py").started.weights()


@pytest.mark.slow
def test_a_fit_in_a_spawned_process(project: Project) -> None:
    """A fit in a process that ``multiprocessing`` has spawned continues in the process of the next start."""
    command = ("spawned.py", "0.1")
    first = project.start(*command, interrupt="TERM@4")
    second = project.start(*command, interrupt="TERM@9", forks=False)
    third = project.start(*command)
    assert [first.exit_code, second.exit_code, third.exit_code] == [1, 1, 0], third.output
    assert_same_fit(plain(*command), [first, second, third], "lr=0.1")


@pytest.mark.slow
def test_spawned_processes_one_after_the_other(project: Project) -> None:
    """A process that is spawned after another one has its own fit."""
    command = ("spawned.py", "0.1", "0.2")
    first = project.start(*command, interrupt="TERM@4@lr=0.2")
    second = project.start(*command)
    assert [first.exit_code, second.exit_code] == [1, 0], second.output
    continues(first, second, "lr=0.2")
    assert second.weights()["lr=0.2"] == plain(*command).started.weights()["lr=0.2"]


NEW_RUNS = {
    "script": (("train.py",), "fit"),
    "own checkpoints": (("folds.py",), "fold-1"),
    "module": (("-m", "package.train"), "fit"),
    "spawned": (("spawned.py", "0.1"), "lr=0.1"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "name"), NEW_RUNS.values(), ids=NEW_RUNS)
def test_a_run_that_ended_normally_is_a_new_run(command: tuple[str, ...], name: str, project: Project) -> None:
    """After the normal end of a run that was interrupted before, the same command trains everything again."""
    assert project.start(*command, interrupt=f"TERM@4@{name}").exit_code in (STOPPED, 1)
    assert project.start(*command).exit_code == 0
    assert_starts_over(project.start(*command), name=name)


@pytest.mark.slow
def test_two_scripts_of_one_launcher(project: Project) -> None:
    """Another script that is started by the same launcher does not take the first one's state."""
    first = project.start(*PROFILER, "train.py", interrupt="TERM@4")
    assert first.num_batches() == 4, first.output
    assert_starts_over(project.start(*PROFILER, "train_too.py"))
    third = project.start(*PROFILER, "train.py")
    assert third.exit_code == 0, third.output
    continues(first, third)


@pytest.mark.slow
def test_two_scripts_in_one_directory(project: Project) -> None:
    """Another script with the same fit does not take the first one's state."""
    first = project.start("train.py", interrupt="TERM@4")
    assert first.exit_code == STOPPED
    assert_starts_over(project.start("train_too.py"))
    third = project.start("train.py")
    assert third.exit_code == 0, third.output
    continues(first, third)
