"""What a run says of kernels that may give another result when they are repeated."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.trainer.resume import repeating
from tests.runs import fit_net


def test_nondeterministic_kernels_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start names the settings of an accelerator that allow them; a CPU has none."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda")))
    found = repeating.nondeterministic(trainer)
    assert found == ["use_deterministic_algorithms is off", "CUBLAS_WORKSPACE_CONFIG is not set"]
    with caplog.at_level("INFO"):
        fit_net([FaultTolerance(dirpath=tmp_path / "cpu")], tmp_path, max_steps=1)
        assert "nondeterministic" not in caplog.text
        monkeypatch.setattr(repeating, "nondeterministic", lambda _: found)
        fit_net([FaultTolerance(dirpath=tmp_path / "gpu")], tmp_path, max_steps=1)
    assert f"The kernels of this run may be nondeterministic: {'; '.join(found)}. Its state" in caplog.text
