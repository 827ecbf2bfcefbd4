"""SLURM's notice before a fit: it is noted for the fit that follows, instead of ending a job that is not requeued.

By default, SIGUSR1 ends a process. In a task of a SLURM job, this module handles the signal from the import of the
package until a fit begins. That fit stops at its first boundary and has the job queued again. If no fit follows in
time, or a Trainer without the callback runs one, the signal ends the process after all, as it would have without us. No
other signal is handled here: before a fit there is nothing to save, and SIGTERM and SIGINT end the process immediately.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Final

NOTICE: Final = signal.SIGUSR1
"""The default notice of SLURM and Lightning."""
_WAIT_SECONDS = 25.0
"""How long after the notice a fit may begin, if the end of the job is not known."""
_RESERVE_SECONDS = 10.0
"""How long before the end of the job the process ends if no fit has begun."""
_STUCK_WAIT_SECONDS = 60.0
"""The same if the main thread is in C when the notice comes: the ranks may still be connecting."""
_END = b"\0"  # no signal has this number
_STUCK_SECONDS = 5.0
"""How long the main thread may take to handle a signal."""
_ENDS = "SIGUSR1 ends this process, and the job is not queued again."
_INTERACTIVE = ("bash", "interactive")


class EarlySignals:
    """Handles the notice from `begin` until `take` or `give_back`."""

    def __init__(self) -> None:
        self.noted_at: float | None = None
        """When the notice came, by the monotonic clock."""
        self._process_id = 0
        self._timer: threading.Timer | None = None
        self._pipe: int | None = None
        """Where Python writes the number of each signal, also while the main thread is in C."""
        self._is_careful = False
        """Whether a forked child leaves the pipe to its parent."""
        self._is_pending = False
        """Whether the thread has noted a notice that the main thread has not handled yet."""
        self._lock = threading.RLock()  # a handler may run while the main thread holds it

    def begin(self, environment: Mapping[str, str], *, fit_follows: bool = False) -> None:
        """Handle the notice from now on, in a task of a SLURM job where no other handler is set.

        Args:
            environment: The environment of the process.
            fit_follows: Whether a fit may follow soon. Before it, the main thread waits in C until all ranks are there.
        """
        if not _is_task_of_slurm(environment) or _is_child_of_multiprocessing():
            return
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(NOTICE) is signal.SIG_DFL:
            self._process_id = os.getpid()
            signal.signal(NOTICE, self._handle)
        if fit_follows and self._pipe is None and signal.getsignal(NOTICE) == self._handle:
            self._begin_to_look()

    def take(self) -> float | None:
        """Give the signal back to a fit that handles it; return when the notice came, or ``None``."""
        with self._lock:
            noted_at, self.noted_at = self.noted_at, None
            timer, self._timer = self._timer, None
            self._is_pending = False
        if timer is not None:
            timer.cancel()
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(NOTICE) == self._handle:
            signal.signal(NOTICE, signal.SIG_DFL)
        if is_main and self._pipe is not None:
            self._end_to_look()
        return noted_at

    def give_back(self) -> None:
        """Give the signal back if no fit of ours follows; a notice that came ends the process now."""
        if self.take() is not None:
            end_by_notice("No fit with FaultTolerance exists that it could stop.")

    def ignore(self) -> None:
        """Ignore the notice from now on, where it would end the process. The process ends, with its work done.

        Its autosaves are removed now: a notice that ended it would queue the job again, to train from the beginning.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or not _is_task_of_slurm(os.environ):
            return
        if signal.getsignal(NOTICE) in (signal.SIG_DFL, self._handle):
            signal.signal(NOTICE, signal.SIG_IGN)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process_id:  # forked before the fit: a child ends as it would have without us
            end_by_notice()
        with self._lock:
            if self._is_pending:  # the thread was faster
                self._is_pending = False
            elif self.noted_at is not None:
                end_by_notice("No fit has begun since the first notice.")
            else:
                self._note(time.monotonic(), _WAIT_SECONDS)

    def _is_ours(self) -> bool:
        """Return whether our handler is set, and not one that the script has set since."""
        return signal.getsignal(NOTICE) == self._handle

    def _note(self, at: float, unknown_seconds: float) -> None:
        self.noted_at = at
        self._timer = timer = threading.Timer(_seconds_to_wait(os.environ, unknown_seconds), lambda: self._end(timer))
        timer.daemon = True
        timer.start()
        _say("SIGUSR1 arrived before fit. The next fit stops at its first boundary, and the job is queued again.")

    def _end(self, timer: threading.Timer) -> None:
        """End the process from the timer's thread: by its signal, or hard if the main thread does not handle it."""
        if self._timer is not timer or not self._is_ours():
            return
        os.kill(os.getpid(), NOTICE)
        time.sleep(_STUCK_SECONDS)
        if self._timer is timer and self._is_ours():
            _say(f"{_ENDS} The main thread has handled no signal for {_STUCK_SECONDS:g} seconds.")
            os._exit(128 + NOTICE)

    def _begin_to_look(self) -> None:
        """Let a thread note a notice that the main thread does not handle, since it waits for a rank that is gone."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        other = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        if other != -1:  # an event loop's
            signal.set_wakeup_fd(other)
            os.close(reading)
            os.close(writing)
            return
        self._pipe = writing
        if not self._is_careful:
            os.register_at_fork(after_in_child=self._end_to_look)
            self._is_careful = True
        threading.Thread(target=self._look, args=(reading, writing), daemon=True).start()

    def _end_to_look(self) -> None:
        writing, self._pipe = self._pipe, None
        if writing is not None:
            other = signal.set_wakeup_fd(-1)
            if other == writing:
                os.close(writing)  # the thread ends
                return
            with contextlib.suppress(ValueError, OSError):  # the other one may be closed
                signal.set_wakeup_fd(other)
            # An event loop has it, and sets it again at its end. It must not be another file by then.
            with contextlib.suppress(OSError):
                os.write(writing, _END)

    def _look(self, reading: int, writing: int) -> None:
        with open(reading, "rb", buffering=0) as pipe:
            while (signums := pipe.read(64)) and _END not in signums:
                came_at = time.monotonic()
                if NOTICE not in signums:
                    continue
                time.sleep(_STUCK_SECONDS)
                with self._lock:
                    if self.noted_at is None and self._pipe == writing and self._is_ours():
                        self._is_pending = True
                        self._note(came_at, _STUCK_WAIT_SECONDS)


def end_by_notice(reason: str = "") -> None:
    """End the process as the signal does without a handler.

    Args:
        reason: The reason to print to stderr.
    """
    if reason:
        _say(f"{_ENDS} {reason}")
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


def _seconds_to_wait(environment: Mapping[str, str], unknown_seconds: float) -> float:
    try:
        left = int(environment.get("SLURM_JOB_END_TIME", "")) - time.time() - _RESERVE_SECONDS
    except ValueError:
        return unknown_seconds
    return left if left > 0 else unknown_seconds


def _say(text: str) -> None:
    os.write(2, f"FaultTolerance: {text}\n".encode())  # a handler may run inside a write to sys.stderr


EARLY = EarlySignals()
"""The early signals of this process."""
