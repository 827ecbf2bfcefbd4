"""SLURM: when the job's time is over, which signal announces its end, and how it is queued again."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.ranks.compat import cluster_environment

_log = logging.getLogger(__name__)

END_TIME_VARIABLE = "SLURM_JOB_END_TIME"
_SCONTROL_SECONDS = 10.0
_NAME = re.compile(r"\d+(_\d+)?")


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
    """Return when the job's time is over, in seconds since 1970, or ``None`` if its environment does not say so."""
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


def asked_end_time(environment: Mapping[str, str]) -> float | None:
    """Ask ``scontrol`` when the job's time is over, since SLURM 22.05 sets no variable; ``None`` if it is not known."""
    job = _job(environment)
    if not _NAME.fullmatch(job) or shutil.which("scontrol") is None:
        return None
    failure, answer = _scontrol("--oneliner", "show", "job", job)
    if failure:
        _log.warning("%s: the end of the job is not known.", failure)
    found = re.search(r"\bEndTime=(\d+)\b", answer)
    end = None if found is None else float(found[1])
    return None if end is None or end <= time.time() else end  # a site may let a job run longer than its limit


def requeue(environment: Mapping[str, str]) -> str:
    """Queue this job again by ``scontrol requeue``. Return why that failed, or an empty string."""
    job = _job(environment)
    if not _NAME.fullmatch(job):
        return f"the job has no number: {job!r}"
    failure, _ = _scontrol("requeue", job)
    if not failure:
        _log.info("SLURM job %s is queued again.", job)
    return failure


def _job(environment: Mapping[str, str]) -> str:
    """Return the job's number; a task of an array has that of the array and its own."""
    if environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    return environment.get("SLURM_JOB_ID", "")


def _scontrol(*arguments: str) -> tuple[str, str]:
    """Run ``scontrol``, with times in seconds since 1970. Return why it failed, or an empty string, and its output."""
    program = shutil.which("scontrol")
    if program is None:
        return "scontrol is not on the PATH", ""
    try:
        done = subprocess.run(
            [program, *arguments],
            capture_output=True,
            text=True,
            errors="replace",  # a name of a job or directory may hold any bytes
            timeout=_SCONTROL_SECONDS,
            check=False,
            env={**os.environ, "SLURM_TIME_FORMAT": "%s"},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error), ""
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip()
        return f"scontrol {' '.join(arguments)} ended with {done.returncode}: {said}", ""
    return "", done.stdout
