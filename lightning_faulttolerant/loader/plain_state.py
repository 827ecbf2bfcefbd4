"""States that user objects keep, through ``state_dict`` and ``load_state_dict``, of plain values and tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from lightning_faulttolerant.state.objects.kinds import follow_protocol

_PLAIN = (int, float, str, bytes, torch.Tensor, type(None))


def has_state(value: Any) -> bool:
    """Return whether `value` keeps a state that a checkpoint can hold."""
    return has_state_methods(value) and what_is_not_plain(value.state_dict()) is None


def has_state_methods(value: Any) -> bool:
    """Return whether `value` has both methods, with the arguments of torch's protocol."""
    methods = [getattr(value, name, None) for name in ("state_dict", "load_state_dict")]
    return all(callable(method) for method in methods) and follow_protocol(*methods)


def what_is_not_plain(value: Any, path: str = "") -> str | None:
    """Return the place and the type of the first value in a state that a checkpoint can't hold safely, or ``None``."""
    if isinstance(value, Mapping):
        strange = [key for key in value if not isinstance(key, (str, int))]
        if strange:
            return f"the key {strange[0]!r}{path and ' in ' + path}"
        found = (what_is_not_plain(child, f"{path}.{key}" if path else str(key)) for key, child in value.items())
    elif isinstance(value, (list, tuple)):
        found = (what_is_not_plain(child, f"{path}[{i}]") for i, child in enumerate(value))
    else:
        return None if isinstance(value, _PLAIN) else f"a {type(value).__name__} as {path or 'the whole state'}"
    return next((place for place in found if place is not None), None)


def state_of(value: Any) -> Any:
    """Return a copy of the state that `value` keeps now."""
    return copy.deepcopy(value.state_dict())
