"""What all tests share: one thread, since they fork, and since sums differ in the last bits between thread counts."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# A busy machine is no failure; pytest's own time-out ends what hangs.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the variables of the surroundings out of the tests."""
    for name in [name for name in os.environ if name.startswith(("PL_", "SLURM_"))]:
        monkeypatch.delenv(name)
