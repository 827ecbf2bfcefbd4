"""The process-wide random generators of Python, NumPy, torch and its accelerators, as one state.

Reading the state draws nothing and starts nothing. A library that is not imported, or an accelerator that is not
initialized, has no state here.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from lightning_faulttolerant.state import devices, packing


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
    for kind, module in devices.initialised():
        for index in range(module.device_count()):
            state[devices.name_of(kind, index)] = packing.pack_torch(module.get_rng_state(index))
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
    if devices.is_here(name):
        kind, _, index = name.partition(":")
        getattr(torch, kind).set_rng_state(packing.unpack_torch(blob), int(index) if index else kind)
    elif packing.has_drawn(blob):
        raise ValueError(
            f"The checkpoint holds the generator state of device {name!r}, which this process does not have. Random"
            " draws on it could not continue. Resume on a machine with the same devices."
        )
