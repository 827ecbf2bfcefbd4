import math
from itertools import pairwise

import pytest

from lightning_faulttolerant.cli.plot import Scale, count_scale, elapsed_scale, size_scale, value_scale

VALUES = [
    [],
    [0.0],
    [2.5, 2.5],
    [-3.0, 7.0],
    [0.011, 2.4],
    [5e-324, 1e-300],
    [5e-324, 1e-310],
    [0.0, 1e-306],
    [-1.7e308, 1.7e308],
    [1e15, 1e15 + 1],
    [float("nan"), float("inf"), 1.0],
    [0.98, 1.02],
    [1e-7, 3e4],
    [123456.0, 987654.0],
]


@pytest.mark.parametrize("values", VALUES, ids=str)
def test_every_value_has_a_place_and_ticks_rise(values):
    """For any values, the scale holds them, and its few ticks rise from low to high with distinct texts."""
    scale = value_scale(values)
    for value in values:
        if math.isfinite(value):
            assert 0 <= scale.place(value) <= 1
    assert 2 <= len(scale.ticks) <= 12
    assert all(a.place < b.place for a, b in pairwise(scale.ticks))
    assert len({tick.text for tick in scale.ticks}) == len(scale.ticks)
    assert max(len(tick.text) for tick in scale.ticks) <= 10


def test_places_keep_the_order_of_values():
    """A greater value is never lower, on either kind of scale."""
    for scale in (value_scale([0.5, 3.0]), value_scale([0.001, 3.0])):
        places = [scale.place(0.001 + number / 100) for number in range(300)]
        assert places == sorted(places)
        assert places[0] < places[-1]


def test_a_wide_range_of_positive_values_is_logarithmic():
    """A loss that falls by factors is drawn so that its end is visible."""
    scale = value_scale([0.01, 2.3])
    assert scale.is_log
    assert abs(scale.place(0.1) - scale.place(0.01) - (scale.place(1.0) - scale.place(0.1))) < 1e-9
    assert not value_scale([0.3, 2.3]).is_log
    assert not value_scale([0.0, 2.3]).is_log


def test_a_tick_stands_where_its_value_is():
    """The text at a tick is the value at its place."""
    for scale in (value_scale([0.2, 3.1]), value_scale([0.02, 31.0])):
        for tick in scale.ticks:
            assert scale.place(float(tick.text)) == pytest.approx(tick.place, abs=1e-9)


@pytest.mark.parametrize("high", [0, 1, 3, 7, 12, 999, 1200, 10**6, 10**9])
def test_a_count_has_no_tick_between_integers(high):
    """Batches are whole."""
    scale = count_scale(0, high)
    values = [tick.place * scale.high for tick in scale.ticks]
    assert all(abs(value - round(value)) < 1e-6 * max(value, 1) for value in values)
    assert len(values) <= 9
    assert scale.high == max(high, 1)


@pytest.mark.parametrize(
    ("seconds", "texts"),
    [
        (50, ["0 s", "10 s", "20 s", "30 s", "40 s", "50 s"]),
        (3600, ["0 s", "10 min", "20 min", "30 min", "40 min", "50 min", "1 h"]),
        (8000, ["0 s", "30 min", "1 h", "1 h 30 min", "2 h"]),
        (5.2 * 86400, ["0 s", "1 d", "2 d", "3 d", "4 d", "5 d"]),
    ],
)
def test_time_has_ticks_at_whole_units(seconds, texts):
    """Hours are not counted in tens."""
    assert [tick.text for tick in elapsed_scale(seconds).ticks] == texts


@pytest.mark.parametrize("seconds", [0, -1, 1e-4, 0.3, 7, 61, 86400 * 400, 1e11, float("nan"), float("inf")])
def test_any_time_has_a_scale(seconds):
    """A run of no time at all, or of years, can be drawn."""
    scale = elapsed_scale(seconds)
    assert scale.low == 0
    assert 1 <= len(scale.ticks) <= 16
    assert len({tick.text for tick in scale.ticks}) == len(scale.ticks)


def test_a_scale_of_sizes_begins_at_nothing():
    """Bars start at zero."""
    scale = size_scale(4.2, text=lambda value: f"{value:g} s")
    assert (scale.low, scale.ticks[0].text, scale.ticks[-1].text) == (0, "0 s", "6 s")
    assert size_scale(0.0).place(0.0) == 0


def test_a_scale_refuses_what_has_no_width():
    """A scale that would divide by zero is an error at construction."""
    with pytest.raises(ValueError, match="greater one"):
        Scale(low=1, high=1)
    with pytest.raises(ValueError, match="above 0"):
        Scale(low=0, high=1, is_log=True)
