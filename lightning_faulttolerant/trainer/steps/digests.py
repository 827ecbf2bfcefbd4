"""Digests of what a run trains and what it leaves: equal if the values are equal, bit for bit."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from collections.abc import Mapping, Set
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_faulttolerant.state.reachable import own_dict
from lightning_faulttolerant.state.tensors import shard_of

_LENGTH = 16
_PLAIN = (str, int, float, complex, bool, type(None))


class Digest:
    """A digest of several values, fed one after another."""

    def __init__(self) -> None:
        self._state = hashlib.sha256()  # twice as fast as blake2b if the processor supports it
        self._inside: list[int] = []
        self._met: dict[int, tuple[int, object]] = {}
        """The objects with attributes found in the current value: kept, so that no other object gets their id."""

    def feed(self, value: object) -> None:
        """Add a value: nested containers of tensors, arrays, and plain values, or objects with such attributes."""
        value = shard_of(value)
        if isinstance(value, torch.Tensor):
            self._feed_tensor(value)
        elif isinstance(value, _PLAIN):
            self._text(f"{type(value).__name__} {value!r}")
        elif isinstance(value, (bytes, bytearray)):
            self._text(f"bytes {len(value)}")
            self._state.update(value)
        elif id(value) not in self._inside:  # an object may contain itself
            self._inside.append(id(value))
            self._feed_object(value)
            self._inside.pop()
            if not self._inside:
                self._met.clear()

    def text(self) -> str:
        """Return the digest of everything added so far."""
        return self._state.hexdigest()[:_LENGTH]

    def _text(self, text: str) -> None:
        self._state.update(text.encode("utf-8", "surrogatepass"))
        self._state.update(b"\0")

    def _feed_object(self, value: Any) -> None:
        if isinstance(value, Mapping):
            self._text(f"mapping {len(value)}")
            for key in value:
                self.feed(key)
                self.feed(value[key])
        elif isinstance(value, (list, tuple)):
            self._text(f"list {len(value)}")
            if all(type(item) is int for item in value):  # indices, tokens
                self._text(repr(list(value)))
                return
            for item in value:
                self.feed(item)
        elif isinstance(value, Set):
            self._text(f"set {sorted(map(digest, value))}")
        elif callable(getattr(value, "tobytes", None)):  # arrays and images
            dtype, shape = str(getattr(value, "dtype", "")), getattr(value, "shape", "")
            self._text(f"{type(value).__name__} {dtype} {shape}")
            if dtype == "object":  # its bytes are addresses
                self.feed(value.tolist())
            else:
                self._state.update(value.tobytes())
        elif id(value) in self._met:  # objects that refer to each other would be visited on every path between them
            self._text(f"object {self._met[id(value)][0]}")
        else:
            self._met[id(value)] = len(self._met), value
            self._text(type(value).__qualname__)
            self.feed(_attributes(value))

    def _feed_tensor(self, value: torch.Tensor) -> None:
        if value.is_nested:
            self.feed(list(value.unbind()))
            return
        self._text(f"{value.dtype}{list(value.shape)}")
        if value.is_meta:  # it has no content
            return
        if parts := _parts_of(value):
            self.feed(parts)
        elif value.layout is torch.sparse_coo:
            value = value.detach().coalesce()
            self.feed([value.indices(), value.values()])
        elif value.layout is not torch.strided:
            self.feed(value.detach().to_dense())
        elif value.numel():
            value = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            num_bytes = value.numel() * value.element_size()
            self._state.update((ctypes.c_char * num_bytes).from_address(value.data_ptr()))  # no copy of it


def _parts_of(value: torch.Tensor) -> dict[str, object] | None:
    """Return the parts of a tensor if it has no memory itself: reading at its address would end the process."""
    if type(value) in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        return None
    if hasattr(value, "__tensor_flatten__"):
        names, _ = value.__tensor_flatten__()
        return {name: getattr(value, name) for name in names}
    try:
        has_memory = value.data_ptr() != 0 or not value.numel()
    except RuntimeError:
        has_memory = False
    return None if has_memory else dict(vars(value))


def _attributes(value: object) -> object:
    """Return the parts of an object; if it shows none, its text, unless the text contains an address."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    attributes = own_dict(value)
    if attributes:
        return dict(sorted(attributes.items()))  # a metric that was pickled has them in another order
    text = repr(value)
    return None if " at 0x" in text else text


def digest(value: object) -> str:
    """Return a digest of nested tensors and plain values."""
    state = Digest()
    state.feed(value)
    return state.text()


def exact(value: Any) -> object:
    """Return a number as text that loses no bit, or anything else in a form that JSON can hold."""
    value = shard_of(value)
    if isinstance(value, torch.Tensor):
        return digest(value) if value.numel() != 1 else exact(value.item())
    if isinstance(value, float):
        return value.hex()
    if value is None or isinstance(value, (str, int)):
        return value
    if callable(getattr(value, "item", None)) and getattr(value, "size", None) == 1:
        value = value.item()
        return exact(value) if isinstance(value, (str, int, float)) else digest(value)
    return digest(value)


def exact_metrics(metrics: object) -> dict[str, object]:
    """Return metrics in a form that JSON can hold, including those that a user has passed to a custom logger."""
    if not isinstance(metrics, Mapping):
        return {} if metrics is None else {"": exact(metrics)}
    return {str(name): exact(value) for name, value in metrics.items()}


def learning_rates(trainer: Trainer) -> list[list[object]]:
    """Return the learning rate of each parameter group of each optimizer."""
    return [[exact(group.get("lr")) for group in optimizer.param_groups] for optimizer in trainer.optimizers]


def weights_digest(trainer: Trainer) -> str:
    """Return the digest of all parameters and buffers."""
    return digest(dict(trainer.lightning_module.state_dict()))


def optimizers_digest(trainer: Trainer) -> str:
    """Return the digest of the states of all optimizers."""
    return digest([_in_order(optimizer.state_dict()) for optimizer in trainer.optimizers])


def _in_order(state: dict[str, object]) -> dict[str, object]:
    """Return an optimizer's state with the values of each parameter in a fixed order: FSDP1 loads them in another."""
    found = state.get("state")
    if not isinstance(found, Mapping):  # a user's own optimizer may have any state
        return state
    return {**state, "state": {name: _sorted(values) for name, values in found.items()}}


def _sorted(values: object) -> object:
    return dict(sorted(values.items(), key=lambda item: str(item[0]))) if isinstance(values, Mapping) else values
