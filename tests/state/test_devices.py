"""Device generators continue in a process with other device numbers, and no drawn state is lost."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

import pytest
import torch
from torch import Tensor

from lightning_faulttolerant.state.generators import of_devices_here
from lightning_faulttolerant.state.rng import rng_state, set_rng_state

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


@pytest.fixture(autouse=True)
def _no_devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a process without devices."""
    monkeypatch.setattr(torch, "cuda", Devices(in_use=False))
    yield
    monkeypatch.undo()


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
