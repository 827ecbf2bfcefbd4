"""The weight of the gradients of an open accumulation window for a different number of ranks."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from lightning_faulttolerant.loader.remaining import RankShare
from lightning_faulttolerant.trainer.ranks.elastic import Window


def share(num_ranks: int, batch_size: int) -> RankShare:
    """Return the share of rank 0."""
    return RankShare(rank=0, num_ranks=num_ranks, batch_size=batch_size)


@pytest.mark.parametrize(
    ("now", "num_batches", "accumulated", "scale"),
    [
        (share(1, 8), 3, 2, 1.0),  # the same global batch
        (share(4, 2), 3, 2, 1.0),
        (share(1, 4), 6, 4, 1.0),  # the windows have twice as many batches
        (share(1, 4), 7, 3, 4 / 3),  # a window of 12 samples instead of 16, and 4 of them seen: not 8
    ],
)
def test_each_sample_has_its_share(now: RankShare, num_batches: int, accumulated: int, scale: float) -> None:
    """Gradients of 8 samples of a window of 16 weigh as much as 8 samples of a window of the new run."""
    window = Window.of(asdict(share(2, 4)), num_batches=3, accumulated=2)
    assert window == Window(num_samples=8, num_in_window=16)
    found, line = window.scale(share=now, num_batches=num_batches, accumulated=accumulated)
    assert found == pytest.approx(scale)
    fits = num_batches % accumulated * now.samples_at_once == 8
    assert (line == "") == fits


def test_a_window_of_unknown_samples_is_said() -> None:
    """If the number of samples in a batch is not known, this is reported."""
    window = Window.of(None, num_batches=3, accumulated=2)
    assert "not known" in window.scale(share=share(1, 4), num_batches=6, accumulated=2)[1]


def test_gradients_outside_of_windows_are_said() -> None:
    """Gradients outside of a window are of an unknown number of batches, which is reported unless batches are equal."""
    window = Window.of(asdict(share(2, 4)), num_batches=3, accumulated=1)
    assert window.scale(share=share(1, 8), num_batches=3, accumulated=1) == (1.0, "")
    assert "manual optimization" in window.scale(share=share(1, 4), num_batches=6, accumulated=1)[1]
