from __future__ import annotations

import ctypes

from lightning_faulttolerant.state.objects import kinds


def test_loaded_library_is_not_a_shared_value() -> None:
    """A library of ctypes looks up any attribute in the library, and may raise."""
    assert not kinds.is_shared_value(ctypes.LibraryLoader(ctypes.CDLL))
    assert kinds.is_shared_value(ctypes.c_int(3))
