"""Printed messages are whole lines, in any terminal, from rank zero only, at the level that the user sets."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing.processes import fork_and_run
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.laws.data_sets import NoisyDataset
from tests.processes import Script, wait_for
from tests.runs import fit_net


def in_terminal(main: Callable[[], Any]) -> tuple[int, str]:
    """Run `main` in a process whose output is a terminal; return its exit code and all that was written."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 200, 120, 0, 0))
    terminal = {"TERM": "xterm", "COLUMNS": "120", "LINES": "200"}
    process_id = fork_and_run(main, output=Path(os.ttyname(slave)), seed=1, environment=terminal)
    written, done = b"", 0
    while not done:
        done, status = os.waitpid(process_id, os.WNOHANG)
        while select.select([master], [], [], 0.01)[0]:
            written += os.read(master, 1 << 16)
    os.close(slave)
    os.close(master)
    return os.waitstatus_to_exitcode(status), written.decode()


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_our_lines_stand_alone_beside_a_progress_bar(bar: type[Callback], tmp_path: Path) -> None:
    """In a terminal each of our lines starts on a line of its own, or on one that was erased, and ends it."""

    def main(*faults: Callback) -> None:
        sys.argv = ["script.py"]
        callbacks = [FaultTolerance(run_id="terminal", every_n_train_steps=1), bar(), *faults]
        fit_net(callbacks, tmp_path, enable_progress_bar=True, max_epochs=1)

    stopped, resumed = in_terminal(lambda: main(KillAt(3, signum=signal.SIGTERM))), in_terminal(main)
    assert (stopped[0], resumed[0]) == (143, 0), stopped[1] + resumed[1]
    for text, (_, written) in (("Stopped by", stopped), ("A kill repeats", stopped), ("Resumed exactly", resumed)):
        assert "Epoch 0" in written
        assert re.search(rf"(\n|\x1b\[2K|\r +)\r?(INFO: )?{text}[^\n]*\n", written), written


@pytest.mark.parametrize(("signum", "to_group"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_a_stop_prints_no_traceback_of_workers(signum: signal.Signals, to_group: bool, tmp_path: Path) -> None:
    """With persistent workers that get the signal too, a stop is one line."""

    class Started(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            (tmp_path / "started").touch()
            time.sleep(0.01)

    def main() -> None:
        loader = DataLoader(NoisyDataset(), batch_size=4, num_workers=2, persistent_workers=True)
        fit_net([FaultTolerance(run_id="workers"), Started()], tmp_path, train=loader, max_epochs=100)

    script = Script(main)
    wait_for((tmp_path / "started").exists)
    (os.killpg if to_group else os.kill)(script.process_id, signum)
    ended = script.wait()
    assert ended.exit_code == 128 + signum, ended.output
    assert "Traceback" not in ended.output
    assert ended.output.splitlines()[-1].startswith(f"Stopped by {signum.name} before batch ")
