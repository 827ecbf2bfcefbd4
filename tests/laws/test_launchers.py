"""The law for each launcher of ranks: Lightning's, and torchrun, which starts ranks again on one machine or several."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance
from tests.laws.events import read, slice_of, write
from tests.laws.launched import Agent, train
from tests.laws.processes import run_ranks, signal_to
from tests.laws.ranks import FOR_RANKS
from tests.laws.runs import QUIET

pytestmark = FOR_RANKS
ROOT = Path(__file__).parents[2]
NUM_RESTARTS = 3


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an uninterrupted run without the callback."""
    directory = tmp_path_factory.mktemp("whole")
    outputs = [directory / f"{rank}.txt" for rank in range(2)]
    codes = run_ranks(lambda _: train(directory, protected=False), outputs=outputs, seed=1)
    assert codes == [0, 0], outputs[0].read_text()
    return directory


def assert_continued(whole: Path, directory: Path, output: str, *, num_starts: int = 2) -> None:
    """Check that the starts of each rank are slices of the whole run, without gaps, and that only a history is left."""
    assert output.count("Resumed exactly") == num_starts - 1, output
    for rank in range(2):
        events, end = read(whole / f"start-0-rank-{rank}.jsonl"), 0
        for number in range(num_starts):
            part = read(directory / f"start-{number}-rank-{rank}.jsonl")
            begin, last = slice_of(events, part, whole_name="the whole run", part_name=f"start {number}")
            assert (begin <= end) & ((begin == 0) == (number == 0)), (begin, end)
            end = last
        assert end == len(events)
    left = [path.name for path in (directory / "autosaves").rglob("*") if path.is_file()]
    assert left == ["history.jsonl"]


def command(directory: Path, *, strategy: str = "ddp", signum: int = signal.SIGKILL) -> tuple[int, str]:
    """Run the script by a command, with a shell's environment; return its exit code and output."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC_", "MASTER_"))}
    arguments = json.dumps({"directory": str(directory), "strategy": strategy, "signum": signum})
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "tests/laws/launched.py"), arguments],
        env={**own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    finally:
        signal_to(process.pid, signal.SIGKILL, os.killpg)
        process.wait()
    return process.returncode, output


@pytest.mark.slow
@pytest.mark.timeout(600)  # each process of a command imports everything
@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork", "ddp, stopped"])
def test_ranks_of_a_command(strategy: str, whole: Path, tmp_path: Path) -> None:
    """Under ``python train.py``, whose ranks Lightning starts as commands, spawns, or forks, a cut run continues.

    A signal to one rank stops all, and the command has its exit code.
    """
    strategy, _, stopped = strategy.partition(", ")
    code, output = command(tmp_path, strategy=strategy, signum=signal.SIGTERM if stopped else signal.SIGKILL)
    assert (code == 143) if stopped else code, output
    code, output = command(tmp_path, strategy=strategy)
    assert code == 0, output
    assert_continued(whole, tmp_path, output)


class KillInTurn(Callback):
    """Kills the ranks in turn, one at each of the first three starts, each in a later batch."""

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        number = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if (trainer.global_step, trainer.global_rank) == (number + 2, number % 2) and number < NUM_RESTARTS:
            os.kill(os.getpid(), signal.SIGKILL)


def test_killed_at_each_start(whole: Path, tmp_path: Path) -> None:
    """A run whose ranks are killed in turn, three times: those of each start meet each other, not the dead."""

    def script() -> None:
        if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
            time.sleep(0.3)  # rank 1 looks for rank 0 before it is there, and finds the dead one if it can
        train(tmp_path, KillInTurn())

    agent = Agent(script)
    assert agent.wait() == 0, agent.output
    assert_continued(whole, tmp_path, agent.output, num_starts=NUM_RESTARTS + 1)


NUM_SAMPLES, GLOBAL_BATCH = 64, 8
STEPS = 2 * NUM_SAMPLES // GLOBAL_BATCH
"""The steps of two epochs."""


class Notes(LightningModule):
    """Notes the samples of each batch, and takes its time, so that machines can come and go."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.layer, self.path = nn.Linear(1, 1), str(path)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        num_ranks, epoch, step = self.trainer.world_size, self.current_epoch, self.global_step
        write(Path(self.path), "batch", ranks=num_ranks, epoch=epoch, step=step, samples=batch[:, 0].tolist())
        waits = num_ranks == 1 and os.path.exists(f"{self.path}.waits")  # for the other machine
        time.sleep(1.5 if waits else 0.1)
        return self.layer(batch / NUM_SAMPLES).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Machines:
    """The machines of a run, each with an agent and one rank."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.path = directory, directory / "notes.jsonl"
        self.agents: list[Agent] = []
        with socket.socket() as free:
            free.bind(("localhost", 0))
            self.port = free.getsockname()[1]

    def join(self, address: str) -> Agent:
        self.agents.append(Agent(self.train, num_ranks=1, port=self.port, address=address, is_host=not self.agents))
        return self.agents[-1]

    def train(self) -> None:
        num_ranks = int(os.environ["WORLD_SIZE"])
        trainer = Trainer(
            callbacks=[FaultTolerance(self.directory / "autosaves", run_id="run", elastic=True, every_n_train_steps=1)],
            max_epochs=1000,
            strategy="ddp",
            devices=1,
            num_nodes=num_ranks,
            logger=False,
            enable_checkpointing=False,
            default_root_dir=self.directory,
            **QUIET,
        )
        rows = torch.arange(float(NUM_SAMPLES)).reshape(-1, 1)
        trainer.fit(Notes(self.path), DataLoader(rows, batch_size=GLOBAL_BATCH // num_ranks))  # type: ignore[arg-type]

    def wait_for(self, num_ranks: int, *, step: int) -> None:
        """Wait until this number of ranks has come to a step."""
        while not any(each["ranks"] == num_ranks and each["step"] >= step for each in read(self.path)):
            time.sleep(0.02)

    def assert_each_sample_once(self, *, after: int) -> None:
        """Check the first two epochs, in which the number of ranks has become `after`."""
        notes = read(self.path)
        resumed_at = min(each["step"] for each in notes if each["ranks"] == after)
        assert 0 < resumed_at < STEPS, "it began from the beginning, or came too late"
        counted = [each for each in notes if each["ranks"] == after or each["step"] < resumed_at]
        for epoch in range(2):
            samples = Counter(sample for each in counted if each["epoch"] == epoch for sample in each["samples"])
            assert samples == Counter(range(NUM_SAMPLES))


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """Yield the machines of a run, and kill them."""
    found = Machines(tmp_path)
    yield found
    for agent in found.agents:
        agent.kill()


@pytest.mark.slow
def test_machine_joins(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine joins, as the first in order. All start again, saved, and no sample is lost or repeated.

    torch's agents can't let it join while they share the store: docs/troubleshooting.md, "Several ranks".
    """
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    machines.join("127.0.0.2")
    machines.wait_for(1, step=2)
    machines.path.with_name("notes.jsonl.waits").touch()
    machines.join("127.0.0.1")
    machines.wait_for(2, step=STEPS)
    machines.assert_each_sample_once(after=2)
