"""Generator states become bytes and come back whole."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from lightning_faulttolerant.state import packing

BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
seeds = st.integers(min_value=0, max_value=2**32 - 1)


def assert_same_state(one: object, other: object) -> None:
    """Compare two NumPy states, including their arrays."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_state(one[key], other[key])
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
    else:
        assert one == other


@given(seed=seeds, num_words=st.integers(0, 700), num_gaussians=st.integers(0, 3))
def test_random_state_comes_back_with_its_cached_gaussian(seed: int, num_words: int, num_gaussians: int) -> None:
    """After any draws of Python's generator, the unpacked state is the packed one, including the cached Gaussian."""
    generator = random.Random(seed)
    generator.getrandbits(32 * num_words + 1)
    for _ in range(num_gaussians):
        generator.gauss(0, 1)
    state = generator.getstate()
    assert packing.unpack_random(packing.pack_random(state)) == state


@pytest.mark.parametrize("name", BIT_GENERATORS)
@given(seed=seeds, num_bytes=st.integers(0, 40), num_halves=st.integers(0, 3))
def test_bit_generator_state_comes_back(name: str, seed: int, num_bytes: int, num_halves: int) -> None:
    """Each of NumPy's bit generators continues identically, even when half of a word is buffered."""
    generator = np.random.Generator(getattr(np.random, name)(seed))
    generator.bytes(num_bytes)
    generator.integers(0, 2**16, size=num_halves, dtype=np.uint32)  # 32 of 64 bits: the rest is kept for the next draw
    state = generator.bit_generator.state
    assert_same_state(packing.unpack_numpy(packing.pack_numpy(state)), state)


@pytest.mark.parametrize("name", BIT_GENERATORS)
@given(seed=seeds, num_gaussians=st.integers(0, 3))
def test_random_state_of_numpy_comes_back_with_its_cached_gaussian(name: str, seed: int, num_gaussians: int) -> None:
    """A RandomState over any bit generator comes back with the Gaussian that `randn` keeps for its next call."""
    generator = np.random.RandomState(getattr(np.random, name)(seed))
    generator.randn(num_gaussians)
    state = generator.get_state(legacy=False)
    again = np.random.RandomState(getattr(np.random, name)(0))
    again.set_state(packing.unpack_numpy(packing.pack_numpy(state)))
    assert_same_state(again.get_state(legacy=False), state)
    assert again.randn(3).tolist() == generator.randn(3).tolist()


@given(seed=seeds, num_gaussians=st.integers(0, 40))
def test_torch_state_comes_back(seed: int, num_gaussians: int) -> None:
    """A torch generator continues identically, even in the middle of a block of normals."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_gaussians):
        torch.randn((), generator=generator)
    again = packing.empty_generator("torch:cpu")
    again.set_state(packing.unpack_torch(packing.pack_torch(generator.get_state())))
    assert torch.equal(torch.randn(5, generator=again), torch.randn(5, generator=generator))


def test_state_that_is_no_plain_value_is_refused() -> None:
    """A custom bit generator whose state holds an object raises rather than keeping half of it."""
    with pytest.raises(TypeError, match="holds a set, which can't be kept"):
        packing.pack_numpy({"bit_generator": "Own", "state": {1, 2}})
