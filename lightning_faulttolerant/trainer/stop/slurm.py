"""SLURM: when the job's time is over, which signal announces its end, and how it is queued again."""

from __future__ import annotations

import logging
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.ranks.compat import cluster_environment

_log = logging.getLogger(__name__)

END_TIME_VARIABLE = "SLURM_JOB_END_TIME"
_SCONTROL_SECONDS = 10.0


def queues_again(trainer: Trainer) -> bool:
    """Return whether the job is to be queued again when it is stopped before its end."""
    environment = cluster_environment(trainer)
    return isinstance(environment, SLURMEnvironment) and environment.auto_requeue


def requeue_signal(trainer: Trainer, original_handlers: Mapping[int, object]) -> signal.Signals | None:
    """Return the signal that announces the end of the job, or ``None`` if there is none or user code handles it.

    Args:
        trainer: The trainer that runs in the SLURM environment.
        original_handlers: The handlers from before Lightning's. As in Lightning, a user's own handler keeps the signal.
    """
    environment = cluster_environment(trainer)
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    found = environment.requeue_signal
    if found is None or original_handlers.get(found) not in (None, signal.SIG_DFL):
        return None
    return found


def end_time(environment: Mapping[str, str]) -> float | None:
    """Return when the job's time is over, in seconds since 1970, or ``None`` if that is not known."""
    text = environment.get(END_TIME_VARIABLE, "")
    if not text:
        return None
    try:
        return float(int(text))
    except ValueError:
        _log.warning(
            "%s is %r, which is not a time in seconds: the end of the job is not known.", END_TIME_VARIABLE, text
        )
        return None


def requeue(environment: Mapping[str, str]) -> str:
    """Queue this job again by ``scontrol requeue``. Return why that failed, or an empty string."""
    job = environment.get("SLURM_JOB_ID", "")
    if environment.get("SLURM_ARRAY_JOB_ID"):
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    if not re.fullmatch(r"\d+(_\d+)?", job):
        return f"the job has no number: {job!r}"
    scontrol = shutil.which("scontrol")
    if scontrol is None:
        return "scontrol is not on the PATH"
    try:
        done = subprocess.run(
            [scontrol, "requeue", job], capture_output=True, text=True, timeout=_SCONTROL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode != 0:
        return f"scontrol requeue {job} ended with {done.returncode}: {(done.stderr or done.stdout).strip()}"
    _log.info("SLURM job %s is queued again.", job)
    return ""
