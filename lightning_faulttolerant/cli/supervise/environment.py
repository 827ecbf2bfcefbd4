"""The environment of the processes that a supervised run starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from lightning_faulttolerant.supervision.marks import DIRECTORY_VARIABLE

TRAINING_VARIABLE = "PL_FAULT_TOLERANT_TRAINING"
_OF_RANKS = frozenset(
    {
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_NAME",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
        "TORCHELASTIC_USE_AGENT_STORE",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    }
)


def environment_of(torchs: Mapping[str, str], *, directory: str, is_alone: bool) -> dict[str, str]:
    """Return the variables that a process gets in addition to this one's.

    Args:
        torchs: The variables that torch would set.
        directory: The directory for marks and failures.
        is_alone: Whether it is the only process. It is then started as by hand, so that Lightning may start ranks.
    """
    kept = {name: value for name, value in torchs.items() if not (is_alone and name in _OF_RANKS)}
    # Unless it is set already: "manual" stays as it is.
    switch = {TRAINING_VARIABLE: os.environ.get(TRAINING_VARIABLE, "1")}
    return {**kept, **switch, DIRECTORY_VARIABLE: directory}


@final
class SupervisedLogs(LogsSpecs):
    """Sets the environment where torch prepares the outputs of its processes: it has no other place for that.

    Args:
        outputs: The outputs that the command line asks for.
        directory: The directory for marks and failures.
        is_alone: See `environment_of`.
    """

    def __init__(self, outputs: LogsSpecs, *, directory: str, is_alone: bool) -> None:
        super().__init__()
        self._outputs = outputs
        self._directory = directory
        self._is_alone = is_alone

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the outputs, and put our variables into the environments."""
        found = self._outputs.reify(envs)
        for variables in envs.values():
            changed = environment_of(variables, directory=self._directory, is_alone=self._is_alone)
            variables.clear()
            variables.update(changed)
        return found

    @property
    def root_log_dir(self) -> str:
        """The directory of the outputs."""
        return self._outputs.root_log_dir
