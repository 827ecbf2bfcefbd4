"""The beginning of a fit causes no collection of garbage in its process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from lightning_faulttolerant.trainer import process
from lightning_faulttolerant.trainer.process import without_collections


@pytest.fixture
def _with_collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Collect garbage as Python does by default, and as before after the test."""
    monkeypatch.setattr(process, "_found_frozen", False)
    was_enabled, thresholds, num_frozen = gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()
    gc.unfreeze()
    gc.enable()
    yield
    gc.set_threshold(*thresholds)
    if num_frozen:
        gc.freeze()
    if not was_enabled:
        gc.disable()


@pytest.mark.usefixtures("_with_collections")
def test_objects_of_a_block_cause_no_collection() -> None:
    """Nothing is collected in the block, the objects of the block are no new ones after it, and nothing is frozen."""
    with without_collections():
        num_collections = [of["collections"] for of in gc.get_stats()]
        gc.set_threshold(10)
        kept = [[number] for number in range(1000)]
        gc.set_threshold(100_000)
        assert [of["collections"] for of in gc.get_stats()] == num_collections
    assert gc.isenabled()
    assert gc.get_count()[0] < len(kept) / 2
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("_with_collections")
def test_frozen_objects_stay_frozen() -> None:
    """Objects that the user has frozen stay so, and collections that the user has disabled, too."""
    gc.freeze()
    num_frozen = gc.get_freeze_count()
    gc.disable()
    with pytest.raises(KeyError), without_collections():
        raise KeyError
    assert not gc.isenabled()
    gc.enable()
    with without_collections():
        pass
    assert gc.isenabled()
    assert gc.get_freeze_count() >= num_frozen * 0.9  # some of them may be gone
    gc.unfreeze()


@pytest.mark.usefixtures("_with_collections")
def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To count a million frozen objects takes 0.1 s, so a process that has found some does not count them again."""
    counts = [0, 1000]
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.pop(0))
    for _ in range(4):
        with without_collections():
            pass
    assert counts == []
