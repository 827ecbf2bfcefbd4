"""The record of one object that can change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.marks import Mark, Weak, held


@dataclass(kw_only=True, slots=True)
class Node:
    """An object that can change.

    Args:
        kept: The object, as `hold` returned it.
        mark: Returns whether its content is unchanged; ``None`` for an object that only has attributes.
        attributes: Its attributes at that time; ``None`` for an object without any.
        state: A digest of its ``state_dict`` at that time, for an object that is carried by that.
        raw: The names and the ``id`` of all values in its ``__dict__`` at that time, which are compared first; ``None``
            for an object with slots. `attributes` holds the values that count, so their ``id`` stays valid.
    """

    kept: Any
    mark: Mark | None = None
    attributes: dict[str, Any] | None = None
    state: Any = None
    raw: tuple[list[str], list[int]] | None = None

    @property
    def value(self) -> Any:
        """The object; ``None`` for a large tensor or array that no longer exists."""
        return held(self.kept)

    @property
    def holds_weakly(self) -> bool:
        """Whether one of its earlier values may be gone, so that another object has its ``id``."""
        return self.attributes is not None and Weak in set(map(type, self.attributes.values()))

    def has_same_dict(self) -> bool:
        """Return whether all attributes are the same objects as before."""
        if self.raw is None or self.holds_weakly:
            return False
        now = kinds.dict_of(self.value)
        return (list(now), list(map(id, now.values()))) == self.raw
