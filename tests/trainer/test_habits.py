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
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing.processes import fork_and_run
from lightning_faulttolerant.trainer.recorder import KillAt
from tests.data_sets import NoisyDataset
from tests.processes import Script, run
from tests.runs import Net, fit_net

BARS: dict[str, Callable[[], list[Callback]]] = {
    "rich": lambda: [RichProgressBar()],
    "tqdm": lambda: [TQDMProgressBar()],
    "none": list,
}
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


@pytest.mark.parametrize("bar", ["rich", "tqdm", pytest.param("none", marks=pytest.mark.slow)])
def test_our_lines_stand_alone_beside_a_progress_bar(bar: str, tmp_path: Path) -> None:
    """In a terminal each of our lines starts at the left edge and stands alone, whichever bar is drawn around it."""

    def main(*faults: Callback) -> None:
        sys.argv = ["script.py"]
        callbacks = [FaultTolerance(run_id="terminal", every_n_train_steps=1), *BARS[bar](), *faults]
        fit_net(callbacks, tmp_path, enable_progress_bar=bar != "none", max_epochs=1)

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
    assert bar == "none" or any("Epoch 0" in line for line in lines)


class Numbered(Net):
    """Has the number of its start among its hyperparameters."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("is_exact", [True, False])
def test_a_start_says_three_lines_at_most_and_a_stop_one(is_exact: bool, tmp_path: Path) -> None:
    """Lightning's own lines aside, a start is a line, a resume two or three, and a stop one; no path comes twice."""

    def main(name: str, number: int, *faults: Callback) -> None:
        ours = [FaultTolerance(run_id="lines", every_n_train_steps=1, strict=False)] if name == "ours" else []
        module = Numbered(0 if is_exact else number)
        fit_net([*ours, *faults], tmp_path / name, module=module, max_epochs=1, logger=CSVLogger(tmp_path / name))

    of_lightning = set(run(lambda: main("plain", 0)).output.splitlines())

    def lines(number: int, *faults: Callback) -> list[str]:
        printed = run(lambda: main("ours", number, *faults)).output.splitlines()
        return [line for line in printed if line not in of_lightning and not line.startswith("Restored all states")]

    most, stopped = lines(0, KillAt(3, signum=signal.SIGTERM))
    assert stopped.startswith("Stopped by SIGTERM before batch 4 of epoch 0. The state before batch 4 of epoch 0 is ")
    resumed, *not_exact, again = lines(1)
    assert resumed.startswith(f"Resumed {'exactly' if is_exact else 'NOT EXACTLY'} before batch 4 of epoch 0, ")
    differs = "  NOT EXACT hyperparameters.start: 0 when it was saved, 1 now"
    assert not_exact == ([] if is_exact else [differs])
    assert most == again == "A kill repeats at most 1 step of training; every_n_train_steps changes that."
    assert resumed.count(f"{tmp_path}/ours/fault_tolerance/lines/fit-1/") == 1


@pytest.mark.parametrize("to_group", [False, True])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
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
