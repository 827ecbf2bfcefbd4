"""Printed messages are whole lines, in any terminal, from rank zero only, at the level that the user sets."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
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
from tests.data_sets import NoisyDataset
from tests.processes import Script
from tests.runs import fit_net

ROWS, COLUMNS = 200, 120
OURS = ("Resumed exactly", "A kill repeats at most", "Stopped by")


class Screen:
    """The visible content of a terminal: it understands only the control sequences that progress bars use."""

    def __init__(self) -> None:
        self.lines: list[str] = [""]
        self.row = self.column = 0

    def write(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[^\x1b]", text):
            if part == "\r":
                self.column = 0
            elif part == "\n":
                self.row += 1
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif len(part) == 1:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + part + line[self.column + 1 :]
                self.column += 1
            elif part[-1] == "A":
                self.row = max(0, self.row - int(part[2:-1] or 1))
            elif part[-1] == "K":
                self.lines[self.row] = "" if part == "\x1b[2K" else self.lines[self.row][: self.column]
            elif part[-1] not in "mhl":
                raise NotImplementedError(repr(part))


def in_terminal(main: Callable[[], Any]) -> tuple[int, list[str]]:
    """Run `main` in a process whose output is a terminal; return its exit code and the terminal's final content."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    terminal = {"TERM": "xterm", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    process_id = fork_and_run(main, output=Path(os.ttyname(slave)), seed=1, environment=terminal)
    written, done = b"", 0
    while not done:
        done, status = os.waitpid(process_id, os.WNOHANG)
        while select.select([master], [], [], 0.01)[0]:
            written += os.read(master, 1 << 16)
    os.close(slave)
    os.close(master)
    screen = Screen()
    screen.write(written.decode())
    return os.waitstatus_to_exitcode(status), screen.lines


@pytest.mark.parametrize("bar", [RichProgressBar, TQDMProgressBar])
def test_our_lines_stand_alone_beside_a_progress_bar(bar: type[Callback], tmp_path: Path) -> None:
    """In a terminal each of our lines starts at the left edge and stands alone, whichever bar is drawn around it."""

    def main(*faults: Callback) -> None:
        sys.argv = ["script.py"]
        callbacks = [FaultTolerance(run_id="terminal", every_n_train_steps=1), bar(), *faults]
        fit_net(callbacks, tmp_path, enable_progress_bar=True, max_epochs=1)

    code, stopped = in_terminal(lambda: main(KillAt(3, signum=signal.SIGTERM)))
    assert code == 143, stopped
    code, resumed = in_terminal(main)
    assert code == 0, resumed
    lines = [line.removeprefix("INFO: ") for line in stopped + resumed]  # this process's logging adds the prefix
    for text in OURS:
        assert any(line.startswith(text) for line in lines), (text, lines)
        assert not [line for line in lines if text in line.lstrip() and not line.startswith(text)], lines
    told = [line.rstrip() for line in lines if line.startswith(OURS)]
    place = "before batch 4 of epoch 0"
    saved = f"{tmp_path}/fault_tolerance/terminal"
    words = shlex.join(sys.orig_argv)
    most = "A kill repeats at most 1 step of training; every_n_train_steps changes that."
    assert told == [
        most,
        f"Stopped by SIGTERM {place}. The state {place} is saved in {saved}. To continue, type: {words}",
        f"Resumed exactly {place}, global step 4, from {saved}/fit-1/autosave-00000005-epoch=0-batch=4.ckpt. To start "
        f"over instead, type: lightning-faulttolerant discard {saved}",
        most,
    ]
    assert any("Epoch 0" in line for line in lines)


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
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    (os.killpg if to_group else os.kill)(script.process_id, signum)
    ended = script.wait()
    assert ended.exit_code == 128 + signum, ended.output
    assert "Traceback" not in ended.output
    assert ended.output.splitlines()[-1].startswith(f"Stopped by {signum.name} before batch ")
