"""SLURM jobs are stopped before they end, saved, and queued again by rank 0, never in a signal handler."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.early_signals import EARLY
from tests.laws.ranks import FOR_RANKS
from tests.trainer.ranks.stopped_ranks import rank_fit, rank_processes

pytestmark = FOR_RANKS


class SlowBatches(Callback):
    """Prints where it is, and takes its time."""

    def __init__(self, seconds: float = 0.05) -> None:
        self._seconds = seconds

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        print(f"train {trainer.current_epoch * 8 + batch_idx}", flush=True)
        time.sleep(self._seconds)


class Job:
    """A SLURM job of one or two ranks; its ``scontrol`` notes how it queues again, and which autosaves exist then."""

    def __init__(self, tmp_path: Path, *, num_ranks: int = 1, scontrol: str = "exit 0") -> None:
        self.num_ranks = num_ranks
        self.directory = tmp_path
        self.log = tmp_path / "scontrol.txt"
        self.kept = tmp_path / "kept"
        script = tmp_path / "bin" / "scontrol"
        script.parent.mkdir()
        lines = ["#!/bin/sh", '[ "$2" != show ] || exit', f'echo "$@" >> {self.log}']
        script.write_text("\n".join([*lines, f"cp -r {tmp_path}/autosaves {self.kept}", scontrol]))
        script.chmod(0o755)
        self.environment = {
            # A real SLURM may be installed.
            "PATH": str(tmp_path) if scontrol == "missing" else f"{script.parent}:/usr/bin:/bin",
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NAME": "train",
            "SLURM_NTASKS": str(num_ranks),
            "SLURM_NTASKS_PER_NODE": str(num_ranks),
            "SLURM_NNODES": "1",
            "SLURM_NODEID": "0",
            "SLURM_NODELIST": "localhost",
        }

    def run(
        self,
        code: int,
        *signals: tuple[int, int],
        environment: Mapping[str, str] = {},
        options: Mapping[str, Any] = {},
        auto_requeue: bool = True,
        seconds: float = 0.05,
        before: Callable[[], None] = lambda: None,
        **arguments: Any,
    ) -> str:
        """Start it, send signals to ranks in batch 3, and return the output of rank 0 once all have ended so."""

        def main(rank: int) -> None:
            os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = str(rank)
            before()
            plugins = [SLURMEnvironment(auto_requeue=auto_requeue)]
            chosen = {"train_time_interval": timedelta(hours=1), **options}
            callbacks = [FaultTolerance(dirpath=self.directory / "autosaves", **chosen), SlowBatches(seconds)]
            trainer = rank_fit(self.num_ranks, callbacks, self.directory, plugins=plugins, **arguments)
            print(f"has trained {trainer.global_step} steps", flush=True)

        environment = {**self.environment, **environment}
        with rank_processes(main, num_ranks=self.num_ranks, environment=environment) as processes:
            if signals:
                processes.wait_for("train 3")
            for signum, rank in signals:
                processes.send(signum, rank)
            ended = processes.wait()
        assert [each.exit_code for each in ended] == [code] * self.num_ranks, ended[0].output
        return ended[0].output

    def assert_queued_again(self, *, in_batch: bool) -> None:
        """Check that ``scontrol`` was called once, after a verified autosave of the stop existed."""
        assert self.log.read_text().splitlines() == ["requeue 4711"]
        newest = sorted(self.kept.rglob("autosave-*.ckpt"))[-1]
        assert (load_file(str(newest))["global_step"] > 0) is in_batch
        assert list(self.directory.rglob("hpc_ckpt*")) == []


USR1 = signal.SIGUSR1


def notice() -> None:
    """Send the notice while the script is still being imported."""
    # As an import of the package does; ours came before the job's environment, and test ranks have torchrun's.
    EARLY.begin({name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"})
    os.kill(os.getpid(), USR1)


def own_handler() -> None:
    """Handle the signal as a script does."""
    signal.signal(USR1, lambda signum, frame: print("the user's own", flush=True))


AT_ONCE = {"num_sanity_val_steps": 0}
NOTICE = {"before": notice, **AT_ONCE}
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_ranks", "ranks", "arguments"),
    [
        (1, (0,), {}),
        pytest.param(2, (1,), {}, marks=SLOW),
        (1, (), NOTICE),
    ],
)
def test_signal_leads_to_a_save_and_a_requeue(
    num_ranks: int, ranks: tuple[int, ...], arguments: dict[str, Any], tmp_path: Path
) -> None:
    """The job is saved at the boundary, then queued again once by rank 0; when it is restarted, it continues there.

    A notice that comes before the fit stops it at its first boundary.
    """
    job = Job(tmp_path, num_ranks=num_ranks)
    assert ("train 0\n" in job.run(76, *((USR1, rank) for rank in ranks), **arguments)) == bool(ranks)
    job.assert_queued_again(in_batch=bool(ranks))
    again = job.run(0, environment={"SLURM_RESTART_COUNT": "1"})
    assert "Resumed exactly" in again
    assert ("train 0\n" in again) != bool(ranks)
    assert "has trained 16 steps" in again


REQUEUED = ["requeue 4711"]
FIRST = [(USR1, 0)]
# What the job is, its exit code, the signals, what it does, what it says, and what scontrol is told.
ENDS: dict[str, tuple[dict[str, Any], int, list[tuple[int, int]], dict[str, Any], str, list[str]]] = {
    "requeue fails": (
        {"scontrol": "echo 'Invalid job id' >&2; exit 3"}, 128 + USR1, FIRST, {},
        "scontrol requeue 4711 ended with 3: Invalid job id", REQUEUED,
    ),
    "no scontrol": ({"scontrol": "missing"}, 128 + USR1, FIRST, {}, "THE SLURM JOB IS NOT QUEUED AGAIN", []),
    "own handler": (
        {}, 143, [*FIRST, (signal.SIGTERM, 0)], {"before": own_handler, "seconds": 0.3}, "the user's own", []
    ),
    "in the sanity check": ({}, 76, [], {"before": notice}, "", REQUEUED),
    "no requeue": ({}, -USR1, [], {"before": notice, "auto_requeue": False}, "the job is not queued again", []),
    "a stop signal": (
        {}, 128 + USR1, [], {**NOTICE, "auto_requeue": False, "options": {"stop_signals": ("SIGUSR1",)}}, "", []
    ),
}  # fmt: skip
QUICK = ("in the sanity check", "no requeue")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in ENDS])
def test_end_of_a_job(name: str, tmp_path: Path) -> None:
    """A failed requeue is said loudly, a handler of the user's own keeps the signal, and a notice may come early."""
    kind, code, signals, arguments, text, told = ENDS[name]
    job = Job(tmp_path, **kind)
    assert text in job.run(code, *signals, **arguments)
    assert (job.log.read_text().splitlines() if job.log.exists() else []) == told
