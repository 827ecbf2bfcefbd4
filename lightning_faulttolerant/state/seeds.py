"""NumPy's seed sequences: ``Generator.spawn`` makes children from them, and the generator's state lacks them.

A sequence counts its children. A sequence without a user's seed was seeded by the system: its children differ in each
process.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def is_sequence(value: object) -> bool:
    """Return whether `value` is one of NumPy's seed sequences."""
    numpy_random = sys.modules.get("numpy.random")
    return numpy_random is not None and type(value) is numpy_random.SeedSequence


def sequence_of(bits: object) -> Any:
    """Return the seed sequence that a bit generator spawns from, or ``None`` if it has none that is known."""
    sequence = getattr(bits, "seed_seq", None)  # public since NumPy 1.25, as is `spawn`
    return sequence if is_sequence(sequence) else None


def pack_sequence(sequence: Any) -> str:
    """Return the full content of a seed sequence as a text without spaces or line ends."""
    entropy = sequence.entropy
    if not isinstance(entropy, (int, type(None))):
        entropy = [int(word) for word in entropy]
    parts = [entropy, [int(key) for key in sequence.spawn_key], sequence.pool_size, sequence.n_children_spawned]
    return json.dumps(parts, separators=(",", ":"))


def load_sequence(sequence: Any, packed: str) -> None:
    """Restore `sequence`, which generators hold, from a result of `pack_sequence`."""
    entropy, spawn_key, pool_size, num_children = json.loads(packed)
    options = {"spawn_key": spawn_key, "pool_size": pool_size, "n_children_spawned": num_children}
    type(sequence).__init__(sequence, entropy, **options)


def new_sequence(packed: str) -> Any:
    """Return a new seed sequence from a result of `pack_sequence`; without a text, one seeded by the system."""
    sequence = sys.modules["numpy.random"].SeedSequence()
    if packed:
        load_sequence(sequence, packed)
    return sequence


def reseed(generator: Any, seed: int) -> None:
    """Seed a ``Generator``, a bit generator or a seed sequence as if it were created from `seed`."""
    if is_sequence(generator):
        type(generator).__init__(generator, seed)
        return
    bits = getattr(generator, "bit_generator", generator)
    bits.state = type(bits)(seed).state
    sequence = sequence_of(bits)
    if sequence is not None:
        type(sequence).__init__(sequence, seed)
