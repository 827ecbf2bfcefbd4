"""Autosaves saved with ``keep`` outlive pruning and the end of the run, and no resume chooses one of an old run."""

from __future__ import annotations

from pathlib import Path

from lightning_faulttolerant.checkpoint.autosave_files import kept_paths
from lightning_faulttolerant.checkpoint.series import AutosaveSeries


def _save(series: AutosaveSeries, number: int, *, keep: bool = False) -> str:
    return series.save({"number": number}, epoch=0, batch=number, global_step=number, keep=keep)


def _names(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def test_kept_autosaves_are_not_pruned(tmp_path: Path) -> None:
    """Those that leave the newest are moved, all others are deleted, and the newest can be resumed from as ever."""
    series = AutosaveSeries(tmp_path / "fit-1", keep_last=2)
    for number in range(1, 8):
        newest = _save(series, number, keep=number in (2, 4, 6))
    assert [Path(path).name for path in series.paths()] == [
        "autosave-00000006-epoch=0-batch=6-kept.ckpt",
        "autosave-00000007-epoch=0-batch=7.ckpt",
    ]
    assert [Path(path).name for path in kept_paths(series.store)] == [
        "autosave-00000002-epoch=0-batch=2-kept.ckpt",
        "autosave-00000004-epoch=0-batch=4-kept.ckpt",
    ]
    assert series.newest() == newest


def test_kept_autosaves_stay_when_the_run_ends_and_are_not_resumed(tmp_path: Path) -> None:
    """A finished run leaves nothing to resume from; its numbers are not used again."""
    series = AutosaveSeries(tmp_path / "fit-1", keep_last=1)
    for number in (1, 2, 3):
        _save(series, number, keep=number >= 2)
    series.remove_all()
    kept = ["kept/autosave-00000002-epoch=0-batch=2-kept.ckpt", "kept/autosave-00000003-epoch=0-batch=3-kept.ckpt"]
    assert _names(tmp_path / "fit-1") == kept
    assert series.newest() is None
    assert Path(_save(series, 1)).name.startswith("autosave-00000004")


def test_kept_autosaves_of_an_earlier_run_are_set_aside_and_stay(tmp_path: Path) -> None:
    """A run that begins again keeps its own apart from the earlier ones, and its end removes none of them."""
    series = AutosaveSeries(tmp_path / "fit-1", keep_last=1)
    _save(series, 5, keep=True)
    series.remove_all()
    _save(series, 0)
    _save(series, 5, keep=True)
    earlier = "superseded-0001-earlier-run/autosave-00000001-epoch=0-batch=5-kept.ckpt"
    assert _names(tmp_path / "fit-1") == [
        "autosave-00000003-epoch=0-batch=5-kept.ckpt",
        earlier,
    ]
    series.remove_all()
    assert _names(tmp_path / "fit-1") == ["kept/autosave-00000003-epoch=0-batch=5-kept.ckpt", earlier]


def test_of_superseded_autosaves_only_the_kept_ones_stay_when_the_run_ends(tmp_path: Path) -> None:
    """The end of a run removes what it has left for another checkpoint, except what was saved to be kept."""
    series = AutosaveSeries(tmp_path / "fit-1", keep_last=2)
    for number in (1, 2):
        _save(series, number, keep=number == 1)
    series.set_aside("discarded")
    _save(series, 3)
    series.remove_all()
    assert _names(tmp_path / "fit-1") == ["superseded-0001-discarded/autosave-00000001-epoch=0-batch=1-kept.ckpt"]


def test_kept_autosaves_are_set_aside_with_the_others(tmp_path: Path) -> None:
    """A run that leaves its autosaves for another checkpoint leaves the kept ones, too."""
    series = AutosaveSeries(tmp_path / "fit-1", keep_last=1)
    for number in (1, 2):
        _save(series, number, keep=number == 1)
    aside = series.set_aside("discarded")
    assert aside is not None
    assert len(_names(Path(aside))) == 2
    assert kept_paths(series.store) == []
