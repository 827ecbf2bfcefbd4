"""A SLURM job with forked ranks and a stand-in for ``scontrol``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.checkpoint.verify import load_file
from tests.rank_runs import rank_fit
from tests.runs import fit_eight
from tests.stopped_ranks import RankProcesses


class SlowBatches(Callback):
    """Prints where it is, and takes its time."""

    def __init__(self, seconds: float = 0.05) -> None:
        self._seconds = seconds

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        print(f"train {trainer.current_epoch * 8 + batch_idx}", flush=True)
        time.sleep(self._seconds)

    def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
        print("validation", flush=True)
        time.sleep(self._seconds)


class Job:
    """A SLURM job of one or two ranks; its ``scontrol`` notes how it queues again, and which autosaves exist then.

    Args:
        tmp_path: Where its files are.
        num_ranks: How many ranks it has.
        scontrol: What ``scontrol requeue`` does.
        time_limit: What prints the end of the job's time.
    """

    def __init__(self, tmp_path: Path, *, num_ranks: int = 1, scontrol: str = "exit 0", time_limit: str = ":") -> None:
        self.num_ranks = num_ranks
        self.directory = tmp_path
        self.log = tmp_path / "scontrol.txt"
        self.kept = tmp_path / "kept"
        bin_directory = tmp_path / "bin"
        bin_directory.mkdir()
        end = f'[ "$2" != show ] || {{ {time_limit}; exit; }}'
        lines = ["#!/bin/sh", end, f'echo "$@" >> {self.log}', f"cp -r {tmp_path}/autosaves {self.kept}", scontrol]
        (bin_directory / "scontrol").write_text("\n".join(lines))
        (bin_directory / "scontrol").chmod(0o755)
        path = f"{bin_directory}:/usr/bin:/bin"
        if scontrol == "missing":
            path = str(tmp_path)  # a real SLURM may be installed
        self.environment = {
            "PATH": path,
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
        requeue_signal: signal.Signals | None = None,
        auto_requeue: bool = True,
        seconds: float = 0.05,
        before: Callable[[], None] = lambda: None,
        **arguments: Any,
    ) -> RankProcesses:
        """Start the job's processes."""

        def main(rank: int) -> None:
            os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = str(rank)
            before()
            plugin = SLURMEnvironment(auto_requeue=auto_requeue, requeue_signal=requeue_signal)
            chosen = {"train_time_interval": timedelta(hours=1), **options}
            callbacks = [FaultTolerance(dirpath=self.directory / "autosaves", **chosen), SlowBatches(seconds)]
            fit = fit_eight if self.num_ranks == 1 else rank_fit(self.num_ranks, **arguments)
            extra = {"plugins": [plugin], **arguments} if self.num_ranks == 1 else {}
            if self.num_ranks > 1:
                fit = rank_fit(self.num_ranks, plugins=[plugin], **arguments)
            trainer = fit(callbacks, self.directory, **extra)
            print(f"has trained {trainer.global_step} steps", flush=True)

        return RankProcesses(main, num_ranks=self.num_ranks, environment={**self.environment, **environment})

    def assert_queued_again(self, number: str = "4711") -> None:
        """Check that ``scontrol`` was called once, after a verified autosave of the stop existed."""
        assert self.log.read_text().splitlines() == [f"requeue {number}"]
        newest = sorted(self.kept.rglob("autosave-*.ckpt"))[-1]
        checkpoint = load_file(str(newest))
        assert checkpoint["global_step"] > 0  # it may have stopped at the start of an epoch
        assert list(self.directory.rglob("hpc_ckpt*")) == []
