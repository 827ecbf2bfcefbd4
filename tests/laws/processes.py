"""Runs functions in real processes, one per rank, forked from this one, which has imported everything."""

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch

_HOST = "127.0.0.1"
_GRACE_SECONDS = 30.0  # torchrun's, for the ranks that are left when one has failed


def fork(main: Callable[[], object], *, output: Path, seed: int, environment: Mapping[str, str]) -> int:
    """Run `main` in a forked process, the leader of its own group; return the process's id."""
    sys.stdout.flush()
    sys.stderr.flush()
    process_id = os.fork()
    if process_id:
        return process_id
    code = 1
    gc.freeze()  # a finalizer of the parent's garbage may wait for a thread that was not forked
    try:
        os.setsid()
        os.environ.update(environment)
        _print_to(output)
        random.seed(seed), np.random.seed(seed % 2**32), torch.manual_seed(seed)
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


def _print_to(output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115 - until the end
    logging.getLogger("lightning_faulttolerant").addHandler(logging.StreamHandler())
    faulthandler.register(signal.SIGQUIT, file=sys.stderr, all_threads=True)


def run_ranks(
    main: Callable[[int], object],
    *,
    outputs: list[Path],
    seed: int,
    beside: Callable[[list[int]], object] | None = None,
) -> list[int]:
    """Run `main` in one process per rank, as torchrun does, and return their exit codes.

    `beside` runs in a process of its own meanwhile, and gets the ids of the ranks' processes.

    When one has failed, the others get SIGTERM, and SIGKILL 30 seconds later. There is no other limit of time than the
    test's: when that ends the wait, the processes print their stacks and are killed.
    """
    running: dict[int, int] = {}
    codes: dict[int, int] = {}
    kill_at = float("inf")
    helper = 0
    with rendezvous(len(outputs)) as environments:
        try:
            for rank, (output, environment) in enumerate(zip(outputs, environments, strict=True)):
                own = seed + 1_000_000 * rank
                running[fork(lambda rank=rank: main(rank), output=output, seed=own, environment=environment)] = rank  # type: ignore[misc]
            if beside is not None:
                ids, nowhere = list(running), Path(os.devnull)
                helper = fork(lambda: beside(ids), output=nowhere, seed=seed, environment={})
            while running:
                process_id, status = os.waitpid(-1, os.WNOHANG if codes else 0)
                if process_id in running:
                    signal_to(process_id, signal.SIGKILL, os.killpg)  # workers that outlive it
                    codes[running.pop(process_id)] = os.waitstatus_to_exitcode(status)
                    if running and any(codes.values()) and kill_at == float("inf"):
                        time.sleep(0.1)  # as torchrun, which looks that often
                        kill_at = time.monotonic() + _GRACE_SECONDS
                        for each in running:
                            signal_to(each, signal.SIGTERM)
                elif process_id == 0:
                    if time.monotonic() > kill_at:
                        for each in running:
                            signal_to(each, signal.SIGKILL)
                    time.sleep(0.01)
        finally:
            if helper:
                signal_to(helper, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(helper, 0)
            for each in running:
                signal_to(each, signal.SIGQUIT)
            time.sleep(0.2 if running else 0)
            for each in running:
                signal_to(each, signal.SIGKILL, os.killpg)
                signal_to(each, signal.SIGKILL)
                os.waitpid(each, 0)
    return [codes[rank] for rank in range(len(outputs))]


def tree_of(process_ids: Iterable[int]) -> list[int]:
    """Return these processes and all below them."""
    found = list(process_ids)
    for each in found:
        with suppress(OSError):
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
    return found


def signal_to(process_id: int, signum: int, send: Callable[[int, int], None] = os.kill) -> None:
    """Send a signal to a process, if it is still there."""
    with suppress(ProcessLookupError, PermissionError):
        send(process_id, signum)


@contextmanager
def rendezvous(num_ranks: int) -> Iterator[list[dict[str, str]]]:
    """Yield the environment variables of each rank; they meet at a store in a process of its own, like torchrun's."""
    if num_ranks == 1:
        yield [{}]
        return
    port_read, port_write = os.pipe()
    ended_read, ended_write = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        try:
            os.close(ended_write)
            store = torch.distributed.TCPStore(_HOST, 0, is_master=True, wait_for_workers=False)
            os.write(port_write, f"{store.port}\n".encode())
            os.read(ended_read, 1)
        finally:
            os._exit(0)
    os.close(ended_read)
    os.close(port_write)
    with os.fdopen(port_read) as pipe:
        port = int(pipe.readline())
    size = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "ROLE_WORLD_SIZE": num_ranks, "GROUP_WORLD_SIZE": 1}
    names = {"MASTER_ADDR": _HOST, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "laws", "GROUP_RANK": 0}
    torchrun = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0, "TORCHELASTIC_USE_AGENT_STORE": True}
    common = {**size, **names, **torchrun, "OMP_NUM_THREADS": 1}
    ranks = [{**common, "RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank} for rank in range(num_ranks)]
    try:
        yield [{name: str(value) for name, value in each.items()} for each in ranks]
    finally:
        os.close(ended_write)
        signal_to(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
