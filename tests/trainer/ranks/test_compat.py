"""The contract with Lightning about several ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer
from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.ranks.compat import SEAMS, call_off_observers, cluster_environment
from tests.contract import missing
from tests.runs import make_trainer


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """Return a trainer of one rank."""
    return make_trainer([], tmp_path)


@pytest.mark.parametrize("path", SEAMS)
def test_each_seam_exists(path: str, trainer: Trainer) -> None:
    """The name exists; if a new Lightning drops it, the failure names the feature that breaks."""
    found = missing(trainer, path, SEAMS)
    assert found is None, found


def test_environment_of_one_rank(trainer: Trainer) -> None:
    """A trainer on one device may or may not have an environment: asking is not an error."""
    cluster_environment(trainer)


def test_observer_that_is_called_off_kills_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """After it is called off, a launcher's process that has ended with an error no longer kills this one."""
    import threading

    from lightning.fabric.strategies.launchers import subprocess_script

    killed = []
    monkeypatch.setattr(subprocess_script._ChildProcessObserver, "_terminate_all", lambda self: killed.append(1))
    looks = threading.Event()
    monkeypatch.setattr(subprocess_script, "time", SimpleNamespace(sleep=lambda seconds: looks.wait(20)))
    process = subprocess.Popen([sys.executable, "-S", "-c", "raise SystemExit(143)"])
    process.wait()
    _launch_process_observer([process])
    call_off_observers()
    [observer] = [thread for thread in threading.enumerate() if thread.name == "child-process-observer"]
    looks.set()
    observer.join(20)
    assert killed == []
    looks.clear()
    _launch_process_observer([process])
    [observer] = [thread for thread in threading.enumerate() if thread.name == "child-process-observer"]
    looks.set()
    observer.join(20)
    assert killed == [1]
