"""torchrun's own agents, whose ranks are forked from the test: a start takes no import."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_faulttolerant.testing.processes import fork_and_run

# A machine is given up after five seconds without a sign of life. A further one is awaited for four.
_HASTE = {"last_call_timeout": 4, "keep_alive_interval": 1, "keep_alive_max_attempt": 5}


class Agent:
    """A torchrun with `num_ranks` ranks, of which each calls a function.

    Args:
        main: The function.
        num_ranks: The number of its ranks.
        max_restarts: How often it starts them again.
        port: Where it meets other agents; 0 if it is alone.
        max_nodes: How many agents there may be.
        address: The address of its machine. The agent with the first one in order has rank 0.
        is_host: Whether the others meet at this one.
    """

    def __init__(
        self,
        main: Callable[[], Any],
        *,
        num_ranks: int = 2,
        max_restarts: int = 3,
        port: int = 0,
        max_nodes: int = 1,
        address: str | None = None,
        is_host: bool = True,
    ) -> None:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=max_nodes,
            nproc_per_node=num_ranks,
            run_id="test",
            rdzv_backend="c10d",
            rdzv_endpoint=f"localhost:{port}",
            rdzv_configs={**_HASTE, "is_host": is_host},
            max_restarts=max_restarts,
            monitor_interval=0.05,
            local_addr=address,
            start_method="fork",
        )
        self._output = Path(tempfile.mkstemp(suffix=".txt")[1])
        self.process_id = fork_and_run(lambda: _run(config, main), output=self._output, seed=1)
        self._exit_code: int | None = None

    @property
    def output(self) -> str:
        """Everything that the agent and its ranks have printed so far."""
        return self._output.read_text()

    def wait(self, timeout_seconds: float = 60) -> int:
        """Wait until the agent has ended, and return its exit code; kill it if it does not end."""
        deadline = time.monotonic() + timeout_seconds
        while self._exit_code is None:
            done, status = os.waitpid(self.process_id, os.WNOHANG)
            if done:
                self._exit_code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(f"the agent did not end:\n{self.output}")
            time.sleep(0.005)
        return self._exit_code

    def kill(self) -> None:
        """Kill the agent and its ranks, as when their machine goes down."""
        if self._exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process_id, signal.SIGKILL)
            os.waitpid(self.process_id, 0)
            self._exit_code = -signal.SIGKILL


def _run(config: LaunchConfig, main: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.WARNING)
    elastic_launch(config, _as_rank)(main)


def _as_rank(main: Callable[[], Any]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has the agent's handlers
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
