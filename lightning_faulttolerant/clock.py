"""The clock that measures how long our own work takes.

It is bound when the package is imported. A test may replace ``time.perf_counter`` with a mock that returns the times of
a list, one per call. Our calls must not take any of them.
"""

from __future__ import annotations

from time import perf_counter

__all__ = ["perf_counter"]
