"""What is checked without DeepSpeed itself; tests/with_deepspeed has the laws."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.errors import UnsafeCheckpointError, UnsupportedTrainerError
from lightning_faulttolerant.state.objects.kinds import is_shared_value
from lightning_faulttolerant.trainer.ranks.strategies import engine_state, failing_together
from lightning_faulttolerant.trainer.resume.choice import Trust


def trainer_with(**engine: object) -> Any:
    """Return what stands for a trainer with an engine that has these attributes."""
    strategy = object.__new__(DeepSpeedStrategy)
    strategy.model = SimpleNamespace(micro_steps=0, **engine)  # type: ignore[assignment]
    return SimpleNamespace(strategy=strategy)


@pytest.fixture
def reachable() -> Iterator[Path]:
    """A directory that other users can enter: pytest's own one is closed to them."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o755)
        yield Path(path)


def test_state_of_an_unknown_version_is_refused() -> None:
    """An engine without the attributes that we read must be an error that names them, not a state without gradients."""
    trainer = trainer_with(optimizer=SimpleNamespace(averaged_gradients={}))
    with pytest.raises(UnsupportedTrainerError, match=r"no global_steps, .*, all_grad_tensors, and"):
        engine_state(trainer)


def test_autosave_that_others_could_have_written_is_not_unpickled(reachable: Path) -> None:
    """DeepSpeed unpickles its files, so a place that others can write to must be refused: at the save, and later."""
    trust = Trust(FaultTolerance()._options)
    trust.check_engines_files(str(reachable))
    reachable.chmod(0o777)
    for is_saving in (False, True):
        with pytest.raises(UnsafeCheckpointError, match="DeepSpeed unpickles the files of its engine"):
            trust.check_engines_files(str(reachable), is_saving=is_saving)
    Trust(FaultTolerance(trust_autosaves=True)._options).check_engines_files(str(reachable))


def test_file_deep_inside_a_directory_counts_for_trust(reachable: Path) -> None:
    """The engine writes into a folder of the autosave, so a file there that others can write to must be found."""
    (reachable / "checkpoint").mkdir(mode=0o755)
    inner = reachable / "checkpoint" / "states.pt"
    for path in (reachable / "meta.pt", inner):
        path.write_bytes(b"1")
        path.chmod(0o644)
    trust = Trust(FaultTolerance()._options)
    assert trust.why_not(str(reachable)) is None
    inner.chmod(0o666)
    assert "states.pt is writable" in str(trust.why_not(str(reachable)))


def test_failed_write_is_raised_when_the_save_is_over() -> None:
    """The rest of the engine's save, with its barrier, must run first. Then nothing of ours is left on the engine."""

    class Engine:
        def save(self, path: str) -> None:
            raise OSError(errno.ENOSPC, path)

    writes, done = Engine(), []

    def save() -> None:
        with failing_together(trainer_with(checkpoint_engine=writes)):
            writes.save("first")
            writes.save("second")
            done.append("barrier")

    with pytest.raises(OSError, match="first"):
        save()
    assert done == ["barrier"]
    assert vars(writes) == {}


def test_loaded_library_is_not_a_shared_value() -> None:
    """DeepSpeed's objects hold libraries of ctypes, which look up any attribute in the library, and may raise."""
    assert not is_shared_value(ctypes.LibraryLoader(ctypes.CDLL))
    assert is_shared_value(ctypes.c_int(3))
