"""The contract with Lightning about several ranks."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _launch_process_observer

from lightning_faulttolerant.trainer.ranks.compat import call_off_observers


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
