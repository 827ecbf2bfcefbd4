"""The contract with torch's DDP: the installed version has each private name that we use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_faulttolerant.trainer.ranks import compat
from tests.contract import missing
from tests.ranks import on_ranks


class _Owner:
    """Has a DDP wrapper, where the paths of the seams begin."""

    def __init__(self) -> None:
        self.ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))


def test_private_names_of_ddp_are_there(tmp_path: Path) -> None:
    """The installed torch has them all."""

    def main(rank: int) -> list[Any]:
        owner = _Owner()
        return [missing(owner, f"owner.{path}", {f"owner.{path}": why}) for path, why in compat.DDP_SEAMS.items()]

    [found] = on_ranks(main, tmp_path, num_ranks=1)
    assert found == [None] * len(compat.DDP_SEAMS)
