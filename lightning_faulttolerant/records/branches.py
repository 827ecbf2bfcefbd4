"""Branches: runs that begin from an autosave of another run, their parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

RESUME_FROM_VARIABLE = "PL_FAULT_TOLERANT_RESUME_FROM"
"""Where a branch begins, if the callback's ``resume_from`` is not passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parent:
    """What a branch begins from.

    Args:
        run_id: The run id of the parent.
        directory: The directory of the parent, as an absolute path or a URL.
        autosave: The name of the autosave.
        epoch: Its epoch, from 0.
        batch: How many batches of the epoch were done.
        global_step: How many optimizer steps were done.
        changed: A line for each setting that differs from the parent's.
    """

    run_id: str
    directory: str
    autosave: str
    epoch: int
    batch: int
    global_step: int
    changed: tuple[str, ...] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the parent as plain values."""
        return {**asdict(self), "changed": list(self.changed)}

    @property
    def place(self) -> str:
        """Where the branch begins, in words."""
        return f"step {self.global_step} (batch {self.batch} of epoch {self.epoch})"


def parent_from(state: object) -> Parent | None:
    """Return the parent that `Parent.state_dict` describes, or ``None`` if it is something else.

    Args:
        state: Any value that was read from a file.
    """
    if not isinstance(state, Mapping):
        return None
    texts = {name: state.get(name) for name in ("run_id", "directory", "autosave")}
    numbers = {name: state.get(name) for name in ("epoch", "batch", "global_step")}
    if not all(isinstance(text, str) for text in texts.values()) or not all(type(n) is int for n in numbers.values()):
        return None
    lines = state.get("changed")
    changed = tuple(line for line in lines if isinstance(line, str)) if isinstance(lines, (list, tuple)) else ()
    return Parent(**texts, **numbers, changed=changed)  # type: ignore[arg-type]  # checked above
