import pytest

from lightning_faulttolerant.cli.text import duration_text, plural, share_text, short_text, value_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0042, "4.2 ms"),
        (0.5, "0.50 s"),
        (0.9996, "1.0 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.7, "1 min"),
        (3571, "59 min 31 s"),
        (3599.7, "1 h"),
        (7170, "2 h"),
        (86399, "24 h"),
        (86400, "1 d"),
        (9e5, "10 d 10 h"),
        (1e10, "115,740 d 18 h"),
        (-90, "-1 min 30 s"),
        (float("nan"), "?"),
        (float("inf"), "?"),
    ],
)
def test_a_duration_is_written_in_its_two_largest_units(seconds, text):
    """A duration has as many digits as a reader wants, also if rounding carries into the next unit."""
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (1, "100 %"),
        (0.99996, "99.9 %"),
        (0.9423, "94.2 %"),
        (0.001, "0.1 %"),
        (1e-9, "< 0.1 %"),
        (0, "0 %"),
        (float("nan"), "?"),
    ],
)
def test_a_share_is_never_better_than_it_is(share, text):
    """Only all is 100 %, and only nothing is 0 %."""
    assert share_text(share) == text


def test_ticks_can_be_told_from_each_other():
    """A tick's text has the digits of its step, with a unit if it would be long."""
    assert [short_text(value, step=0.25) for value in (0, 0.25, 0.5, 1)] == ["0", "0.25", "0.50", "1.00"]
    assert [short_text(value, step=5000) for value in (5000, 15000)] == ["5,000", "15,000"]
    assert [short_text(value, step=50000) for value in (100000, 150000)] == ["100 k", "150 k"]
    assert [short_text(value, step=1e-5) for value in (1e-5, 2e-5)] == ["1e-05", "2e-05"]
    assert short_text(2.5e6, step=5e5) == "2.5 M"


def test_one_of_a_thing_is_singular():
    """A noun agrees with its count."""
    assert [plural(number, "batch", "batches") for number in (0, 1, 1200)] == ["0 batches", "1 batch", "1,200 batches"]
    assert value_text(0.1 + 0.2) == "0.3"
