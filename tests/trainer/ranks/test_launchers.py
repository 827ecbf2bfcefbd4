"""Stop signals under Lightning's own launcher and under torchrun, sent to one process and to all."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_faulttolerant.checkpoint.verify import load_file
from tests.harness import python

pytestmark = pytest.mark.slow

SECONDS = 60.0
SCRIPT = """
import os, time, warnings
import torch
from torch.utils.data import DataLoader
warnings.simplefilter("ignore")
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning_faulttolerant import FaultTolerance

class Events(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        with open(f"events-{trainer.global_rank}", "a") as file:
            file.write(f"{os.getpid()} {trainer.global_step}\\n")
        time.sleep(0.1)

class Slow(Callback):
    def on_exception(self, trainer, module, exception):
        time.sleep(0.1 if trainer.global_rank else 6.0 if "slow" in os.environ.get("ENDS", "") else 0.1)

trainer = Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_steps=30, limit_val_batches=0,
    max_epochs=-1, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, callbacks=[FaultTolerance("autosaves"), Events(), Slow()],
)
trainer.fit(BoringModel(), DataLoader(torch.linspace(0, 1, 64 * 32).reshape(64, 32)))
open(f"done-{trainer.global_rank}", "w").close()
"""


class Launched:
    """A script that a launcher has started, with all its processes in one group."""

    def __init__(self, directory: Path, command: list[str], environment: dict[str, str]) -> None:
        self.directory = directory
        (directory / "train.py").write_text(SCRIPT)
        self.output = directory / "output.txt"
        root = Path(__file__).parents[3]
        own = {"PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment}
        # Forked, and so are the ranks; tests/laws/test_launchers.py starts each launcher as a shell does.
        words = [sys.executable, *command, "train.py"]
        asked = python.Command(words=words, directory=str(directory), environment={**os.environ, **own})
        self.process = python.Popen(asked, output=self.output, mark=directory / "open")

    def process_id(self, rank: int, *, step: int, seconds: float = 60.0) -> int:
        """Return the process of a rank that has reached a step."""
        events = self.directory / f"events-{rank}"
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            lines = events.read_text().splitlines() if events.exists() else []
            if lines and int(lines[-1].split()[1]) >= step:
                return int(lines[-1].split()[0])
            time.sleep(0.01)
        raise AssertionError(self.output.read_text())

    def wait(self, seconds: float = 60.0) -> int:
        """Return the exit code of the command; all its processes must end soon after."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise AssertionError(f"it hangs:\n{self.output.read_text()}") from error
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            try:
                os.killpg(self.process.pid, 0)
            except ProcessLookupError:
                return code
            time.sleep(0.02)
        raise AssertionError(f"processes are left:\n{self.output.read_text()}")


@contextlib.contextmanager
def launched(directory: Path, *command: str, **environment: str) -> Iterator[Launched]:
    """Start the script, and kill all its processes at the end."""
    made = Launched(directory, list(command), environment)
    try:
        yield made
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.process.pid, signal.SIGKILL)
        made.process.wait(10)


def saved_step(directory: Path) -> int:
    """Return the step of the newest autosave, which must be valid and from two ranks."""
    newest = sorted((directory / "autosaves").rglob("autosave-*.ckpt"))[-1]
    checkpoint = load_file(str(newest))
    assert len(checkpoint["lightning_faulttolerant"]["ranks"]) == 2
    return int(checkpoint["global_step"])


@pytest.mark.parametrize("to", ["rank 1", "all"])
def test_lightnings_own_launcher(to: str, tmp_path: Path) -> None:
    """Whichever process gets the signal, the command ends with its exit code, saved, and continues from there.

    This holds even if rank 0 takes longer to end than Lightning's observer waits. The observer checks every 5
    seconds whether another rank has ended with an error, and would kill rank 0.
    """
    with launched(tmp_path, ENDS="slow" if to == "rank 1" else "") as run:
        process_ids = [run.process_id(rank, step=4) for rank in (0, 1)]
        if to == "all":
            os.killpg(run.process.pid, signal.SIGTERM)
        else:
            os.kill(process_ids[1], signal.SIGTERM)
        assert run.wait() == 143, run.output.read_text()
    step = saved_step(tmp_path)
    assert step >= 4
    if to == "rank 1":
        with launched(tmp_path) as run:
            assert run.wait() == 0, run.output.read_text()
        steps = [int(line.split()[1]) for line in (tmp_path / "events-0").read_text().splitlines()]
        assert steps == list(range(30))


@pytest.mark.parametrize("to", ["rank 1", "torchrun"])
def test_torchrun(to: str, tmp_path: Path) -> None:
    """A signal to a rank, or to torchrun, which forwards it: everything is saved, and the next start continues."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    with launched(tmp_path, *command) as run:
        process_ids = [run.process_id(rank, step=4) for rank in (0, 1)]
        os.kill(process_ids[1] if to == "rank 1" else run.process.pid, signal.SIGTERM)
        assert run.wait() != 0
    step = saved_step(tmp_path)
    assert step >= 4
    steps = [int(line.split()[1]) for line in (tmp_path / "events-1").read_text().splitlines()]
    assert steps == list(range(step))
