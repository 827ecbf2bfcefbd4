"""The contract with Lightning's strategies: the installed version has each private name that we use."""

from __future__ import annotations

import pytest
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from lightning_faulttolerant.checkpoint.autosave_files import METADATA_NAME
from lightning_faulttolerant.trainer.ranks import compat
from lightning_faulttolerant.trainer.ranks.compat import DDP_SEAMS, SEAMS, STRATEGY_SEAMS, saves_shards
from tests.contract import missing, private_names


@pytest.mark.parametrize("path", STRATEGY_SEAMS)
def test_name_exists(path: str) -> None:
    """Each private name must exist, or the message names the feature that breaks."""
    made = {"ModelParallelStrategy": ModelParallelStrategy(), "FSDPStrategy": FSDPStrategy()}
    problem = missing(made[path.partition(".")[0]], path, STRATEGY_SEAMS)
    assert problem is None, problem


def test_each_name_is_listed() -> None:
    """The code must use no private name outside the contract."""
    listed = {name for path in (*SEAMS, *STRATEGY_SEAMS, *DDP_SEAMS) for name in path.split(".")}
    # The observer's private name is tested in another file of this folder.
    of_distributed = {"_register_comm_hook"}
    assert private_names(compat) <= listed | of_distributed | {"_METADATA_FILENAME", "_child_processes"}


def test_name_of_the_file_beside_the_shards() -> None:
    """Autosaves must be verified and loaded by the file name that Lightning uses."""
    assert compat.METADATA_NAME == METADATA_NAME


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (ModelParallelStrategy(), True),
        (ModelParallelStrategy(save_distributed_checkpoint=False), False),
        (FSDPStrategy(state_dict_type="sharded"), True),
        (FSDPStrategy(), False),
    ],
    ids=["fsdp2", "fsdp2-file", "fsdp1", "fsdp1-file"],
)
def test_who_saves_shards(strategy: object, expected: bool) -> None:
    """A strategy must be known to write a directory exactly if it does."""
    assert saves_shards(strategy) == expected
