"""What is noted of one object that can change."""

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
        mark: Tells whether its content is what it was; ``None`` for an object that only has attributes.
        attributes: Those that it had; ``None`` for an object without.
        state: What stands for its ``state_dict`` as it was, for an object that is carried by that.
        raw: The names and the ``id`` of all that its ``__dict__`` held, which are compared first; ``None`` for an
            object with slots. What counts is held by `attributes`, so its ``id`` stays its own.
    """

    kept: Any
    mark: Mark | None = None
    attributes: dict[str, Any] | None = None
    state: Any = None
    raw: tuple[list[str], list[int]] | None = None

    @property
    def value(self) -> Any:
        """The object; ``None`` for a large tensor or array that nobody else holds any more."""
        return held(self.kept)

    @property
    def holds_weakly(self) -> bool:
        """Whether something that it had may be gone, so that another object has its ``id``."""
        return self.attributes is not None and Weak in set(map(type, self.attributes.values()))

    def has_same_dict(self) -> bool:
        """Return whether all attributes are the very objects that they were."""
        if self.raw is None or self.holds_weakly:
            return False
        now = kinds.dict_of(self.value)
        return (list(now), list(map(id, now.values()))) == self.raw
