"""A sampler's state, and the checks that it belongs to this sampler: they all run before anything is assigned."""

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
class SamplerPosition:
    """The position of a state.

    Args:
        epoch: The epoch, from 0.
        consumed: The units of the epoch that all ranks had consumed. In the original's state it is the `progress`,
            which counts the units of one rank.
        num_replicas: The number of ranks; 0 if the state doesn't have it, because it is one of the original library.
    """

    epoch: int
    consumed: int
    num_replicas: int

    @property
    def is_original(self) -> bool:
        """Whether it is a state of the original library, ``{"progress", "epoch"}``."""
        return self.num_replicas == 0


def read_position(state: Mapping[str, object], *, kind: str) -> SamplerPosition:
    """Return the position of `state`.

    Args:
        state: A state of a `state_dict`.
        kind: The kind of the sampler that loads it.

    Raises:
        ValueError: If it is not a state of a sampler, or one of another kind or of a later version.
    """
    if not isinstance(state, Mapping):
        raise ValueError(f"This is not a state of a sampler: it is {state!r}.")
    if "version" not in state:
        return SamplerPosition(epoch=_count(state, "epoch"), consumed=_count(state, "progress"), num_replicas=0)
    if state["version"] != VERSION:
        raise ValueError(
            f"The state has version {state['version']!r}, but this package reads version {VERSION} and that of "
            "cycling_utils. Update lightning_faulttolerant."
        )
    if state.get("kind") != kind:
        raise ValueError(
            f"The state belongs to a sampler of kind {state.get('kind')!r}, but this one is {kind!r}. They count "
            "different things, so the position would be wrong. Use the kind of sampler with which the run began."
        )
    return SamplerPosition(
        epoch=_count(state, "epoch"),
        consumed=_count(state, "global_consumed"),
        num_replicas=_count(state, "num_replicas", least=1),
    )


def _count(state: Mapping[str, Any], key: str, *, least: int = 0) -> int:
    try:
        number = operator.index(state[key])
    except (KeyError, TypeError) as error:
        raise ValueError(f"This is not a state of a sampler: {key} is {state.get(key, 'missing')!r}.") from error
    if number < least:
        raise ValueError(f"This is not a state of a sampler: {key} is {number}, but must be at least {least}.")
    return number


def check_same(state: Mapping[str, object], now: Mapping[str, object], *, strict: bool) -> None:
    """Check that everything that determines the order is as it was saved.

    Args:
        state: The saved state.
        now: The keys that must be equal, with this sampler's values.
        strict: Whether a difference is an error. Otherwise it is logged, and this sampler's values apply.

    Raises:
        FingerprintMismatchError: If something differs, and `strict`.
    """
    others = [
        f"{key} was {state.get(key)!r} and is now {value!r}" for key, value in now.items() if state.get(key) != value
    ]
    if not others:
        return
    message = (
        f"The sampler is not the one whose state was saved: {'; '.join(others)}. The rest of the epoch would have "
        "another order: some samples would be lost and others repeated. Use the same arguments as before, or pass "
        "strict=False, which keeps only the position."
    )
    if strict:
        raise FingerprintMismatchError(message)
    _log.warning(message)


def check_not_too_far(consumed: int, most: int, unit: str) -> None:
    """Raise unless a position is within the epoch.

    Raises:
        AdvancedTooFarError: If more units were consumed than exist.
    """
    if consumed > most:
        raise AdvancedTooFarError(
            f"The state says that {consumed} {unit} were consumed, but the epoch has {most}. It was saved with other"
            " data or another number of ranks. Nothing was loaded."
        )
