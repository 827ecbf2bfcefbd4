"""The private names of Lightning's strategies, checked on 2.5.6 to 2.6.6: there is no public way to ask for these.

`SEAMS` lists them for the contract test, with what breaks without each.
"""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.load import _METADATA_FILENAME
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

SEAMS = {
    "ModelParallelStrategy._save_distributed_checkpoint": "telling autosaves of several files from those of one",
    "FSDPStrategy._state_dict_type": "telling autosaves of several files from those of one",
}

METADATA_NAME = _METADATA_FILENAME
"""The file in a directory of shards that holds all that is not in shards."""


def saves_shards(strategy: Any) -> bool:
    """Return whether a strategy writes a checkpoint as a directory, each rank its own files."""
    if isinstance(strategy, ModelParallelStrategy):
        return bool(strategy._save_distributed_checkpoint)
    return isinstance(strategy, FSDPStrategy) and strategy._state_dict_type == "sharded"
