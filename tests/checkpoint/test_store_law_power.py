"""The store law under power loss: at each step, anything that was not synced may be gone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_faulttolerant.checkpoint.series import AutosaveSeries
from lightning_faulttolerant.checkpoint.verify import verify_file
from lightning_faulttolerant.errors import DamagedCheckpointError
from tests.checkpoint.writers import DIRECTORY, FILE_WRITERS, INCREMENTAL, SERIES, SHARDS, Writer, exit_code
from tests.faulty_files import FaultyFiles, PowerLoss
from tests.file_faults import kill_before

KEEPS = ["synced", "names", "removals"]


def _at_each_step(directory: Path, keeps: str, action: Callable[[], Any]) -> Iterator[bool]:
    """Lose the power at step 1, 2, ... of an action, then after it; yield each time whether the action was done."""
    original = directory.with_name("original")
    shutil.copytree(directory, original, symlinks=True)
    for at in range(1, 200):
        shutil.rmtree(directory)
        shutil.copytree(original, directory, symlinks=True)
        with PowerLoss(directory, at=at, keeps=keeps) as loss:
            action()
        yield not loss.has_lost
        if not loss.has_lost:
            return
    raise AssertionError("the action does not end")


@pytest.mark.parametrize(
    ("writer", "num_before", "keeps"),
    [
        *(
            (writer, num_before, keeps)
            for writer in FILE_WRITERS
            for num_before in (0, 1, 3)
            for keeps in KEEPS
            if writer is not INCREMENTAL
        ),
        *((INCREMENTAL, num_before, "removals") for num_before in (0, 3)),
        *(pytest.param(INCREMENTAL, 0, keeps, marks=pytest.mark.slow) for keeps in ("synced", "names")),
        *(pytest.param(INCREMENTAL, 3, keeps, marks=pytest.mark.slow) for keeps in ("synced", "names")),
        pytest.param(DIRECTORY, 2, "synced", marks=pytest.mark.slow),
        (SHARDS, 2, "synced"),
        *(pytest.param(SHARDS, 2, keeps, marks=pytest.mark.slow) for keeps in ("names", "removals")),
        *(pytest.param(DIRECTORY, 2, keeps, marks=pytest.mark.slow) for keeps in ("names", "removals")),
        *(pytest.param(DIRECTORY, 0, keeps, marks=pytest.mark.slow) for keeps in KEEPS),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_power_lost_at_each_step_of_a_save(writer: Writer, num_before, keeps, tmp_path):
    """A finished save must survive; until then, the old save or the one in flight; the next save must succeed."""
    root = tmp_path / "root"
    directory = root / "run" / "fit-0"
    root.mkdir()
    for number in range(1, num_before + 1):
        writer.save(directory, number)
    num_steps = 0
    for is_done in _at_each_step(root, keeps, lambda: writer.save(directory, num_before + 1)):
        found = writer.number(directory)
        assert found == num_before + 1 if is_done else found in (num_before, num_before + 1)
        writer.save(directory, num_before + 2)
        assert writer.number(directory) == num_before + 2
        num_steps += 1
    assert num_steps > 6


@pytest.mark.parametrize("keeps", KEEPS)
def test_save_after_save_survives_power_losses(keeps, tmp_path):
    """A run that continues after each power loss must never fall behind a save that was reported as done."""
    root = tmp_path / "root"
    root.mkdir()
    number = 0
    for at in range(1, 15):
        with PowerLoss(root, at=2 * at, keeps=keeps) as loss:
            SERIES.save(root / "run", number + 1)
            SERIES.save(root / "run", number + 2)
        found = SERIES.number(root / "run")
        assert found in ((number, number + 1, number + 2) if loss.has_lost else (number + 2,))
        number = found
    assert number > 5


def _is_sound(path: Path) -> bool:
    try:
        verify_file(path)
    except DamagedCheckpointError:
        return False
    return True


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[AutosaveSeries, Path]:
    """A series of three sound autosaves and two damaged ones after them; one of the two was already set aside."""
    directory = tmp_path / "root" / "run"
    series = AutosaveSeries(directory, keep_last=9)
    for number in range(1, 6):
        SERIES_OF_9.save(directory, number)
    for path in (
        directory / "autosave-00000004-epoch=0-batch=4.ckpt",
        directory / "autosave-00000005-epoch=0-batch=5.ckpt",
    ):
        path.write_bytes(path.read_bytes()[:-1])
        if "00000004" in path.name:
            path.rename(f"{path}.damaged")
    return series, directory


SERIES_OF_9 = Writer(
    name="series-9",
    save=lambda directory, number: AutosaveSeries(directory, keep_last=9).save(
        {"number": number}, epoch=0, batch=number, global_step=number
    ),
    newest=lambda directory: AutosaveSeries(directory).newest(),
)


@pytest.mark.parametrize("keeps", KEEPS)
def test_power_lost_at_each_step_of_setting_damaged_files_aside(damaged, keeps):
    """An interrupted search must lose no file, and the next search must give the same answer."""
    series, directory = damaged
    expected = series.store.path("autosave-00000003-epoch=0-batch=3.ckpt")
    for _ in _at_each_step(directory.parent, keeps, series.newest):
        assert len(list(directory.iterdir())) == 5
        assert series.newest() == expected


@pytest.mark.parametrize("keeps", KEEPS)
def test_power_lost_at_each_step_of_setting_a_series_aside(damaged, keeps):
    """Until the end, the newest sound autosave must be the answer, then there must be none; no file may be lost."""
    series, directory = damaged
    series.newest()
    newest = "autosave-00000003-epoch=0-batch=3.ckpt"
    for is_done in _at_each_step(directory.parent, keeps, lambda: series.set_aside("label")):
        assert {path.name[:17] for path in directory.rglob("autosave-*")} == {f"autosave-{n:08d}" for n in range(1, 6)}
        found = series.newest()
        assert found is None if is_done else found in (series.store.path(newest), None)
        series.set_aside("again")
        assert series.newest() is None
        assert any(_is_sound(path) for path in directory.rglob(newest))


@pytest.mark.parametrize("keeps", KEEPS)
def test_power_lost_at_each_step_of_removing_a_series(damaged, keeps):
    """While a finished run is removed, its newest autosave or none must exist, never only damaged ones: an error."""
    series, directory = damaged
    series.set_aside("before")
    for number in range(6, 8):
        SERIES_OF_9.save(directory, number)
    (directory / "autosave-00000007-epoch=0-batch=7.ckpt").write_bytes(b"")
    series.newest()
    for is_done in _at_each_step(directory.parent, keeps, series.remove_all):
        found = series.newest()
        assert found in (series.store.path("autosave-00000006-epoch=0-batch=6.ckpt"), None)
        assert found is None or not is_done or keeps == "synced"
        series.remove_all()
        assert series.newest() is None


@pytest.mark.parametrize("action", ["newest", "set_aside", "remove_all"])
def test_killed_at_each_step_of_the_rest(damaged, action):
    """A SIGKILL at any step of searching, setting aside or removing must leave files that the next start can use."""
    series, directory = damaged
    if action != "newest":
        series.newest()
    original = directory.with_name("original")
    shutil.copytree(directory, original, symlinks=True)
    for at in range(1, 100):
        shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(original, directory, symlinks=True)

        def main(at: int = at) -> None:
            with FaultyFiles(directory.parent, kill_before, at=at):
                series.set_aside("label") if action == "set_aside" else getattr(series, action)()

        code = exit_code(main)
        found = series.newest()
        assert found in (series.store.path("autosave-00000003-epoch=0-batch=3.ckpt"), None)
        if code == 0:
            assert (found is None) == (action != "newest")
            return
    raise AssertionError("it does not end")
