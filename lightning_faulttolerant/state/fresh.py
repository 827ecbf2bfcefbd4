"""Random generators for ranks and workers that a saved run did not have: separate states, the same at each resume.

They follow from a saved state and from the caller's names, so two ranks or workers never draw the same numbers.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping

import torch

from lightning_faulttolerant.state import devices, packing, seeds
from lightning_faulttolerant.state.generators import make_generator, pack_generator


def fresh_rng_state(source: Mapping[str, bytes], *names: object) -> dict[str, bytes]:
    """Return the global generators' states that follow from those of `source` and from `names`."""
    seed = _seed("".join(sorted(source)).encode() + b"".join(source[name] for name in sorted(source)), *names)
    return {name: _fresh_global(name, blob, seed) for name, blob in source.items()}


def of_devices_here(state: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the global generators' states without those of devices that this process doesn't have."""
    return {name: blob for name, blob in state.items() if not devices.is_device(name) or devices.is_here(name)}


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
        seeds.reseed(generator, seed)
    return pack_generator(generator)
