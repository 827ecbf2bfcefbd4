"""The difference between two states: the states of many ranks are mostly alike, and each part is kept once.

A state is nested dicts of tensors, bytes, lists and plain values.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_faulttolerant.state.blobs import tensor_to_blob

_DIGEST_BYTES = 16
_PLAIN = (type(None), bool, int, float, complex, str)
_KEYS, _OWN = "keys", "own"


def digests_of(state: object) -> object:
    """Return the dicts of `state` with a digest in place of every other value."""
    if isinstance(state, Mapping):
        return {key: digests_of(value) for key, value in state.items()}
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    _feed(digest, state)
    return digest.digest()


def difference(state: Mapping[str, object], digests: Mapping[str, object]) -> dict[str, Any]:
    """Return the input that `patched` needs to turn the state with `digests` into `state`.

    Args:
        state: A state.
        digests: The result of `digests_of` for another state.
    """
    own: dict[str, object] = {}
    for key, value in state.items():
        other = digests.get(key)
        if not isinstance(value, Mapping) or not isinstance(other, Mapping):
            if key not in digests or digests_of(value) != other:
                own[key] = [value]
        elif digests_of(value) != other:
            own[key] = difference(value, other)
    return {_KEYS: list(state), _OWN: own}


def patched(reference: Mapping[str, Any], delta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state that `difference` reduced to `delta`, relative to `reference`.

    A part that `reference` had then but lacks now is left out.
    """
    state = {}
    for key in delta[_KEYS]:
        if key not in delta[_OWN]:
            if key in reference:
                state[key] = reference[key]
            continue
        own = delta[_OWN][key]
        state[key] = own[0] if isinstance(own, list) else patched(reference.get(key, {}), own)
    return state


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{list(value.shape)}".encode())
        digest.update(tensor_to_blob(value.detach().cpu()))
    elif isinstance(value, Mapping):
        digest.update(f"d{len(value)}".encode())
        for key in value:
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, (list, tuple)):
        digest.update(f"l{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, bytes):
        digest.update(b"b%d" % len(value) + value)
    elif not isinstance(value, _PLAIN):  # an object, whose text may leave parts out
        text = pickle.dumps(value)
        digest.update(b"o%d" % len(text) + text)
    else:
        text = f"{type(value).__name__}{value!r}".encode()
        digest.update(b"v%d" % len(text) + text)
