"""Random generators that objects hold as attributes: found by walking, captured and put back like the global ones.

Data sets, transforms, samplers and modules often keep a generator of their own (``self.rng = default_rng(0)``). No
property is evaluated and no method called while walking: only what ``vars``, containers, partials, closures and bound
methods hold is looked at, and no container of more than 1,000 items.
"""

from __future__ import annotations

import functools
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.state import devices, packing, seeds

_log = logging.getLogger(__name__)

_PRIMITIVES = (int, float, complex, str, bytes, bytearray, bool, type(None), type, types.ModuleType, torch.Tensor)
# Libraries whose objects hold large data or the whole program, and no generator that a user put there.
_OPAQUE_ROOTS = {"numpy", "pandas", "pyarrow", "PIL", "scipy", "lightning", "pytorch_lightning", "logging", "threading",
                 "multiprocessing", "concurrent", "asyncio", "weakref", "re", "pathlib", "datetime"}  # fmt: skip
# What of our own is reachable from a run's callbacks holds the whole run, and the user's loaders by a second path.
# A streaming data set knows each of its shards, and draws from no generator that it keeps.
_STREAMING = ("cache", "epochs", "format", "opening", "order", "samples", "shards", "stream", "world")
_OPAQUE_MODULES = ("lightning_faulttolerant.trainer", "lightning_faulttolerant.loader", "streaming.base", "litdata.",
                   *(f"lightning_faulttolerant.streaming.{name}" for name in _STREAMING))  # fmt: skip
_LITDATA_SET = "litdata.streaming.dataset"  # its data set holds the user's transform
_TORCH_WALKED = ("torch.utils.data", "torch.nn.modules.container", "torch.optim")
# Tensors by parameter, as many as the model has: of an optimizer these are in the checkpoint, and large.
_OF_OPTIMIZERS = ("state", "param_groups")
# Nobody keeps generators among so many items; walking them would take seconds at each autosave.
_MAX_ITEMS = 1_000
_MAX_VISITED = 200_000

Path = tuple[tuple[str, Any], ...]


class HeldGenerators:
    """The generators that can be reached from some objects, as one state.

    Args:
        roots: The objects to search, by a name that opens their paths in the state.
    """

    def __init__(self, roots: Mapping[str, Any]) -> None:
        self._roots = dict(roots)
        self._paths: dict[str, Path] = {}
        self._watched: list[tuple[Any, int, tuple[Any, ...]]] = []
        self._made: dict[str, tuple[Any, bytes]] = {}
        self.search()

    def __len__(self) -> int:
        return len(self._paths)

    def search(self) -> None:
        """Look for generators again, for objects that made one after the last search."""
        self._paths, self._watched = {}, []
        for path, value in _walk(self._roots):
            if is_generator(value):
                self._paths[path_name(path)] = path
            else:
                self._watch(value)

    def refresh(self) -> None:
        """Look for generators again if an object or a container holds more than it did, or something for a ``None``."""
        for container, size, empty in self._watched:
            if len(container) != size or any(_holds(container, key) for key in empty):
                self.search()
                break
        if self._made:
            self._look_at_made()

    def _look_at_made(self) -> None:
        """Say it if an object has replaced a generator that was made for it, which nothing was drawn from."""
        for name, (generator, blob) in list(self._made.items()):
            now = self._resolve(self._paths.get(name, ()))
            is_unused = pack_generator(generator) == blob
            if now is generator and is_unused:
                continue
            del self._made[name]
            if now is not generator and is_unused:
                _log.warning(
                    "A generator was put back as %s, where there was none yet, and its object has made another one"
                    " before it drew from that: what it draws may differ from the uninterrupted run. Let it make one"
                    " only where it has none, or at its start.",
                    name,
                )

    def _watch(self, value: Any) -> None:
        container = value if isinstance(value, (dict, list, deque)) else getattr(value, "__dict__", None)
        if isinstance(container, (dict, list, deque)) and len(container) <= _MAX_ITEMS:
            items = container.items() if isinstance(container, dict) else enumerate(container)
            self._watched.append((container, len(container), tuple(key for key, child in items if child is None)))

    def state_dict(self, *, of: Sequence[Any] | None = None) -> dict[str, bytes]:
        """Return the state of each generator by its path; one that is gone is left out.

        Args:
            of: Only those of these generators; ``None`` for all.
        """
        found = self.generators()
        if of is not None:
            found = {name: generator for name, generator in found.items() if any(generator is one for one in of)}
        return {name: pack_generator(generator) for name, generator in found.items()}

    def generators(self) -> dict[str, Any]:
        """Return each generator by its path."""
        found = ((name, self._resolve(path)) for name, path in self._paths.items())
        return {name: generator for name, generator in found if is_generator(generator)}

    def load_state_dict(self, state_dict: Mapping[str, bytes]) -> list[str]:
        """Put each generator back to its state.

        An attribute that is ``None`` still, or missing, because its object makes the generator when first used, is set
        to a new generator of the saved kind.

        Returns:
            The paths of the state for which there is neither a generator nor an empty place.
        """
        self.search()
        missing = []
        for name, blob in state_dict.items():
            generator = self._resolve(self._paths.get(name, ()))
            if is_generator(generator):
                unpack_generator(generator, blob)
            elif not self._fill(name, blob):
                missing.append(name)
        return missing

    def _resolve(self, path: Path) -> Any:
        value: Any = self._roots
        try:
            for kind, key in path:
                value = _step(value, kind, key)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            return None
        return value

    def _fill(self, name: str, blob: bytes) -> bool:
        owner_name, _, attribute = name.rpartition(".")
        owners = (value for path, value in _walk(self._roots) if path_name(path) == owner_name)
        owner = next(owners, None)
        if owner is None or not attribute.isidentifier() or dict(_attributes(owner)).get(attribute) is not None:
            return False
        generator = make_generator(blob)
        self._made[name] = (generator, pack_generator(generator))
        return _assign(owner, attribute, generator)


def path_name(path: Path) -> str:
    """Return the name under which the state lists a path, such as ``dataset.transform[0].rng``."""
    name = ""
    for kind, key in path:
        name += f".{key}" if kind == "attribute" else f"[{key!r}]" if name else str(key)
    return name


def is_generator(value: Any) -> bool:
    """Return whether `value` has a state that is drawn from: a generator of Python, NumPy or torch, or its seeds."""
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None:
        return False
    kinds = (numpy_random.Generator, numpy_random.RandomState, numpy_random.BitGenerator)
    return isinstance(value, kinds) or seeds.is_sequence(value)


def pack_generator(generator: Any) -> bytes:
    """Return the kind and state of a generator as bytes."""
    if isinstance(generator, torch.Generator):
        return _tagged(f"torch:{_device_name(generator.device)}", packing.pack_torch(generator.get_state()))
    if isinstance(generator, random.Random):
        if type(generator).getstate is not random.Random.getstate:
            raise NotExactError(
                f"A {type(generator).__name__} has a getstate of its own, whose result can't be kept in a checkpoint:"
                " what is drawn from it would differ from the uninterrupted run. Hold a random.Random instead."
            )
        return _tagged("python", packing.random_state(generator))
    if hasattr(generator, "get_state"):
        return _tagged("numpy.RandomState", packing.numpy_state(generator))
    if seeds.is_sequence(generator):
        return _tagged(f"numpy.SeedSequence {seeds.pack_sequence(generator)}", b"")
    kind, bits = ("Generator", generator.bit_generator) if _has_bits(generator) else ("BitGenerator", generator)
    sequence = seeds.sequence_of(bits)
    spawning = "" if sequence is None else f" {seeds.pack_sequence(sequence)}"
    return _tagged(f"numpy.{kind}{spawning}", packing.bits_state(bits))


def unpack_generator(generator: Any, blob: bytes) -> None:
    """Put `generator` to the state in `blob`.

    Raises:
        ValueError: If the state is that of another kind of generator.
    """
    kind, spawning, state = _parts(blob)
    if isinstance(generator, torch.Generator) and kind.startswith("torch:"):
        generator.set_state(packing.unpack_torch(state))
    elif isinstance(generator, random.Random) and kind == "python":
        generator.setstate(packing.unpack_random(state))
    elif hasattr(generator, "get_state") and kind == "numpy.RandomState":
        generator.set_state(packing.unpack_numpy(state))
    elif seeds.is_sequence(generator) and kind == "numpy.SeedSequence":
        seeds.load_sequence(generator, spawning)
    elif _has_bits(generator) and kind == "numpy.Generator":
        _load_bits(generator.bit_generator, spawning, packing.unpack_numpy(state))
    elif hasattr(generator, "random_raw") and kind == "numpy.BitGenerator":
        _load_bits(generator, spawning, packing.unpack_numpy(state))
    else:
        raise ValueError(f"A {type(generator).__name__} can't take the saved state of a {kind} generator.")


def _has_bits(generator: Any) -> bool:
    return hasattr(generator, "bit_generator")


def _load_bits(bits: Any, spawning: str, state: Mapping[str, Any]) -> None:
    if type(bits).__name__ != state["bit_generator"]:
        kind = state["bit_generator"]
        raise ValueError(f"A generator on {type(bits).__name__} can't take the saved state of one on {kind}.")
    bits.state = state
    sequence = seeds.sequence_of(bits)
    if spawning and sequence is not None:
        seeds.load_sequence(sequence, spawning)


def _parts(blob: bytes) -> tuple[str, str, bytes]:
    """Return the kind, what it spawns from, if anything, and the state."""
    tag, _, state = blob.partition(b"\n")
    kind, _, spawning = tag.decode().partition(" ")
    return kind, spawning, state


def make_generator(blob: bytes) -> Any:
    """Return a new generator of the kind, and in the state, of `blob`."""
    kind, spawning, state = _parts(blob)
    generator: Any
    if kind.startswith("torch:"):
        generator = packing.empty_generator(kind)
    elif kind == "python":
        generator = random.Random()
    else:
        import numpy as np  # noqa: PLC0415, RUF100 - optional: only a state that was saved with NumPy needs it

        if kind == "numpy.SeedSequence":
            return seeds.new_sequence(spawning)
        name = packing.unpack_numpy(state)["bit_generator"]
        bits = getattr(np.random, name)(seeds.new_sequence(spawning))
        makers = {"numpy.RandomState": np.random.RandomState, "numpy.Generator": np.random.Generator}
        generator = makers[kind](bits) if kind in makers else bits
    unpack_generator(generator, blob)
    return generator


def _device_name(device: torch.device) -> str:
    is_accelerator = devices.is_device(device.type) and device.index is not None
    return devices.name_of(device.type, device.index) if is_accelerator else str(device)


def _tagged(kind: str, state: bytes) -> bytes:
    return kind.encode() + b"\n" + state


def _holds(container: Any, key: Any) -> bool:
    try:
        return container[key] is not None
    except (KeyError, IndexError):  # something else took its place
        return True


def _walk(roots: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    # Breadth first: what lies near is found before large data further down uses up the number of visits.
    visited: set[int] = set()
    queue: deque[tuple[Path, Any]] = deque(((("item", name),), root) for name, root in roots.items())
    while queue:
        path, value = queue.popleft()
        if isinstance(value, _PRIMITIVES) or id(value) in visited:
            continue
        if len(visited) >= _MAX_VISITED:
            _log.warning("Gave up looking for generators behind %s objects, at %s.", _MAX_VISITED, path_name(path))
            return
        visited.add(id(value))
        yield path, value
        if not is_generator(value):
            queue.extend(((*path, step), child) for step, child in _children(value))


def _children(value: Any) -> Iterator[tuple[tuple[str, Any], Any]]:
    if isinstance(value, (dict, types.MappingProxyType, list, tuple, deque)) and len(value) > _MAX_ITEMS:
        return
    if isinstance(value, (dict, types.MappingProxyType)):
        yield from ((("item", key), child) for key, child in value.items())
    elif isinstance(value, (list, tuple, deque)):
        yield from ((("item", i), child) for i, child in enumerate(value) if not isinstance(child, _PRIMITIVES[:7]))
    elif isinstance(value, functools.partial):
        yield from ((("attribute", name), getattr(value, name)) for name in ("func", "args", "keywords"))
    elif isinstance(value, types.MethodType):
        yield ("attribute", "__self__"), value.__self__
    elif isinstance(value, types.FunctionType):
        yield from ((("cell", i), _cell(cell)) for i, cell in enumerate(value.__closure__ or ()))
        held = ("__defaults__", "__kwdefaults__", "__dict__")
        yield from ((("attribute", name), getattr(value, name)) for name in held)
    elif isinstance(value, types.BuiltinMethodType):
        yield ("attribute", "__self__"), value.__self__
    elif _is_walked(type(value)):
        left_out = _OF_OPTIMIZERS if isinstance(value, torch.optim.Optimizer) else ()
        yield from ((("attribute", name), child) for name, child in _attributes(value) if name not in left_out)


def _is_walked(kind: type) -> bool:
    module = kind.__module__ or ""
    if issubclass(kind, torch.nn.Module) or module.startswith(_TORCH_WALKED) or module == _LITDATA_SET:
        return True
    return module.partition(".")[0] not in _OPAQUE_ROOTS | {"torch"} and not module.startswith(_OPAQUE_MODULES)


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            name = f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell: the variable is not bound yet
        return None


def _step(value: Any, kind: str, key: Any) -> Any:
    if kind == "attribute":
        return getattr(value, key)
    return _cell(value.__closure__[key]) if kind == "cell" else value[key]


def _assign(owner: Any, attribute: str, generator: Any) -> bool:
    try:
        setattr(owner, attribute, generator)
    except (AttributeError, TypeError):  # a slot that is not there, a frozen object
        return False
    return True
