"""Run a function in forked processes, one per rank, and start, watch and end them like torchrun."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

import torch

from lightning_faulttolerant.processes import send_signal

_HOST = "127.0.0.1"
# How long the other ranks may run after one has failed; torchrun gives them 30 seconds.
_GRACE_SECONDS = 10.0
# A longer time between two checks is time in which the machine stood still.
_LONGEST_LOOK_SECONDS = 1.0
# How much later than its neighbor's reaction the end of a killed rank may be seen.
_REACTION_SECONDS = 0.25
# How long a process that did not end in time has to print its stacks, before the next one prints.
_TELLING_SECONDS = 0.2


def fork_and_run(
    main: Callable[[], object], *, output: Path, seed: int, environment: Mapping[str, str] | None = None
) -> int:
    """Run `main` in a forked process, the leader of its own group; return the process id.

    Args:
        main: The function; ``SystemExit`` and other exceptions give the exit code that a script would have.
        output: A file for all its output.
        seed: For the generators of Python, NumPy and torch.
        environment: Environment variables.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    process_id = os.fork()
    if process_id:
        return process_id
    code = 1
    # The parent's garbage must not be collected here: a finalizer may wait for a thread that was not forked.
    gc.freeze()
    try:
        os.setsid()
        os.environ.update(environment or {})
        _print_to(output)
        _seed_everything(seed)
        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - any error that ends a run is its outcome
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_ranks(main: Callable[[int], object], *, outputs: list[Path], seed: int, timeout_seconds: float) -> int:
    """Run `main` in one process for each rank, and wait for all of them.

    With several ranks, each process has one thread for arithmetic and the environment that torchrun would set. When one
    of them fails, the others get SIGTERM, and SIGKILL 10 seconds later.

    Args:
        main: Takes the rank.
        outputs: For each rank, a file for all its output.
        seed: For rank 0's generators; each other rank has its own seed.
        timeout_seconds: How long the processes may take; time in which the machine stood still does not count.

    Returns:
        0 if all finished, else the exit code of the first one that failed; negative for a signal.

    Raises:
        TimeoutError: If they did not end in time; they print the stacks of their threads, and are killed.
    """
    num_ranks = len(outputs)
    rendezvous = None if num_ranks == 1 else _Rendezvous()
    processes = _Processes()
    try:
        for rank, output in enumerate(outputs):
            environment = {} if rendezvous is None else _environment(rank, num_ranks, rendezvous.port)
            process_id = fork_and_run(
                lambda rank=rank: _run_rank(main, rank, num_ranks),  # type: ignore[misc]  # mypy: can't infer it
                output=output,
                seed=seed + 1_000_000 * rank,
                environment=environment,
            )
            processes.running.append(process_id)
        return processes.wait(timeout_seconds)
    finally:
        processes.kill()
        if rendezvous is not None:
            rendezvous.close()


def _run_rank(main: Callable[[int], object], rank: int, num_ranks: int) -> None:
    if num_ranks > 1:
        torch.set_num_threads(1)  # more threads would exceed the cores, and sums depend on their number
    main(rank)


def _environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """Return torchrun's environment variables, which tell Lightning that it need not start any processes."""
    values = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "ROLE_RANK": rank,
        "GROUP_RANK": 0,
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "ROLE_WORLD_SIZE": num_ranks,
        "GROUP_WORLD_SIZE": 1,
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "assert_resumes_exactly",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in values.items()}


@final
class _Rendezvous:
    """The meeting point of the ranks, on a port that no other process can take, in its own process like torchrun's.

    It can't run in this process: forking a process that has threads may hang.
    """

    def __init__(self) -> None:
        port_read, port_write = os.pipe()
        ended_read, self._ended = os.pipe()
        self._process_id = os.fork()
        if self._process_id == 0:
            try:
                os.close(self._ended)
                store = torch.distributed.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
                os.write(port_write, f"{store.port}\n".encode())
                os.read(ended_read, 1)  # returns when all holders of the other end are gone, for whatever reason
            finally:
                os._exit(0)
        os.close(ended_read)
        os.close(port_write)
        with os.fdopen(port_read) as pipe:
            self.port = int(pipe.readline())

    def close(self) -> None:
        """End the process."""
        os.close(self._ended)
        _kill(self._process_id, os.kill)
        os.waitpid(self._process_id, 0)


@final
class _RunningTime:
    """Counts the seconds in which this process ran, without those in which the machine slept or was paused."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._last_look = time.monotonic()

    def seconds(self) -> float:
        """Return the seconds so far; call it often."""
        now = time.monotonic()
        self._seconds += min(now - self._last_look, _LONGEST_LOOK_SECONDS)
        self._last_look = now
        return self._seconds


@final
class _Processes:
    """The processes of one run, each the leader of its own group."""

    def __init__(self) -> None:
        self.running: list[int] = []
        self._failure = 0
        self._time = _RunningTime()
        self._kill_at = float("inf")

    def wait(self, timeout_seconds: float) -> int:
        deadline = self._time.seconds() + timeout_seconds
        while self.running:
            ended = self._take_ended()
            if ended:
                # A killed rank can take longer to disappear than another rank takes to notice and fail. So check all
                # again, and prefer a signal: it comes from outside, while an exit code may be a reaction to it.
                if max(ended) > 0 and not self._failure:
                    time.sleep(_REACTION_SECONDS)
                for exit_code in sorted([*ended, *self._take_ended()], key=lambda code: code >= 0):
                    self._note(exit_code)
            if self._time.seconds() > deadline:
                self._tell_where()
                raise TimeoutError(f"A run did not end within {timeout_seconds:g} seconds.")
            if self._time.seconds() > self._kill_at:
                self.kill()
            time.sleep(0.005)
        return self._failure

    def _take_ended(self) -> list[int]:
        """Forget the processes that have ended, and return their exit codes."""
        exit_codes = []
        for process_id in list(self.running):
            done, status = os.waitpid(process_id, os.WNOHANG)
            if done:
                _kill(process_id, os.killpg)  # workers that outlive a killed process
                self.running.remove(process_id)
                exit_codes.append(os.waitstatus_to_exitcode(status))
        return exit_codes

    def _tell_where(self) -> None:
        """Let all processes, and the workers of their loaders, print the stacks of their threads in turn."""
        for process_id in [one for leader in self.running for one in (leader, *_children(leader))]:
            send_signal(process_id, signal.SIGQUIT)
            time.sleep(_TELLING_SECONDS)

    def _note(self, exit_code: int) -> None:
        if exit_code == 0 or self._failure:
            return
        self._failure = exit_code
        self._kill_at = self._time.seconds() + _GRACE_SECONDS
        for process_id in self.running:
            send_signal(process_id, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the processes that still run, and their workers."""
        for process_id in self.running:
            _kill(process_id, os.killpg)
            _kill(process_id, os.kill)  # it may not have created its group yet
            os.waitpid(process_id, 0)
        self.running.clear()


def _kill(process_id: int, kill: Callable[[int, int], None]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        kill(process_id, signal.SIGKILL)


def _children(process_id: int) -> list[int]:
    """Return the child processes of a process, as far as this system reports them."""
    try:
        return [int(child) for child in Path(f"/proc/{process_id}/task/{process_id}/children").read_text().split()]
    except OSError:
        return []


def _print_to(output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    # A test runner may have replaced these streams, and handlers have kept the streams from their creation.
    sys.stdout = sys.stderr = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the end
    # Reading a thousand loggers would copy their memory, which is shared with the parent: 10 ms.
    for handler in [reference() for reference in logging._handlerList]:  # type: ignore[attr-defined]  # not in its types
        if type(handler) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    logging.getLogger("lightning_faulttolerant").addHandler(logging.StreamHandler())
    faulthandler.register(signal.SIGQUIT, file=sys.stderr, all_threads=True)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    accelerator: Any = getattr(torch, "accelerator", None)  # since torch 2.6
    if accelerator is not None and accelerator.current_accelerator() is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)  # for generators of devices that don't exist yet, it also formats the stack: 5 ms
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)
