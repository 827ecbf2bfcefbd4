"""SLURM's notice before a fit: it is noted for the fit that follows, instead of ending a job that is not requeued.

By default, SIGUSR1 ends a process. In a task of a SLURM job, this module handles the signal from the import of the
package until a fit begins. That fit stops at its first boundary and has the job queued again. If no fit follows in
time, or a Trainer without the callback runs one, the signal ends the process after all, as it would have without us. No
other signal is handled here: before a fit there is nothing to save, and SIGTERM and SIGINT end the process immediately.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType

NOTICE: signal.Signals | None = getattr(signal, "SIGUSR1", None)
"""The default notice of SLURM and Lightning; ``None`` if the system does not have this signal."""
_WAIT_SECONDS = 25.0
"""How long after the notice a fit may begin, if the end of the job is not known."""
_RESERVE_SECONDS = 10.0
"""How long before the end of the job the process ends if no fit has begun."""
_INTERACTIVE = ("bash", "interactive")


class EarlySignals:
    """Handles the notice from `begin` until `take` or `give_back`."""

    def __init__(self) -> None:
        self.noted_at: float | None = None
        """When the notice came, by the monotonic clock."""
        self._process_id = 0
        self._timer: threading.Timer | None = None

    def begin(self, environment: Mapping[str, str]) -> None:
        """Handle the notice from now on, in a task of a SLURM job where no other handler is set.

        Args:
            environment: The environment of the process.
        """
        if NOTICE is None or not _is_task_of_slurm(environment) or _is_child_of_multiprocessing():
            return
        if threading.current_thread() is not threading.main_thread() or signal.getsignal(NOTICE) is not signal.SIG_DFL:
            return
        self._process_id = os.getpid()
        signal.signal(NOTICE, self._handle)

    def take(self) -> float | None:
        """Give the signal back to a fit that handles it; return when the notice came, or ``None``."""
        noted_at, self.noted_at = self.noted_at, None
        if self._timer is not None:
            self._timer.cancel()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and NOTICE is not None and signal.getsignal(NOTICE) == self._handle:
            signal.signal(NOTICE, signal.SIG_DFL)
        return noted_at

    def give_back(self) -> None:
        """Give the signal back if no fit of ours follows; a notice that came ends the process now."""
        if self.take() is not None:
            end_by_notice("No fit with FaultTolerance exists that it could stop.")

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process_id:  # forked before the fit: a child ends as it would have without us
            end_by_notice()
        elif self.noted_at is not None:
            end_by_notice("No fit has begun since the first notice.")
        else:
            self.noted_at = time.monotonic()
            self._timer = threading.Timer(_seconds_to_wait(os.environ), os.kill, (os.getpid(), signum))
            self._timer.daemon = True
            self._timer.start()
            _say("SIGUSR1 arrived before fit. The next fit stops at its first boundary, and the job is queued again.")


def end_by_notice(reason: str = "") -> None:
    """End the process as the signal does without a handler.

    Args:
        reason: The reason to print to stderr.
    """
    assert NOTICE is not None
    if reason:
        _say(f"SIGUSR1 ends this process, and the job is not queued again. {reason}")
    signal.signal(NOTICE, signal.SIG_DFL)
    os.kill(os.getpid(), NOTICE)


def _is_task_of_slurm(environment: Mapping[str, str]) -> bool:
    """Return whether Lightning takes this process for one that ``srun`` started."""
    if environment.get("PL_FAULT_TOLERANT_TRAINING") == "0" or "TORCHELASTIC_RUN_ID" in environment:
        return False
    is_task = "SLURM_JOB_ID" in environment and "SLURM_NTASKS" in environment
    return is_task and environment.get("SLURM_JOB_NAME") not in _INTERACTIVE


def _is_child_of_multiprocessing() -> bool:
    process = sys.modules.get("multiprocessing.process")  # loaded in every such child, and slow to load elsewhere
    return process is not None and process.parent_process() is not None


def _seconds_to_wait(environment: Mapping[str, str]) -> float:
    try:
        left = int(environment.get("SLURM_JOB_END_TIME", "")) - time.time() - _RESERVE_SECONDS
    except ValueError:
        return _WAIT_SECONDS
    return left if left > 0 else _WAIT_SECONDS


def _say(text: str) -> None:
    os.write(2, f"FaultTolerance: {text}\n".encode())  # a handler may run inside a write to sys.stderr


EARLY = EarlySignals()
"""The early signals of this process."""
