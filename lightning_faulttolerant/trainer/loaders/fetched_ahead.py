"""Where the training loaders were when a batch was fetched ahead of its use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefetchState:
    """Where the training loaders were right before a batch was fetched, with the random states of that instant.

    ``iterations`` holds each tracker's own iteration, and how many batches it had yielded.
    """

    iterations: Mapping[str, tuple[Any, int]]
    combined: Mapping[str, Any] | None
    rng: Mapping[str, bytes]
    held: Mapping[str, Mapping[str, bytes]]
    own: Mapping[str, Any]
