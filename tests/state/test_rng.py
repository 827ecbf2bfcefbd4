"""The global generators as one state: exact to the last bit, and read without side effects."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lightning_faulttolerant.state.rng import look, restore_globals, rng_state, saved_globals, set_rng_state

BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")

# Calls that leave more behind than a position: a cached Gaussian, half a word, the middle of a block.
DRAWS = {
    "gauss": lambda: random.gauss(0, 1),
    "random": random.random,
    "bits": lambda: random.getrandbits(7),
    "randn": np.random.randn,
    "rand": np.random.rand,
    "randint": lambda: np.random.randint(0, 2**16, dtype=np.uint16),
    "torch.randn": lambda: torch.randn(()).item(),
    "torch.rand": lambda: torch.rand(17).tolist(),
    "torch.randint": lambda: torch.randint(2**40, ()).item(),
}
MORE = {
    "seeds": lambda: (random.seed(5), np.random.seed(5), torch.manual_seed(5), None)[-1],
    "as many as there are words": lambda: (random.getrandbits(32 * 624), np.random.bytes(4 * 624))[0],
    "torch, as many": lambda: torch.empty(624, dtype=torch.int32).random_().tolist(),
    "torch double": lambda: torch.randn(1, dtype=torch.float64).item(),
    "torch permutation": lambda: torch.randperm(7).tolist(),
    "nothing": lambda: None,
}
DRAWS |= MORE
draws = st.lists(st.sampled_from(sorted(DRAWS)), max_size=8)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Give each test the same generators, and restore them for other tests."""
    before = rng_state()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    yield
    set_rng_state(before)


@given(before=draws, between=draws, after=draws)
def test_draws_continue_alike(before: list[str], between: list[str], after: list[str]) -> None:
    """After any draws, a restored state yields the draws that followed it, whatever was drawn in between."""
    for name in before:
        DRAWS[name]()
    state = rng_state()
    expected = [DRAWS[name]() for name in after]
    for name in between:
        DRAWS[name]()
    set_rng_state(state)
    assert rng_state() == state
    assert [DRAWS[name]() for name in after] == expected


@pytest.mark.parametrize("name", BIT_GENERATORS)
def test_global_bit_generator_of_each_kind(name: str) -> None:
    """`np.random.set_bit_generator` may put any bit generator behind the global functions: all continue identically."""
    original = np.random.get_bit_generator()
    np.random.set_bit_generator(getattr(np.random, name)(1))
    try:
        np.random.randn()
        state = rng_state()
        expected = np.random.randn(3).tolist()
        set_rng_state(state)
        assert rng_state() == state
        assert np.random.randn(3).tolist() == expected
    finally:
        np.random.set_bit_generator(original)


def test_device_that_is_not_there_is_named() -> None:
    """The state of an accelerator that this process lacks raises, and the error names the device."""
    with pytest.raises(ValueError, match="device 'cuda:4096', which this process does not have"):
        set_rng_state({"cuda:4096": b""})
    with pytest.raises(ValueError, match="device 'abacus:0'"):
        set_rng_state({"abacus:0": b""})


def test_numpy_is_not_imported_for_it() -> None:
    """If NumPy's generators are not imported, they have no state, and stay unimported."""
    script = (
        "import sys\n"
        "sys.modules['numpy'] = None\n"  # as if it were not installed
        "import warnings; warnings.simplefilter('ignore')\n"  # torch's, about exactly that
        "from lightning_faulttolerant.state.rng import look, restore_globals, rng_state, saved_globals, set_rng_state\n"
        "state = rng_state()\n"
        "set_rng_state(state)\n"
        "assert list(state) == ['python', 'torch'], list(state)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@given(names=draws)
def test_a_look_shows_each_draw(names: list[str]) -> None:
    """After any draws, a look is the state, and the same object as before only if nothing was drawn or seeded."""
    for name in names:
        before, state = look(), rng_state()
        assert before == state
        DRAWS[name]()
        assert (look() is before) == (rng_state() == state)
        assert look() == rng_state()
        saved_globals()  # a save hides nothing from a look
        assert look() == rng_state()


@given(before=draws, between=draws)
def test_saved_globals_come_back_as_often_as_wanted(before: list[str], between: list[str]) -> None:
    """States that were saved come back after any draws, even if NumPy's bit generator is another one by then."""
    for name in before:
        DRAWS[name]()
    state, saved, kept = rng_state(), saved_globals(), np.random.get_bit_generator()
    for replaces in (False, True):
        for name in between:
            DRAWS[name]()
        if replaces:
            np.random.set_bit_generator(np.random.MT19937(3))
        restore_globals(saved)
        assert look() == rng_state() == state
    np.random.set_bit_generator(kept)


def test_looks_do_not_depend_on_the_default_device() -> None:
    """A default device for new tensors changes no state."""
    state = rng_state()
    with torch.device("meta"):
        assert rng_state() == state
        assert look() == state
