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
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from lightning_faulttolerant.state import packing
from lightning_faulttolerant.state.memory import (
    NumpyMemory,
    PythonMemory,
    StateMemory,
    TorchMemory,
    memory_of_numpy,
    memory_of_python,
    memory_of_torch,
)

_KINDS = ("cuda", "xpu")
_join = b"".join

# torch's modules of accelerators that it was built without. These are never initialized.
_WITHOUT_CUDA = None if torch.version.cuda or torch.version.hip else torch.cuda
_WITHOUT_XPU = torch.xpu if getattr(torch.version, "xpu", "unknown") is None else None


def initialised() -> list[tuple[str, Any]]:
    """Return the kind and torch's module of every accelerator that is in use in this process."""
    # `is_initialized` is False in a forked data-loading worker, where a call into CUDA would fail.
    # It is checked first: `is_available` may call the driver.
    modules = [(kind, getattr(torch, kind, None)) for kind in _KINDS]
    return [(kind, m) for kind, m in modules if m is not None and m.is_initialized() and m.is_available()]


def _is_initialised(kind: str) -> bool:
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_initialized())


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
        name in `devices`: about 10 kB. States that have not changed are the same objects as those of the last call.
    """
    return dict(_GLOBALS.look())


def torch_rng_state() -> dict[str, bytes]:
    """Return the state of torch's global generator alone."""
    return {"torch": _GLOBALS.look()["torch"]}


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


SavedGlobals = Sequence[tuple[str, StateMemory | None, Any]]


def _numpy_random() -> ModuleType | None:
    return sys.modules.get("numpy.random")


class _WatchedGenerators:
    """What a look compares: if all of this is the same, so are the states. Without generators, it is always different.

    ``views`` are the parts of the generators' memory that show a change, and ``mark`` is their content. torch's part is
    only read after a look at the ``pointer`` to it.

    Args:
        python: The memory of Python's generator.
        numpy: The memory of NumPy's generator, if NumPy's are imported.
        of_torch: The memory of torch's generator.
    """

    __slots__ = ("address", "bits", "gauss", "getter_of_numpy", "getter_of_python", "mark", "numpy", "numpy_random",
                 "of", "pointer", "python", "torch", "views")  # fmt: skip

    def __init__(
        self, python: PythonMemory | None = None, numpy: NumpyMemory | None = None, of_torch: TorchMemory | None = None
    ) -> None:
        self.of = python, numpy, of_torch
        self.numpy_random = _numpy_random()
        self.numpy: Any = None if numpy is None else numpy.generator
        self.bits = None if numpy is None else numpy.bits
        self.views: Sequence[memoryview] = ()
        self.mark: bytes | None = None
        self.pointer: memoryview | bytes | None = None
        self.address = b""
        if python is not None and of_torch is not None and (numpy is not None or self.numpy_random is None):
            self.python, self.torch = python.generator, of_torch.generator
            self.pointer, self.address = of_torch.pointer, of_torch.address
            self.views = (*python.views, *(() if numpy is None else numpy.views), *of_torch.views)
            self.renew()

    def renew(self) -> None:
        """Note that the states that the generators have now are about to be read."""
        if self.views:
            self.mark, self.gauss = _join(self.views), self.python.gauss_next
            self.getter_of_python = random.getstate
            self.getter_of_numpy = None if self.numpy_random is None else self.numpy_random.get_state


class _GlobalGenerators:
    """The memory of the global generators, found again if they are replaced."""

    def __init__(self) -> None:
        self._python: PythonMemory | None = None
        self._numpy: NumpyMemory | None = None
        self._torch: TorchMemory | None = None
        self._last: Mapping[str, bytes] = {}
        self._last_of_all: Mapping[str, bytes] = {}
        self._saved: SavedGlobals | None = None
        self._watch = _WatchedGenerators()

    def look(self) -> Mapping[str, bytes]:
        """Return the states of all of them: the same object, if none has changed since the last call.

        Loaders look before and after each batch. A training step has emptied the processor's caches by then, so each
        further function, and each further object that is read, would cost more than all comparisons.
        """
        watch = self._watch
        if (
            watch.pointer != watch.address
            or _join(watch.views) != watch.mark
            or watch.python.gauss_next is not watch.gauss
            or random.getstate is not watch.getter_of_python
            or (numpy_random := sys.modules.get("numpy.random")) is not watch.numpy_random
            or (numpy_random is not None and numpy_random.get_state is not watch.getter_of_numpy)
            or (numpy_random is not None and watch.numpy._bit_generator is not watch.bits)
            or torch.default_generator is not watch.torch
        ):
            states = self._read()
            self._last = self._last if self._last == states else states
        if (torch.cuda is not _WITHOUT_CUDA and _is_initialised("cuda")) or (
            torch.xpu is not _WITHOUT_XPU and _is_initialised("xpu")
        ):
            states = {**self._last, **_states_of_devices()}
            self._last_of_all = self._last_of_all if self._last_of_all == states else states
            return self._last_of_all
        return self._last

    def save(self) -> SavedGlobals:
        """Return the states, for `restore_globals`."""
        self.look()
        if self._saved is None:
            found = self.memories().items()
            self._saved = [(name, one, _by_getter(name) if one is None else one.save()) for name, one in found]
        return self._saved

    def _read(self) -> dict[str, bytes]:
        self._saved, states = None, {}
        found = self.memories()
        memories = self._python, self._numpy, self._torch
        # Before the states are read: another thread may draw in between.
        if self._watch.of == memories and self._watch.numpy_random is _numpy_random():
            self._watch.renew()
        else:
            self._watch = _WatchedGenerators(*memories)
        for name, memory in found.items():
            states[name] = _by_getter(name) if memory is None else memory.state()
        return states

    def memories(self) -> dict[str, StateMemory | None]:
        """Return the memory of each of them by name, without devices; ``None`` for those that can't be read there."""
        generator = getattr(random.getstate, "__self__", None)
        if self._python is None or self._python.generator is not generator:
            self._python = memory_of_python(generator)
        found: dict[str, StateMemory | None] = {"python": self._python}
        numpy_random = _numpy_random()
        if numpy_random is not None:
            generator = getattr(numpy_random.get_state, "__self__", None)
            if self._numpy is None or self._numpy.generator is not generator or not self._numpy.is_current():
                self._numpy = memory_of_numpy(generator)
            found["numpy"] = self._numpy
        generator = torch.default_generator
        if self._torch is None or self._torch.generator is not generator or not self._torch.is_current():
            self._torch = memory_of_torch(generator)
        return {**found, "torch": self._torch}


def _states_of_devices() -> dict[str, bytes]:
    return {
        name_of(kind, index): packing.pack_torch(module.get_rng_state(index))
        for kind, module in initialised()
        for index in range(module.device_count())
    }


def _by_getter(name: str) -> bytes:
    """Return the state of a global generator that can't be read in memory."""
    if name == "python":
        return packing.random_state(getattr(random.getstate, "__self__", random))
    if name == "numpy":
        numpy_random = sys.modules["numpy.random"]
        return packing.numpy_state(getattr(numpy_random.get_state, "__self__", numpy_random))
    return packing.pack_torch(torch.default_generator.get_state())


_GLOBALS = _GlobalGenerators()

look = _GLOBALS.look
"""Returns what `rng_state` returns: the same object, if nothing has changed since the last call."""


saved_globals = _GLOBALS.save
"""Returns the states of the global generators of Python, NumPy (if imported), and torch, for `restore_globals`."""


def restore_globals(saved: SavedGlobals) -> None:
    """Restore the states that `saved_globals` returned. It takes a tenth of the time of `set_rng_state`."""
    for name, memory, state in saved:
        if memory is None:
            set_rng_state({name: state})
        else:
            memory.restore(state)


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
