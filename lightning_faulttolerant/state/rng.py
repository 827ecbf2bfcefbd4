"""The process-wide random generators of Python, NumPy, torch, and its accelerators, as one state.

Reading the state draws nothing and starts nothing. A library that is not imported, or an accelerator that is not
initialized, has no state here.

Accelerators have names that also hold in the process that resumes. A rank's own device may have another number there:
eight ranks on one machine have ``cuda:0`` to ``cuda:7``, but on two machines twice ``cuda:0`` to ``cuda:3``. So the
current device is just ``cuda``; only the others have a number.

NumPy's ``Generator.spawn`` makes children from a seed sequence, which the generator's state lacks. A sequence counts
its children. A sequence without a user's seed was seeded by the system: its children differ in each process.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from lightning_faulttolerant.state import packing

_KINDS = ("cuda", "xpu")


def initialised() -> list[tuple[str, Any]]:
    """Return the kind and torch's module of every accelerator that is in use in this process."""
    # `is_initialized` is False in a forked data-loading worker, where a call into CUDA would fail.
    # It is checked first: `is_available` may call the driver.
    modules = [(kind, getattr(torch, kind, None)) for kind in _KINDS]
    return [(kind, m) for kind, m in modules if m is not None and m.is_initialized() and m.is_available()]


def is_device(name: str) -> bool:
    """Return whether `name` is the name of an accelerator's device."""
    return name.partition(":")[0] in _KINDS


def name_of(kind: str, index: int) -> str:
    """Return the name of a device."""
    return kind if _is_current(getattr(torch, kind), index) else f"{kind}:{index}"


def is_here(name: str) -> bool:
    """Return whether this process has a device of this name."""
    kind, _, index = name.partition(":")
    module = getattr(torch, kind, None)
    if kind not in _KINDS or module is None or not module.is_available():
        return False
    if not index:
        return bool(module.device_count())
    return int(index) < module.device_count() and not _is_current(module, int(index))


def _is_current(module: Any, index: int) -> bool:
    return bool(module.is_initialized()) and index == module.current_device()


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


def rng_state() -> dict[str, bytes]:
    """Return the state of every global generator that is in use in this process.

    Returns:
        ``python``, ``numpy`` (if imported), ``torch``, and one for every device of an initialized accelerator, by its
        name in `devices`: about 10 kB.
    """
    state = {"python": packing.random_state(_generator_of(random.getstate) or random)}
    numpy_random = _numpy_random()
    if numpy_random is not None:
        state["numpy"] = packing.numpy_state(_generator_of(numpy_random.get_state) or numpy_random)
    state |= torch_rng_state()
    for kind, module in initialised():
        for index in range(module.device_count()):
            state[name_of(kind, index)] = packing.pack_torch(module.get_rng_state(index))
    return state


def torch_rng_state() -> dict[str, bytes]:
    """Return the state of torch's global generator alone."""
    return {"torch": packing.pack_torch(torch.default_generator.get_state())}


def set_rng_state(state: Mapping[str, bytes]) -> None:
    """Set every global generator that `state` names to its saved state.

    Raises:
        ValueError: If `state` holds draws on a device that this process doesn't have.
    """
    for name, blob in state.items():
        if name == "python":
            random.setstate(packing.unpack_random(blob))
        elif name == "numpy":
            _set_numpy(packing.unpack_numpy(blob))
        elif name == "torch":
            torch.default_generator.set_state(packing.unpack_torch(blob))
        else:
            _set_device(name, blob)


def _generator_of(function: object) -> Any:
    """Return the global generator that a module's function is a method of, if it is one."""
    return getattr(function, "__self__", None)


def _numpy_random() -> ModuleType | None:
    return sys.modules.get("numpy.random")


def _set_numpy(state: dict[str, object]) -> None:
    import numpy as np  # noqa: PLC0415, RUF100 - optional: only a state that was saved with NumPy needs it

    np.random.set_state(state)


def _set_device(name: str, blob: bytes) -> None:
    if is_here(name):
        kind, _, index = name.partition(":")
        getattr(torch, kind).set_rng_state(packing.unpack_torch(blob), int(index) if index else kind)
    elif packing.has_drawn(blob):
        raise ValueError(
            f"The checkpoint holds the generator state of device {name!r}, which this process does not have. Random"
            " draws on it could not continue. Resume on a machine with the same devices."
        )
