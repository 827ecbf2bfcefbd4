"""States that are read in memory are those of the getters, or are not read at all."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lightning_faulttolerant.state import memory, packing, rng
from lightning_faulttolerant.state.rng import look, restore_globals, rng_state, saved_globals

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
    monkeypatch.setattr(rng, "_GLOBALS", rng._GlobalGenerators())
    caches = (memory._python_offsets, memory._numpy_offsets, memory._torch_parts)
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
    assert memory._torch_parts() is not None


NUM_WORDS = 624
GLOBAL_DRAWS = {
    **{f"python {name}": lambda draw=draw: draw(random) for name, draw in PYTHON_DRAWS.items()},
    **{f"numpy {name}": lambda draw=draw: draw(np.random) for name, draw in NUMPY_DRAWS.items()},
    "python, as many as it has words": lambda: random.getrandbits(32 * NUM_WORDS),
    "numpy, as many as it has words": lambda: np.random.bytes(4 * NUM_WORDS),
    "torch, as many as it has words": lambda: torch.empty(NUM_WORDS, dtype=torch.int32).random_(),
    "python seed": lambda: random.seed(5),
    "numpy seed": lambda: np.random.seed(5),
    "torch seed": lambda: torch.manual_seed(5),
    "torch rand": lambda: torch.rand(3),
    "torch randn": lambda: torch.randn(1),
    "torch many": lambda: torch.randn(1000),
    "torch double": lambda: torch.randn(1, dtype=torch.float64),
    "torch permutation": lambda: torch.randperm(7),
    "torch dropout": lambda: torch.nn.functional.dropout(torch.ones(3)),
    "nothing": lambda: None,
}


def global_states() -> dict[str, bytes]:
    """Return the states of the global generators from their getters."""
    return {
        "python": packing.pack_random(random.getstate()),
        "numpy": packing.pack_numpy(np.random.get_state(legacy=False)),
        "torch": packing.pack_torch(torch.default_generator.get_state()),
    }


@pytest.fixture
def _globals_kept() -> Iterator[None]:
    """Restore the global generators after the test."""
    states = global_states()
    yield
    rng.set_rng_state(states)


@pytest.mark.usefixtures("_globals_kept")
@pytest.mark.parametrize("name", GLOBAL_DRAWS)
def test_a_look_shows_each_draw(name: str) -> None:
    """A look returns what the getters return, and the same object as before only if nothing was drawn or seeded."""
    for _ in range(4):  # of two Gaussians, the second one is cached
        before = look()
        assert before == global_states()
        GLOBAL_DRAWS[name]()
        assert (look() is before) == (global_states() == before)
        assert look() == global_states()
        assert look() is look()


@pytest.mark.usefixtures("_globals_kept")
@given(names=st.lists(st.sampled_from(sorted(GLOBAL_DRAWS)), max_size=8))
def test_looks_follow_any_draws(names: list[str]) -> None:
    """After any draws, in any order, a look returns what the getters return."""
    for name in names:
        GLOBAL_DRAWS[name]()
        assert look() == global_states()


@pytest.mark.usefixtures("_globals_kept")
@pytest.mark.parametrize("is_readable", [True, False])
def test_saved_globals_come_back(is_readable: bool, request: pytest.FixtureRequest) -> None:
    """States that were saved come back after any draws, as often as wanted."""
    if not is_readable:
        request.getfixturevalue("_unreadable")
    random.gauss(0, 1), np.random.randn(), torch.randn(1)
    states, saved = global_states(), saved_globals()
    for draws in (("python gauss", "numpy randn", "torch randn"), sorted(GLOBAL_DRAWS)):
        for name in draws:
            GLOBAL_DRAWS[name]()
        assert look() != states
        restore_globals(saved)
        assert look() == global_states() == states


@pytest.mark.usefixtures("_globals_kept")
def test_saving_hides_no_draw_from_a_look() -> None:
    """A save reads the states, too. The next look still returns the new ones."""
    before = look()
    random.random(), np.random.rand(), torch.rand(1)
    saved_globals()
    assert look() == global_states() != before


@pytest.mark.usefixtures("_globals_kept")
def test_a_bit_generator_that_replaces_another_gets_the_saved_state() -> None:
    """If NumPy's global bit generator is replaced after a save, the new one gets the state."""
    kept, states, saved = np.random.get_bit_generator(), global_states(), saved_globals()
    try:
        np.random.set_bit_generator(np.random.MT19937(3))
        restore_globals(saved)
        assert look() == global_states() == states
    finally:
        np.random.set_bit_generator(kept)


def test_each_byte_of_torchs_state_shows() -> None:
    """Each part of a state shows a change: the seed, the index, the words at the start, and the cached Gaussians."""
    generator = torch.Generator().manual_seed(3)
    torch.randn(1, generator=generator)
    found = memory.memory_of_torch(generator)
    assert found is not None
    for base, other in memory._neighbors(generator):
        generator.set_state(base)
        before = found.state()
        generator.set_state(other)
        assert found.state() != before
        assert found.state() == packing.pack_torch(generator.get_state())


def test_torch_is_read_by_its_getter_where_memory_has_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a part of torch's state is not found in memory, no look relies on memory."""
    memory._torch_parts.cache_clear()
    monkeypatch.setattr(memory, "_MARGIN_BYTES", 8)  # the seed is not in this part
    assert memory.memory_of_torch(torch.Generator()) is None
    memory._torch_parts.cache_clear()


def test_looks_do_not_depend_on_the_default_device() -> None:
    """The private generators that show where the states are draw on the CPU, even if the user's default is a GPU."""
    expected = memory._torch_parts()
    memory._torch_parts.cache_clear()
    with torch.device("cuda"):  # nothing is created there: this machine need not have one
        assert memory._torch_parts() == expected
        assert look() == rng_state()


@pytest.mark.parametrize("is_read", [True, False], ids=["in memory", "one by one"])
def test_ids_of_items(is_read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of all items are found, also of a list with room for more, and where the memory can't be read."""
    if not is_read:
        monkeypatch.setattr(memory, "_items_at", lambda: None)
    items: list[object] = []
    for number in range(100):
        assert memory.ids_in(items) == struct.pack(f"<{number}q", *map(id, items))
        items.append(object())
    assert memory._items_at() is not None or not is_read
