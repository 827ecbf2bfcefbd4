"""What is left of a loader after any ranks: with what they consumed, it is the whole loader, each sample once."""

from __future__ import annotations

from hypothesis import given, strategies as st

from lightning_faulttolerant.loader.remaining import ListedIndices, Rest


@given(length=st.integers(0, 60), data=st.data())
def test_each_sample_once(length: int, data: st.DataObject) -> None:
    """Whatever each of several numbers of ranks has consumed, together with the rest it is each sample once."""
    rest, consumed = Rest(length=length), list[int]()
    for num_ranks in data.draw(st.lists(st.integers(1, 5), max_size=4)):
        own = [rest.of_rank(rank, num_ranks).tolist() for rank in range(num_ranks)]
        assert sorted(index for of_rank in own for index in of_rank) == rest.positions().tolist()
        assert max(map(len, own)) - min(map(len, own)) <= 1
        nums = [data.draw(st.integers(0, len(of_rank))) for of_rank in own]
        consumed += [index for of_rank, num in zip(own, nums, strict=True) for index in of_rank[:num]]
        rest = Rest(length=length, consumed=(*rest.consumed, tuple(nums)))
        assert sorted([*consumed, *rest.positions().tolist()]) == list(range(length))


@given(length=st.integers(0, 30), num_ranks=st.integers(1, 4), num=st.integers(0, 8))
def test_begin(length: int, num_ranks: int, num: int) -> None:
    """Ranks that have consumed as many samples each have consumed the beginning of the order."""
    num = min(num, length // num_ranks)
    assert Rest(length=length, consumed=((num,) * num_ranks,)).begin == num * num_ranks


def test_begin_of_ranks_that_are_apart() -> None:
    """A rest with gaps has no beginning, unless nothing is left."""
    assert Rest(length=6, consumed=((2, 1),)).begin == 3
    assert Rest(length=6, consumed=((2, 0),)).begin is None
    assert Rest(length=6, consumed=((3, 3),)).begin == 6


def test_listed_indices() -> None:
    """The sampler yields its indices as numbers, each time, over the ends of its chunks."""
    sampler = ListedIndices(Rest(length=40_000).of_rank(1, 2))
    assert list(sampler) == list(sampler) == list(range(1, 40_000, 2))
    assert len(sampler) == 20_000
