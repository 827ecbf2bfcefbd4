"""The global generators as one state: exact to the last bit, read without side effects, and on any devices."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from lightning_faulttolerant.state.generators import of_devices_here
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


# Devices of an accelerator

SEED = 7


class Devices:
    """Stands in for `torch.cuda` on a machine with devices that have drawn these many numbers."""

    def __init__(self, *num_drawn: int, current: int = 0, in_use: bool = True) -> None:
        self.states = [struct.pack("<Qq", SEED, number) for number in num_drawn]
        self.current = current
        self.in_use = in_use

    def is_initialized(self) -> bool:
        return self.in_use

    def is_available(self) -> bool:
        return bool(self.states)

    def device_count(self) -> int:
        return len(self.states)

    def current_device(self) -> int:
        assert self.in_use, "would start CUDA"
        return self.current

    def get_rng_state(self, index: int) -> Tensor:
        return torch.frombuffer(bytearray(self.states[index]), dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: int | str) -> None:
        self.states[self.current if device == "cuda" else int(device)] = bytes(state.tolist())

    def num_drawn(self) -> list[int]:
        return [struct.unpack("<Qq", state)[1] for state in self.states]


def continues(monkeypatch: pytest.MonkeyPatch, state: Mapping[str, bytes], *num_drawn: int, **more: int) -> list[int]:
    """Return how much the devices of another process have drawn after it gets the state."""
    here = Devices(*num_drawn, **more)
    monkeypatch.setattr(torch, "cuda", here)
    set_rng_state(state)
    return here.num_drawn()


def saved(monkeypatch: pytest.MonkeyPatch, *num_drawn: int, **more: int) -> dict[str, bytes]:
    """Return the generators' state in a process with these devices."""
    monkeypatch.setattr(torch, "cuda", Devices(*num_drawn, **more))
    return rng_state()


def test_same_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device continues where it was."""
    state = saved(monkeypatch, 1, 2, 3, current=1)
    assert set(state) >= {"cuda:0", "cuda", "cuda:2"}
    assert continues(monkeypatch, state, 0, 0, 0, current=1) == [1, 2, 3]


@pytest.mark.parametrize(("num_devices", "current"), [(1, 0), (4, 3), (8, 2)])
def test_own_device_has_another_number(monkeypatch: pytest.MonkeyPatch, num_devices: int, current: int) -> None:
    """A rank's own device continues under any number; other devices that drew nothing are not missed."""
    state = saved(monkeypatch, 0, 0, 0, 0, 0, 0, 5, 0, current=6)
    expected = [5 if index == current else 0 for index in range(num_devices)]
    assert continues(monkeypatch, state, *[9] * num_devices, current=current)[current] == 5
    assert continues(monkeypatch, state, *[0] * num_devices, current=current) == expected


@pytest.mark.parametrize(("num_devices", "current"), [(1, 0), (2, 1)])
def test_draws_on_another_device_are_not_lost(monkeypatch: pytest.MonkeyPatch, num_devices: int, current: int) -> None:
    """State drawn on a device that is missing here, or is this process's own, can't continue: this is an error."""
    state = saved(monkeypatch, 3, 4, current=0)
    with pytest.raises(ValueError, match="device 'cuda:1', which this process does not have"):
        continues(monkeypatch, state, *[0] * num_devices, current=current)


def test_no_device_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a device, state drawn on one can't continue; if nothing was drawn, everything continues."""
    assert continues(monkeypatch, saved(monkeypatch, 0, 0)) == []
    with pytest.raises(ValueError, match="device 'cuda', which"):
        continues(monkeypatch, saved(monkeypatch, 1))


def test_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """If CUDA is not in use yet, the state waits for it, and reading does not start it."""
    state = saved(monkeypatch, 6)
    assert not [name for name in saved(monkeypatch, 1, in_use=False) if name.startswith("cuda")]
    assert continues(monkeypatch, state, 0, in_use=False) == [6]


def test_states_of_other_devices_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If ranks are dealt again, the state of devices that don't exist here is dropped."""
    state = saved(monkeypatch, 1, 2, 3, current=2)
    monkeypatch.setattr(torch, "cuda", Devices(0, 0, current=0))
    kept = of_devices_here(state)
    assert {name for name in kept if name.startswith("cuda")} == {"cuda", "cuda:1"}
