"""What a sampler's state holds, and whether it is one of this sampler: all is checked before anything is assigned."""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_faulttolerant.errors import AdvancedTooFarError, FingerprintMismatchError

_log = logging.getLogger(__name__)

VERSION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a state is.

    Args:
        epoch: From 0.
        consumed: Units of the epoch that all ranks had consumed; of the original's state, which counts those of one
            rank, the `progress`.
        num_replicas: How many ranks there were; 0 where the state doesn't say it: it is one of the original library.
    """

    epoch: int
    consumed: int
    num_replicas: int

    @property
    def is_original(self) -> bool:
        """Whether it is a state of the original library, ``{"progress", "epoch"}``."""
        return self.num_replicas == 0


def read_position(state: Mapping[str, Any], *, kind: str) -> Position:
    """Return where `state` is.

    Args:
        state: What a `state_dict` gave.
        kind: Of the sampler that loads it.

    Raises:
        ValueError: If it is no state of a sampler, or one of another kind or of a later version.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"This is no state of a sampler: it is {state!r}.")
    if "version" not in state:
        return Position(epoch=_count(state, "epoch"), consumed=_count(state, "progress"), num_replicas=0)
    if state["version"] != VERSION:
        raise ValueError(
            f"The state is of version {state['version']!r}, and this package reads version {VERSION} and that of"
            " cycling_utils. Update lightning_faulttolerant."
        )
    if state.get("kind") != kind:
        raise ValueError(
            f"The state is that of a sampler of kind {state.get('kind')!r}, this one is {kind!r}. What they count"
            " differs, so the position would be another one. Make the sampler that the run began with."
        )
    return Position(
        epoch=_count(state, "epoch"),
        consumed=_count(state, "global_consumed"),
        num_replicas=_count(state, "num_replicas", least=1),
    )


def _count(state: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    try:
        number = operator.index(state[key])
    except (KeyError, TypeError) as error:
        raise ValueError(f"This is no state of a sampler: {key} is {state.get(key, 'missing')!r}.") from error
    if number < least:
        raise ValueError(f"This is no state of a sampler: {key} is {number}, but at least {least}.")
    return number


def check_same(state: Mapping[str, Any], now: Mapping[str, Any], *, strict: bool) -> None:
    """Check that all that the order follows from is as it was saved.

    Args:
        state: What was saved.
        now: The keys that must be equal, with this sampler's values.
        strict: Whether a difference is an error; else it is said, and this sampler's values hold.

    Raises:
        FingerprintMismatchError: If something differs, and `strict`.
    """
    others = [f"{key} was {state.get(key)!r} and is {value!r}" for key, value in now.items() if state.get(key) != value]
    if not others:
        return
    message = (
        f"The sampler is not the one whose state was saved: {'; '.join(others)}. The rest of the epoch would be dealt"
        " from another order: samples would be lost and others repeated. Make it as it was, or pass strict=False, which"
        " keeps the position only."
    )
    if strict:
        raise FingerprintMismatchError(message)
    _log.warning(message)


def check_not_too_far(consumed: int, most: int, unit: str) -> None:
    """Raise unless a position lies within the epoch.

    Raises:
        AdvancedTooFarError: If more were consumed than there are.
    """
    if consumed > most:
        raise AdvancedTooFarError(
            f"The state says that {consumed} {unit} were consumed, but the epoch has {most}. It was saved with other"
            " data or another number of ranks. Nothing was loaded."
        )
