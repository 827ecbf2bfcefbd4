from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

from lightning_faulttolerant.trainer.ranks.strategies import connect_all
from tests.ranks import on_ranks


def test_ranks_that_may_not_open_enough_connections_say_so(tmp_path: Path) -> None:
    """If the limit of open files is too low for the number of ranks, each raises before gloo would end its process."""

    def main(rank: int) -> Any:
        num_open = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 5, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        return connect_all().num_ranks

    for answer in on_ranks(main, tmp_path):
        assert answer.startswith("UnsupportedTrainerError: This process may have")
        assert "`ulimit -n 65536`" in answer
