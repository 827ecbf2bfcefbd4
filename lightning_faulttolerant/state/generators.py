"""Random generators that objects hold as attributes: found by walking, captured and restored like the global ones.

Data sets, transforms, samplers, and modules often keep their own generator (``self.rng = default_rng(0)``).

Ranks and workers that a saved run did not have get separate states, the same at each resume. These follow from a saved
state and from the caller's names, so two ranks or workers never draw the same numbers.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import logging
import random
import types
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch

from lightning_faulttolerant.clock import perf_counter
from lightning_faulttolerant.errors import NotExactError
from lightning_faulttolerant.state import packing, rng
from lightning_faulttolerant.state.reachable import (
    MAX_ITEMS,
    OF_OPTIMIZERS,
    Path,
    attributes,
    is_generator,
    is_opaque,
    is_pythons,
    own_dict,
    path_name,
    take_step,
    walk,
)

_log = logging.getLogger(__name__)

# This many objects, the nearest ones, are checked each time. The rest takes at most this share of the time.
_MAX_NEAR = 1_000
_FAR_SHARE = 0.01


class HeldGenerators:
    """The generators that can be reached from some objects, as one state.

    Args:
        roots: The objects to search, by a name that begins their paths in the state.
    """

    def __init__(self, roots: Mapping[str, object]) -> None:
        self._roots = dict(roots)
        self.paths: dict[str, Path] = {}
        """The path to each generator, by name."""
        self._watched: list[_Watched] = []
        self._near: list[Sized] = []
        self._sizes: list[int] = []
        self._with_empty: list[_Watched] = []
        self._known: set[int] = set()
        self._far_seconds, self._far_at = 0.0, 0.0
        self._made: dict[str, tuple[object, bytes]] = {}
        self.search()

    def __len__(self) -> int:
        return len(self.paths)

    def search(self) -> None:
        """Search again, for objects that created a generator after the last search."""
        self.paths, self._watched, self._known = {}, [], set()
        self._note(walk(deque(((("item", name),), root) for name, root in self._roots.items())))
        self._note_near()

    def refresh(self, *, whole: bool = False) -> None:
        """Find generators in new items of objects and containers, and in values that replaced a ``None``.

        Args:
            whole: Check all of them. Otherwise, if there are many, those further down are only checked as often as that
                takes 1 % of the time.
        """
        if list(map(len, self._near)) != self._sizes or (self._with_empty and self._is_filled()):
            self._look_at_near()
        if len(self._near) < len(self._watched):
            began = perf_counter()
            if whole or (began - self._far_at) * _FAR_SHARE >= self._far_seconds:
                for entry in self._watched[len(self._near) :]:
                    if entry.has_changed():
                        self._look_at(entry)
                self._note_near()
                self._far_at = perf_counter()
                self._far_seconds = self._far_at - began
        if self._made:
            self._look_at_made()

    def _is_filled(self) -> bool:
        return any(entry.has_filled() for entry in self._with_empty)

    def _look_at_near(self) -> None:
        for entry in [entry for entry in self._watched[:_MAX_NEAR] if entry.has_changed()]:
            self._look_at(entry)
        self._note_near()

    def _note_near(self) -> None:
        """Note the sizes of the nearest containers: a call for each of them would cost more than all comparisons."""
        near = self._watched[:_MAX_NEAR]
        self._near, self._sizes = [entry.container for entry in near], [entry.size for entry in near]
        self._with_empty = [entry for entry in near if entry.empty]

    def _look_at(self, entry: _Watched) -> None:
        """Search only the new items of a container."""
        found = deque(((*entry.path, step), child) for step, child in entry.update())
        self._note(walk(found, known=self._known))

    def _note(self, found: Iterator[tuple[Path, object]]) -> None:
        for path, value in found:
            with contextlib.suppress(Exception):  # any class may raise anything: what can't be read is left alone
                if not is_generator(value):
                    self._watch(path, value)
                elif _is_readable(value):
                    self.paths[path_name(path)] = path
                else:
                    _log.warning("The state of %s can't be read: a resume may repeat its draws.", path_name(path))

    def _look_at_made(self) -> None:
        """Warn if an object has replaced a generator that was created for it, before anything was drawn from it."""
        for name, (generator, blob) in list(self._made.items()):
            now = self._resolve(self.paths.get(name, ()))
            is_unused = pack_generator(generator) == blob
            if now is generator and is_unused:
                continue
            del self._made[name]
            if now is not generator and is_unused:
                _log.warning(
                    "A generator was restored as %s before its object created one, and the object has replaced it. "
                    "Its draws may differ from the uninterrupted run. Let the object create a generator only if it "
                    "has none, or in __init__.",
                    name,
                )

    def _watch(self, path: Path, value: object) -> None:
        is_container = isinstance(value, (dict, list, deque))
        if isinstance(value, types.FunctionType) or is_opaque(value):
            return  # a function never gets a generator later
        container = value if is_container else own_dict(value)
        if isinstance(container, (dict, list, deque)) and len(container) <= MAX_ITEMS:
            left_out = OF_OPTIMIZERS if isinstance(value, torch.optim.Optimizer) else ()
            kind = "item" if is_container else "attribute"
            self._watched.append(_Watched(path=path, value=value, container=container, kind=kind, left_out=left_out))
            self._known.add(id(value))  # the id stays valid: the entry holds the object

    def state_dict(self, *, of: Sequence[object] | None = None) -> dict[str, bytes]:
        """Return the state of each generator by its path; a generator that no longer exists is left out.

        Args:
            of: Only these generators; ``None`` for all.
        """
        found = self.generators()
        if of is not None:
            found = {name: generator for name, generator in found.items() if any(generator is one for one in of)}
        return {name: pack_generator(generator) for name, generator in found.items()}

    def generators(self) -> dict[str, object]:
        """Return each generator by its path."""
        if not self.paths:
            return {}
        found = ((name, self._resolve(path)) for name, path in self.paths.items())
        return {name: generator for name, generator in found if is_generator(generator)}

    def load_state_dict(self, state_dict: Mapping[str, bytes]) -> list[str]:
        """Set each generator to its saved state.

        Some objects create their generator on first use. If such an attribute is still ``None`` or missing, it is set
        to a new generator of the saved kind.

        Returns:
            The paths in the state that have neither a generator nor an empty place.
        """
        self.search()
        missing = []
        for name, blob in state_dict.items():
            generator = self._resolve(self.paths.get(name, ()))
            if is_generator(generator):
                unpack_generator(generator, blob)
            elif not self._fill(name, blob):
                missing.append(name)
        return missing

    def _resolve(self, path: Path) -> object:
        value: object = self._roots
        try:
            for kind, key in path:
                value = take_step(value, kind, key)
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            return None
        return value

    def _fill(self, name: str, blob: bytes) -> bool:
        """Create a generator where its object would create one on first use; return whether there is a place for it."""
        walked = walk(deque(((("item", root_name),), root) for root_name, root in self._roots.items()))
        owners = ((path_name(path), value) for path, value in walked)
        place = next(((owner, rest) for path, owner in owners if (rest := _last_step(path, owner, name))), None)
        if place is None:
            return False
        generator = make_generator(blob)
        self._made[name] = (generator, pack_generator(generator))
        owner, (kind, key) = place
        if kind == "attribute":
            return _assign(owner, key, generator)
        owner[key] = generator
        return True


@dataclass(kw_only=True, slots=True)
class _Watched:
    """A container, or the attributes of an object, and their content at the last check."""

    path: Path
    value: object
    container: Any
    kind: str
    left_out: Sequence[str]
    size: int = 0
    empty: tuple[object, ...] = ()

    def __post_init__(self) -> None:
        self.update()

    def has_changed(self) -> bool:
        """Return whether there are more or fewer items, or a value has replaced a ``None``."""
        return len(self.container) != self.size or self.has_filled()

    def has_filled(self) -> bool:
        """Return whether a value has replaced a ``None``."""
        return any(_holds(self.container, key) for key in self.empty)

    def update(self) -> list[tuple[tuple[str, object], object]]:
        """Record the current content, and return the new items with their places."""
        container, size = self.container, len(self.container)
        if size > MAX_ITEMS:
            self.size, self.empty = size, ()
            return []
        items = list(container.items() if isinstance(container, dict) else enumerate(container))
        came = items[self.size :] if size > self.size else items
        was_empty = set(self.empty)
        came += [(key, child) for key, child in items[: self.size] if key in was_empty and child is not None]
        self.size, self.empty = size, tuple(key for key, child in items if child is None)
        return [((self.kind, key), child) for key, child in came if not (is_pythons(key) or key in self.left_out)]


def _last_step(path: str, owner: object, name: str) -> tuple[str, Any] | None:
    """Return the step from `owner` to the place called `name`, if that is empty: an attribute, or a key of a dict."""
    rest = name.removeprefix(path)
    if not name.startswith(path) or not rest:
        return None
    if rest.startswith(".") and rest[1:].isidentifier():
        return ("attribute", rest[1:]) if attributes(owner).get(rest[1:]) is None else None
    if isinstance(owner, dict) and rest.startswith("[") and rest.endswith("]"):
        try:
            key = ast.literal_eval(rest[1:-1])
        except (SyntaxError, ValueError):  # a key that is not a literal, or a further step
            return None
        return ("item", key) if repr(key) == rest[1:-1] and owner.get(key) is None else None
    return None


def pack_generator(generator: Any) -> bytes:
    """Return the kind and state of a generator as bytes."""
    if isinstance(generator, torch.Generator):
        return _tagged(f"torch:{_device_name(generator.device)}", packing.pack_torch(generator.get_state()))
    if isinstance(generator, random.Random):
        if type(generator).getstate is not random.Random.getstate:
            raise NotExactError(
                f"A {type(generator).__name__} has its own getstate, whose result can't be kept in a checkpoint: its"
                " random numbers would differ from the uninterrupted run. Hold a random.Random instead."
            )
        return _tagged("python", packing.random_state(generator))
    if hasattr(generator, "get_state"):
        return _tagged("numpy.RandomState", packing.numpy_state(generator))
    if rng.is_sequence(generator):
        return _tagged(f"numpy.SeedSequence {rng.pack_sequence(generator)}", b"")
    kind, bits = ("Generator", generator.bit_generator) if _has_bits(generator) else ("BitGenerator", generator)
    sequence = rng.sequence_of(bits)
    spawning = "" if sequence is None else f" {rng.pack_sequence(sequence)}"
    return _tagged(f"numpy.{kind}{spawning}", packing.bits_state(bits))


def _is_readable(generator: object) -> bool:
    """Return whether the state can be read: a mock of a generator has none, and a subclass may raise anything."""
    try:
        pack_generator(generator)
    except NotExactError:  # it will be raised where it can be reported
        return True
    except Exception:  # noqa: BLE001 - any class may raise anything
        return False
    return True


def unpack_generator(generator: Any, blob: bytes) -> None:
    """Set `generator` to the state in `blob`.

    Raises:
        ValueError: If the state belongs to another kind of generator.
    """
    kind, spawning, state = _parts(blob)
    if isinstance(generator, torch.Generator) and kind.startswith("torch:"):
        generator.set_state(packing.unpack_torch(state))
    elif isinstance(generator, random.Random) and kind == "python":
        generator.setstate(packing.unpack_random(state))
    elif hasattr(generator, "get_state") and kind == "numpy.RandomState":
        generator.set_state(packing.unpack_numpy(state))
    elif rng.is_sequence(generator) and kind == "numpy.SeedSequence":
        rng.load_sequence(generator, spawning)
    elif _has_bits(generator) and kind == "numpy.Generator":
        _load_bits(generator.bit_generator, spawning, packing.unpack_numpy(state))
    elif hasattr(generator, "random_raw") and kind == "numpy.BitGenerator":
        _load_bits(generator, spawning, packing.unpack_numpy(state))
    else:
        raise ValueError(f"A {type(generator).__name__} can't take the saved state of a {kind} generator.")


def _has_bits(generator: object) -> bool:
    return hasattr(generator, "bit_generator")


def _load_bits(bits: Any, spawning: str, state: Mapping[str, object]) -> None:
    if type(bits).__name__ != state["bit_generator"]:
        kind = state["bit_generator"]
        raise ValueError(f"A generator on {type(bits).__name__} can't take the saved state of one on {kind}.")
    bits.state = state
    sequence = rng.sequence_of(bits)
    if spawning and sequence is not None:
        rng.load_sequence(sequence, spawning)


def _parts(blob: bytes) -> tuple[str, str, bytes]:
    """Return the kind, the seed sequence that it spawns from (if any), and the state."""
    tag, _, state = blob.partition(b"\n")
    kind, _, spawning = tag.decode().partition(" ")
    return kind, spawning, state


def make_generator(blob: bytes) -> object:
    """Return a new generator with the kind and the state in `blob`."""
    kind, spawning, state = _parts(blob)
    generator: object
    if kind.startswith("torch:"):
        generator = torch.Generator(device=kind.partition(":")[2])
    elif kind == "python":
        generator = random.Random()
    else:
        import numpy as np  # noqa: PLC0415, RUF100 - optional: only a state that was saved with NumPy needs it

        if kind == "numpy.SeedSequence":
            return rng.new_sequence(spawning)
        name = packing.unpack_numpy(state)["bit_generator"]
        bits = getattr(np.random, name)(rng.new_sequence(spawning))
        makers = {"numpy.RandomState": np.random.RandomState, "numpy.Generator": np.random.Generator}
        generator = makers[kind](bits) if kind in makers else bits
    unpack_generator(generator, blob)
    return generator


def _device_name(device: torch.device) -> str:
    is_accelerator = rng.is_device(device.type) and device.index is not None
    return rng.name_of(device.type, device.index) if is_accelerator else str(device)


def _tagged(kind: str, state: bytes) -> bytes:
    return kind.encode() + b"\n" + state


def _holds(container: Mapping[object, object], key: object) -> bool:
    try:
        return container[key] is not None
    except (KeyError, IndexError):  # another object took its place
        return True


def _assign(owner: object, attribute: str, generator: object) -> bool:
    try:
        setattr(owner, attribute, generator)
    except (AttributeError, TypeError):  # a slot that does not exist, a frozen object
        return False
    return True


def fresh_rng_state(source: Mapping[str, bytes], *names: object) -> dict[str, bytes]:
    """Return the global generators' states that follow from those of `source` and from `names`."""
    seed = _seed("".join(sorted(source)).encode() + b"".join(source[name] for name in sorted(source)), *names)
    return {name: _fresh_global(name, blob, seed) for name, blob in source.items()}


def of_devices_here(state: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the global generators' states without those of devices that this process doesn't have."""
    return {name: blob for name, blob in state.items() if not rng.is_device(name) or rng.is_here(name)}


def fresh_torch_state(*names: object) -> bytes:
    """Return the state of a torch generator on the CPU that follows from `names` alone."""
    return packing.pack_torch(torch.Generator().manual_seed(_seed(b"", *names)).get_state())


def fresh_held_state(source: Mapping[str, bytes], *names: object) -> dict[str, bytes]:
    """Return the states of held generators, by path, that follow from those of `source` and from `names`."""
    return {path: _fresh_held(blob, _seed(blob, path, *names)) for path, blob in source.items()}


def _seed(source: bytes, *names: object) -> int:
    digest = hashlib.blake2b(source + repr(names).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _fresh_global(name: str, blob: bytes, seed: int) -> bytes:
    if name == "python":
        return packing.pack_random(random.Random(seed).getstate())
    if name == "numpy":
        return _fresh_numpy(blob, seed)
    device = "cpu" if name == "torch" else name
    return packing.pack_torch(torch.Generator(device=device).manual_seed(seed).get_state())


def _fresh_numpy(blob: bytes, seed: int) -> bytes:
    import numpy as np  # noqa: PLC0415, RUF100 - optional: only a state that was saved with NumPy needs it

    saved = packing.unpack_numpy(blob)
    bits = getattr(np.random, saved["bit_generator"])(seed)
    more = {"has_gauss": 0, "gauss": 0.0} if "has_gauss" in saved else {}
    return packing.pack_numpy({**bits.state, **more})


def _fresh_held(blob: bytes, seed: int) -> bytes:
    generator: object = make_generator(blob)
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif hasattr(generator, "get_state"):
        tag, _, state = blob.partition(b"\n")
        return tag + b"\n" + _fresh_numpy(state, seed)
    else:
        rng.reseed(generator, seed)
    return pack_generator(generator)
