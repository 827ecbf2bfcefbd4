"""SLURM jobs are stopped before they end, saved, and queued again by rank 0, never in a signal handler."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
    """A SLURM job of one or two ranks; its ``scontrol`` notes how it queues again, and which autosaves exist then.

    Args:
        tmp_path: Where its files are.
        num_ranks: How many ranks it has.
        scontrol: What ``scontrol requeue`` does.
    """

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
                trainer = rank_fit(self.num_ranks, plugins=plugins, **arguments)(callbacks, self.directory)
            print(f"has trained {trainer.global_step} steps", flush=True)

        return RankProcesses(main, num_ranks=self.num_ranks, environment={**self.environment, **environment})

    def run(self, codes: int, *signals: tuple[int, int], **arguments: Any) -> str:
        """Start it, send signals to ranks in batch 3, and return the output of rank 0 once all have ended so."""
        with self.start(**arguments) as processes:
            if signals:
                processes.wait_for("train 3", *range(self.num_ranks))
            for signum, rank in signals:
                processes.send(signum, rank)
            ended: list[RankEnded] = processes.wait(seconds=60)
        assert [each.exit_code for each in ended] == [codes] * self.num_ranks, ended[0].output
        return ended[0].output

    def assert_queued_again(self, *, in_batch: bool = True) -> None:
        """Check that ``scontrol`` was called once, after a verified autosave of the stop existed."""
        assert self.log.read_text().splitlines() == ["requeue 4711"]
        newest = sorted(self.kept.rglob("autosave-*.ckpt"))[-1]
        assert (load_file(str(newest))["global_step"] > 0) is in_batch
        assert list(self.directory.rglob("hpc_ckpt*")) == []


TWO = pytest.mark.slow
USR1 = signal.SIGUSR1


@pytest.mark.parametrize(
    ("num_ranks", "ranks"),
    [(1, (0,)), pytest.param(2, (0, 1), marks=TWO), pytest.param(2, (1,), marks=TWO)],
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scontrol", "message"),
    [
        ("echo 'Invalid job id' >&2; exit 3", "scontrol requeue 4711 ended with 3: Invalid job id"),
        ("missing", "scontrol is not on the PATH"),
    ],
)
def test_requeue_that_fails_is_said_loudly(scontrol: str, message: str, tmp_path: Path) -> None:
    """The job is saved, the exit code is the signal's, and stderr gives the remedy."""
    output = Job(tmp_path, scontrol=scontrol).run(128 + USR1, (USR1, 0))
    assert "THE SLURM JOB IS NOT QUEUED AGAIN" in output
    assert message in output
    assert "Submit the job again" in output


@pytest.mark.slow
def test_handler_of_the_users_own_keeps_the_signal(tmp_path: Path) -> None:
    """As with Lightning, a requeue signal that the script handles itself is left to the script. SIGTERM only stops."""
    job = Job(tmp_path)

    def before() -> None:
        signal.signal(USR1, lambda signum, frame: print("the user's own", flush=True))

    assert "the user's own" in job.run(143, (USR1, 0), (signal.SIGTERM, 0), before=before, seconds=0.3)
    assert not job.log.exists()


@pytest.mark.slow
def test_grace_period_that_is_over_still_leads_to_a_requeue(tmp_path: Path) -> None:
    """A batch that does not end keeps the job from being saved, not from being queued again."""
    job = Job(tmp_path, num_ranks=2)
    job.run(76, (USR1, 0), (USR1, 1), options={"grace_seconds": 1.0}, seconds=0.5)
    assert job.log.read_text().splitlines() == ["requeue 4711"]


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


@pytest.mark.slow
@pytest.mark.parametrize("auto_requeue", [False, True])
def test_deadline_that_has_passed_when_the_fit_begins(auto_requeue: bool, tmp_path: Path) -> None:
    """The run is saved at its first boundary; the job is not queued again: it would end in the same way each time."""
    job = Job(tmp_path)
    options = {"deadline": datetime(2001, 1, 1)}
    output = job.run(75, options=options, auto_requeue=auto_requeue, num_sanity_val_steps=0)
    assert "Stopped by the deadline before batch 0 of epoch 0" in output
    assert "train 0" not in output
    assert not job.log.exists()


# The notice comes before the fit.


def notice() -> None:
    """Send the notice while the script is still being imported."""
    # As an import of the package does; ours came before the job's environment, and test ranks have torchrun's.
    EARLY.begin({name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"})
    os.kill(os.getpid(), USR1)


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fit_after_a_notice_stops_and_the_job_is_queued_again(num_ranks: int, tmp_path: Path) -> None:
    """The fit stops at its first boundary, saved, with the code of a requeue; the next start trains to the end."""
    job = Job(tmp_path, num_ranks=num_ranks)
    assert "train 0" not in job.run(76, before=notice, num_sanity_val_steps=0)
    job.assert_queued_again(in_batch=False)
    again = job.run(0)
    assert "Resumed exactly" in again
    assert "has trained 16 steps" in again


def test_fit_with_a_sanity_check_stops_in_it(tmp_path: Path) -> None:
    """There is nothing to save yet, but the job is queued again."""
    job = Job(tmp_path)
    job.run(76, before=notice)
    assert job.log.read_text().splitlines() == ["requeue 4711"]


def test_job_that_is_not_queued_again_ends_by_the_signal_or_stops(tmp_path: Path) -> None:
    """If neither SLURM's plugin nor stop_signals handles the signal, it ends the process as it would have."""
    job = Job(tmp_path)
    assert "the job is not queued again" in job.run(-USR1, before=notice, auto_requeue=False)
    options = {"stop_signals": ("SIGUSR1",)}
    job.run(128 + USR1, before=notice, auto_requeue=False, options=options, num_sanity_val_steps=0)
    assert list((tmp_path / "autosaves").rglob("autosave-*.ckpt"))
    assert not job.log.exists()


END = """
import atexit
def end():
    print(*Path().rglob('autosave-*'), 'left', flush=True)
    os.kill(os.getpid(), signal.SIGUSR1)
    print('continues', flush=True)
atexit.register(end)  # called after all that is registered later
from lightning_faulttolerant import FaultTolerance
from tests.runs import fit_net
fit_net([FaultTolerance()], Path())
"""
VALIDATES = """
from lightning_faulttolerant import FaultTolerance
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from tests.runs import Net, eight_batches, make_trainer
trainer = make_trainer([FaultTolerance()], Path(), plugins=[SLURMEnvironment()])
os.kill(os.getpid(), signal.SIGUSR1)
trainer.validate(Net(), eight_batches(), verbose=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("lines", "code", "requeues"), [(VALIDATES, 76, True), (END, 0, False)], ids=["first", "last"])
def test_notice_in_a_script(lines: str, code: int, requeues: bool, tmp_path: Path) -> None:
    """A validation run stops at its first batch and the job is queued again; after the end, it would train again."""
    job = Job(tmp_path)
    (tmp_path / "train.py").write_text(f"import os, signal, sys\nfrom pathlib import Path\n{lines}")
    own = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "PYTHONPATH": os.getcwd(), **job.environment}
    ended = subprocess.run([sys.executable, "train.py"], env=own, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == code, ended.stderr
    assert job.log.exists() is requeues
    assert requeues or ended.stdout.splitlines()[-2:] == ["left", "continues"]
