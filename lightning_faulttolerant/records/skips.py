"""Batches that a run leaves out, as a user names them: ``EPOCH:BATCH``, both from 0."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

SKIP_VARIABLE = "PL_FAULT_TOLERANT_SKIP_BATCHES"
"""The batches to leave out, besides those that the callback names: ``3:17,4:2``."""

Skip = tuple[int, int]
"""Epoch and batch, both from 0."""

_PLACE = re.compile(r"\s*(\d+):(\d+)\s*")


def skip_from(text: str) -> Skip:
    """Return the batch that a text names.

    Args:
        text: Epoch and batch with a colon between.

    Raises:
        ValueError: If `text` is something else.

    Example:
        >>> skip_from("3:17")
        (3, 17)
    """
    match = _PLACE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not EPOCH:BATCH, such as 3:17, both from 0")
    return int(match[1]), int(match[2])


def skips_from(text: str) -> tuple[Skip, ...]:
    """Return the batches in a list with commas between, in order.

    Raises:
        ValueError: If the text has another form.
    """
    return tuple(sorted({skip_from(place) for place in text.split(",") if place.strip()}))


def skips_requested(environment: Mapping[str, str] = os.environ) -> tuple[Skip, ...]:
    """Return the batches that the environment names.

    Args:
        environment: The environment of the process.

    Raises:
        ValueError: If the variable has another form.
    """
    try:
        return skips_from(environment.get(SKIP_VARIABLE, ""))
    except ValueError as error:
        raise ValueError(f"{SKIP_VARIABLE}: {error}. Put commas between several.") from None


def text_of_skips(skips: Iterable[Skip]) -> str:
    """Return the text that `skips_from` reads.

    Example:
        >>> text_of_skips([(4, 2), (3, 17)])
        '3:17,4:2'
    """
    return ",".join(f"{epoch}:{batch}" for epoch, batch in sorted(skips))


def checked_skips(skips: object) -> tuple[Skip, ...]:
    """Return the batches of an argument, in order.

    Args:
        skips: Pairs of epoch and batch, or texts such as ``"3:17"``.

    Raises:
        TypeError: If it is something else.
        ValueError: If a number is negative, or a text names no batch.
    """
    if not isinstance(skips, (tuple, list)):
        raise TypeError(f"skip_batches must be a list of pairs (epoch, batch), such as [(3, 17)]; got {skips!r}.")
    return tuple(sorted({_checked(one, skips) for one in skips}))


def _checked(one: Any, skips: object) -> Skip:
    if isinstance(one, str):
        try:
            return skip_from(one)
        except ValueError as error:
            raise ValueError(f"skip_batches: {error}.") from None
    is_pair = isinstance(one, (tuple, list)) and len(one) == 2
    if not is_pair or not all(isinstance(number, int) and not isinstance(number, bool) for number in one):
        raise TypeError(f"skip_batches must be a list of pairs (epoch, batch), such as [(3, 17)]; got {skips!r}.")
    if min(one) < 0:
        raise ValueError(f"skip_batches counts epochs and batches from 0; got {skips!r}.")
    return int(one[0]), int(one[1])


def in_words(skip: Skip) -> str:
    """Return the name of a batch in a message.

    Example:
        >>> in_words((3, 17))
        'batch 17 of epoch 3'
    """
    return f"batch {skip[1]} of epoch {skip[0]}"
