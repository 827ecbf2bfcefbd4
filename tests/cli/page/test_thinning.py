import math
import random

import pytest

from lightning_faulttolerant.cli.plot import highest, pieces, spread, thinned


def _noise(number, seed=0):
    drawn = random.Random(seed)
    return [(float(x), drawn.gauss(0, 1)) for x in range(number)]


@pytest.mark.parametrize("number", [0, 1, 3, 400, 5_000, 100_000])
def test_a_thinned_series_keeps_its_ends_its_extremes_and_its_order(number):
    """However many points there are, few are drawn, and no extreme is lost."""
    points = _noise(number)
    kept = thinned(points, num_columns=100)
    assert len(kept) <= 400
    assert set(kept) <= set(points)
    assert kept == sorted(kept)
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
        for chosen in (min, max):
            assert chosen(kept, key=lambda point: point[1]) == chosen(points, key=lambda point: point[1])


def test_one_spike_among_many_is_kept_in_its_column():
    """A single bad batch among a hundred thousand is visible at its place."""
    points = [(float(x), 1.0) for x in range(100_000)]
    points[31_415] = (31_415.0, 9.0)
    assert (31_415.0, 9.0) in thinned(points, num_columns=200)
    assert (31_415.0, 9.0) in highest(points, num_columns=200)


def test_points_at_one_place_are_thinned_too():
    """A series without width does not divide by zero."""
    points = [(1.0, float(y)) for y in range(5_000)]
    assert {(1.0, 0.0), (1.0, 4999.0)} <= set(thinned(points, num_columns=10))
    assert highest(points, num_columns=10) == [(1.0, 4999.0)]


def test_a_series_is_broken_where_a_value_is_not_finite():
    """A curve has gaps where the loss is nan or infinite, and no empty pieces."""
    points = [(0, math.nan), (1, 1.0), (2, 2.0), (3, math.inf), (4, math.nan), (5, 3.0), (6, -math.inf)]
    assert pieces(points) == [[(1, 1.0), (2, 2.0)], [(5, 3.0)]]
    assert pieces([]) == []


def test_spread_keeps_both_ends_and_never_repeats():
    """A few of many items are chosen, each once, from the first to the last."""
    for number in (2, 3, 7, 50):
        chosen = spread(range(1000), number=number)
        assert (chosen[0], chosen[-1], len(chosen)) == (0, 999, number)
        assert len(set(chosen)) == number
    assert spread([1, 2], number=5) == [1, 2]
