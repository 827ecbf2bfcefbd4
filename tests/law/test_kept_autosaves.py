"""`keep_every`: an autosave at each multiple of so many steps stays, whatever else is saved, pruned, or killed."""

from __future__ import annotations

import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from lightning_faulttolerant import FlightRecorder
from lightning_faulttolerant.errors import OPTIONS_VARIABLE
from lightning_faulttolerant.testing import assert_resumes_exactly
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.full_disks import FullDisk
from tests.processes import run
from tests.runs import fit_net
from tests.scripts import protection


def places(directory: Path) -> list[tuple[int, int]]:
    """Return epoch and batch of each kept autosave."""
    found = (re.search(r"epoch=(\d+)-batch=(\d+)-kept", path.name) for path in directory.rglob("autosave-*"))
    return sorted((int(match[1]), int(match[2])) for match in found if match is not None)


@pytest.mark.parametrize("options", [{"every_n_train_steps": 2}, {}, {"async_save": True}], ids=str)
def test_each_multiple_is_kept_after_the_end(tmp_path: Path, options: dict[str, Any]) -> None:
    """Two epochs of 5 steps leave the states of steps 3, 6, and 9, and nothing that a rerun would continue from."""
    ended = run(lambda: fit_net(protection(keep_every=3, **options), tmp_path, max_epochs=2))
    assert ended.exit_code == 0, ended.output
    assert places(tmp_path) == [(0, 3), (1, 1), (1, 4)]
    again = run(lambda: fit_net(protection(keep_every=3, **options), tmp_path, max_epochs=2))
    assert "Resumed" not in again.output
    assert again.exit_code == 0, again.output


def test_the_multiples_continue_after_a_kill(tmp_path: Path) -> None:
    """They are counted from the beginning of the run, not from the start of a process."""

    def main(*faults: Callback) -> None:
        fit_net([*protection(keep_every=4, every_n_train_steps=1), *faults], tmp_path, max_epochs=2)

    assert run(lambda: main(KillAt(6))).exit_code == -signal.SIGKILL
    assert places(tmp_path) == [(0, 4)]
    assert run(main, seed=99).exit_code == 0
    assert places(tmp_path) == [(0, 4), (1, 3)]


def test_a_multiple_that_finds_no_room_is_kept_a_step_later(tmp_path: Path) -> None:
    """The disk is full at the save of step 3: the state of step 4 is kept, and then that of step 6 as always."""
    own = protection(keep_every=3, every_n_train_steps=1)
    ended = run(lambda: fit_net([*own, FullDisk(2, 3)], tmp_path, max_epochs=2))
    assert ended.exit_code == 0, ended.output
    assert "could not be saved" in ended.output
    assert places(tmp_path) == [(0, 4), (1, 1), (1, 4)]


@pytest.mark.parametrize("options", [{"every_n_train_steps": 3}, {"train_time_interval": timedelta(hours=1)}], ids=str)
def test_a_multiple_that_finds_no_room_is_kept_though_no_other_save_is_due(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """The next save that is due is that of the next multiple, or an hour away."""
    ended = run(lambda: fit_net([*protection(keep_every=3, **options), FullDisk(2, 3)], tmp_path, max_epochs=2))
    assert ended.exit_code == 0, ended.output
    assert "could not be saved" in ended.output
    assert places(tmp_path) == [(0, 4), (1, 1), (1, 4)]


def test_a_resume_from_the_newest_is_exact_with_kept_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that keeps autosaves resumes from its newest one, kept or not."""

    def fit(callbacks: list[Callback], directory: Path) -> Any:
        return fit_net(callbacks, directory, max_epochs=2)

    monkeypatch.setenv(OPTIONS_VARIABLE, "FlightRecorder.rule=none, FlightRecorder.keep_every=2")
    assert_resumes_exactly(fit, [KillAt(2), KillAt(6)], options={"every_n_train_steps": 1})


@pytest.mark.parametrize(("keep_every", "error"), [(0, ValueError), (1.5, TypeError)])
def test_no_number_of_steps_is_refused(keep_every: Any, error: type[Exception]) -> None:
    """A number that can't be one of steps is refused when the callback is made."""
    with pytest.raises(error, match="keep_every"):
        FlightRecorder(keep_every=keep_every)
