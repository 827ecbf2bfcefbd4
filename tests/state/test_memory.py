"""States that are read in memory are those of the getters, or are not read at all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_faulttolerant.state import memory, packing
from lightning_faulttolerant.state.rng import rng_state

PYTHON_DRAWS = {
    "gauss": lambda g: g.gauss(0, 1),
    "random": lambda g: g.random(),
    "bits": lambda g: g.getrandbits(7),
    "many": lambda g: [g.random() for _ in range(400)],
}
NUMPY_DRAWS = {
    "randn": lambda g: g.randn(),
    "rand": lambda g: g.rand(),
    "randint": lambda g: g.randint(0, 2**16, dtype=np.uint16),
    "many": lambda g: g.rand(400),
}


def by_getters(generator: Any) -> bytes:
    """Return the state from the getters."""
    if isinstance(generator, random.Random):
        return packing.pack_random(generator.getstate())
    return packing.pack_numpy(generator.get_state(legacy=False))


@pytest.fixture
def _unreadable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make memory unreadable, as on another interpreter."""
    monkeypatch.setattr(memory, "_has_addresses", lambda: False)
    caches = (memory._python_offsets, memory._numpy_offsets)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@given(seed=st.integers(0, 100), draws=st.lists(st.sampled_from(sorted(PYTHON_DRAWS)), max_size=12))
def test_python_state_is_the_getters(seed: int, draws: list[str]) -> None:
    """After any draws, including cached Gaussians, the bytes are those of ``getstate``."""
    generator = random.Random(seed)
    for name in draws:
        PYTHON_DRAWS[name](generator)
    assert memory.read_random(generator) == by_getters(generator)


@given(seed=st.integers(0, 100), draws=st.lists(st.sampled_from(sorted(NUMPY_DRAWS)), max_size=12))
def test_numpy_state_is_the_getters(seed: int, draws: list[str]) -> None:
    """After any draws, including an odd number of ``randn``, the bytes are those of ``get_state``."""
    generator = np.random.RandomState(seed)
    for name in draws:
        NUMPY_DRAWS[name](generator)
    assert memory.read_random_state(generator) == by_getters(generator)
    bits = np.random.MT19937(seed)
    np.random.Generator(bits).normal(size=len(draws))
    assert memory.read_bit_generator(bits) == packing.pack_numpy(bits.state)


def test_cached_gaussian_alone_changes_the_state() -> None:
    """The second ``randn`` of a pair changes only the flag, and that is noticed."""
    generator = np.random.RandomState(0)
    generator.randn()
    before = memory.read_random_state(generator)
    generator.randn()
    after = memory.read_random_state(generator)
    assert before is not None
    assert after is not None
    assert before != after
    assert before[: 1 + 625 * 4] == after[: 1 + 625 * 4]


class Counting(random.Random):
    """Its state is more than Python's."""


def test_other_types_are_left_to_the_getters() -> None:
    """A subclass, and a ``RandomState`` over another bit generator, are not read in memory."""
    assert memory.read_random(Counting(0)) is None
    assert memory.read_random_state(np.random.RandomState(np.random.PCG64(0))) is None
    assert memory.read_bit_generator(np.random.PCG64(0)) is None
    assert packing.random_state(Counting(0)) == by_getters(random.Random(0))


def test_swapped_bit_generator_of_the_module_is_noticed() -> None:
    """After ``np.random.set_bit_generator`` the state is that of the new one."""
    kept = np.random.get_bit_generator()
    try:
        for bits in (np.random.PCG64(3), np.random.MT19937(3)):
            rng_state()
            np.random.set_bit_generator(bits)
            assert rng_state()["numpy"] == packing.pack_numpy(np.random.get_state(legacy=False))
    finally:
        np.random.set_bit_generator(kept)


@pytest.mark.usefixtures("_unreadable")
def test_without_addresses_the_getters_do() -> None:
    """If memory can't be read, the state is the same."""
    assert memory.read_random(random.Random(0)) is None
    for generator in (random.Random(0), np.random.RandomState(0)):
        packed = packing.random_state if isinstance(generator, random.Random) else packing.numpy_state
        assert packed(generator) == by_getters(generator)
    bits = np.random.MT19937(0)
    assert packing.numpy_state(np.random.Generator(bits)) == packing.pack_numpy(bits.state)


def test_replaced_functions_of_the_modules_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """User replacements of ``random.getstate`` and ``np.random.get_state``, which are not methods, are called."""
    python, legacy = random.Random(8).getstate(), np.random.RandomState(8).get_state(legacy=False)
    monkeypatch.setattr(random, "getstate", lambda: python)
    monkeypatch.setattr(np.random, "get_state", lambda legacy=False, state=legacy: state)
    state = rng_state()
    assert (state["python"], state["numpy"]) == (packing.pack_random(python), packing.pack_numpy(legacy))


def test_reading_is_exercised_here() -> None:
    """On the tests' interpreter the memory is readable: the tests above compare real states."""
    assert memory._python_offsets() is not None
    assert memory._numpy_offsets() is not None
