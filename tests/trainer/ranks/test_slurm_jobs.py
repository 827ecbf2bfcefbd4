"""SLURM jobs are stopped before they end, saved, and queued again by rank 0, never in a signal handler."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.early_signals import EARLY
from lightning_faulttolerant.trainer import signals as deadline_module
from tests.laws.ranks import FOR_RANKS
from tests.runs import fit_eight
from tests.trainer.ranks.stopped_ranks import RankEnded, RankProcesses, rank_fit

pytestmark = [*FOR_RANKS, pytest.mark.filterwarnings("ignore:The `srun` command is available")]


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

    def start(
        self,
        *,
        environment: Mapping[str, str] = {},
        options: Mapping[str, Any] = {},
        auto_requeue: bool = True,
        seconds: float = 0.05,
        before: Callable[[], None] = lambda: None,
        **arguments: Any,
    ) -> RankProcesses:
        """Start the job's processes."""

        def main(rank: int) -> None:
            os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = str(rank)
            before()
            plugins = [SLURMEnvironment(auto_requeue=auto_requeue)]
            chosen = {"train_time_interval": timedelta(hours=1), **options}
            callbacks = [FaultTolerance(dirpath=self.directory / "autosaves", **chosen), SlowBatches(seconds)]
            if self.num_ranks == 1:
                trainer = fit_eight(callbacks, self.directory, plugins=plugins, **arguments)
            else:
                trainer = rank_fit(self.num_ranks, callbacks, self.directory, plugins=plugins, **arguments)
            print(f"has trained {trainer.global_step} steps", flush=True)

        return RankProcesses(main, num_ranks=self.num_ranks, environment={**self.environment, **environment})

    def run(self, codes: int, *signals: tuple[int, int], **arguments: Any) -> str:
        """Start it, send signals to ranks in batch 3, and return the output of rank 0 once all have ended so."""
        with self.start(**arguments) as processes:
            if signals:
                processes.wait_for("train 3", *range(self.num_ranks))
            for signum, rank in signals:
                processes.send(signum, rank)
            ended: list[RankEnded] = processes.wait()
        assert [each.exit_code for each in ended] == [codes] * self.num_ranks, ended[0].output
        return ended[0].output

    def assert_queued_again(self, *, in_batch: bool = True) -> None:
        """Check that ``scontrol`` was called once, after a verified autosave of the stop existed."""
        assert self.log.read_text().splitlines() == ["requeue 4711"]
        newest = sorted(self.kept.rglob("autosave-*.ckpt"))[-1]
        assert (load_file(str(newest))["global_step"] > 0) is in_batch
        assert list(self.directory.rglob("hpc_ckpt*")) == []


USR1 = signal.SIGUSR1


@pytest.mark.parametrize(
    ("num_ranks", "ranks"),
    [(1, (0,)), pytest.param(2, (0, 1), marks=pytest.mark.slow), pytest.param(2, (1,), marks=pytest.mark.slow)],
)
def test_signal_leads_to_a_save_and_a_requeue(num_ranks: int, ranks: tuple[int, ...], tmp_path: Path) -> None:
    """The job is saved at the boundary, then queued again once by rank 0; when it is restarted, it continues there."""
    job = Job(tmp_path, num_ranks=num_ranks)
    job.run(76, *((USR1, rank) for rank in ranks))
    job.assert_queued_again()
    again = job.run(0, environment={"SLURM_RESTART_COUNT": "1"})
    assert "Resumed exactly" in again
    assert "train 0\n" not in again
    assert "has trained 16 steps" in again


def notice() -> None:
    """Send the notice while the script is still being imported."""
    # As an import of the package does; ours came before the job's environment, and test ranks have torchrun's.
    EARLY.begin({name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"})
    os.kill(os.getpid(), USR1)


def own_handler() -> None:
    """Handle the signal as a script does."""
    signal.signal(USR1, lambda signum, frame: print("the user's own", flush=True))


AT_ONCE = {"num_sanity_val_steps": 0}
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
    "grace period is over": (
        {"num_ranks": 2}, 76, [*FIRST, (USR1, 1)], {"options": {"grace_seconds": 1.0}, "seconds": 0.5}, "", REQUEUED
    ),
    "deadline has passed": (
        {}, 75, [], {"options": {"deadline": datetime(2001, 1, 1)}, **AT_ONCE},
        "Stopped by the deadline before batch 0 of epoch 0", [],
    ),
    "in the sanity check": ({}, 76, [], {"before": notice}, "", REQUEUED),
    "no requeue": ({}, -USR1, [], {"before": notice, "auto_requeue": False}, "the job is not queued again", []),
    "a stop signal": (
        {}, 128 + USR1, [],
        {"before": notice, "auto_requeue": False, "options": {"stop_signals": ("SIGUSR1",)}, **AT_ONCE}, "", [],
    ),
}  # fmt: skip
QUICK = ("in the sanity check", "no requeue")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ENDS]
)
def test_end_of_a_job(name: str, tmp_path: Path) -> None:
    """A failed requeue is said loudly, a handler of the user's own keeps the signal, and a notice may come early."""
    kind, code, signals, arguments, text, told = ENDS[name]
    job = Job(tmp_path, **kind)
    assert text in job.run(code, *signals, **arguments)
    assert (job.log.read_text().splitlines() if job.log.exists() else []) == told


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "auto_requeue"), [(1, False), (2, True)])
def test_end_of_the_job_is_a_deadline(
    num_ranks: int, auto_requeue: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any signal, the job is saved before its time is over, and queued again if requeueing is on."""
    monkeypatch.setattr(deadline_module, "RESERVE_SECONDS", 1.0)
    job = Job(tmp_path, num_ranks=num_ranks)
    end = int(time.time()) + 8
    arguments = {"auto_requeue": auto_requeue, "max_epochs": 1000, "num_sanity_val_steps": 0}
    output = job.run(76 if auto_requeue else 75, environment={"SLURM_JOB_END_TIME": str(end)}, **arguments)
    assert max(path.stat().st_mtime for path in job.directory.rglob("autosave-*")) < end
    assert "Stopped by the deadline" in output
    assert job.log.exists() is auto_requeue


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fit_after_a_notice_stops_and_the_job_is_queued_again(num_ranks: int, tmp_path: Path) -> None:
    """The fit stops at its first boundary, saved, with the code of a requeue; the next start trains to the end."""
    job = Job(tmp_path, num_ranks=num_ranks)
    assert "train 0" not in job.run(76, before=notice, num_sanity_val_steps=0)
    job.assert_queued_again(in_batch=False)
    again = job.run(0)
    assert "Resumed exactly" in again
    assert "has trained 16 steps" in again
