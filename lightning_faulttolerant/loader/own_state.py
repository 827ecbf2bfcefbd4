"""Loaders whose position the user's own objects keep, by ``state_dict`` of the loader, its data set or its samplers.

Nothing is wrapped or replayed here: what these objects say is taken, and given back to them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from lightning_faulttolerant.loader.plain_state import has_state_methods, state_of

_PARTS = ("dataset", "sampler", "batch_sampler")


class OwnState:
    """The objects of one loader that keep a state of their own.

    Args:
        loader: Any iterable; a torch ``DataLoader`` may keep its state in its data set and its samplers too.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        parts = {"loader": loader} if has_state_methods(loader) else {}
        if not parts and isinstance(loader, DataLoader):
            parts = {name: getattr(loader, name, None) for name in _PARTS}
        self._parts = {name: part for name, part in parts.items() if has_state_methods(part)}

    def why_not_exact(self) -> str | None:
        """Return why the loader's position can't be told by its own objects, or ``None`` if it can."""
        if not self._parts:
            return "neither it nor its data set, sampler or batch sampler has state_dict and load_state_dict"
        workers = getattr(self._loader, "num_workers", 0)
        if workers and "loader" not in self._parts:
            return (
                f"its {workers} workers have copies of the {' and the '.join(self._parts)}, and run ahead: the state in"
                " this process is not that of the batches that were trained"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of each object's state, by the object's name: ``loader``, or ``dataset``, ``sampler``, ..."""
        return {name: state_of(part) for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give the states back; the next iteration continues from there, as far as the objects keep their word."""
        for name, part in self._parts.items():
            if name in state:
                part.load_state_dict(copy.deepcopy(state[name]))
