from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_faulttolerant.loader.replayer import takes_each_batch_alone
from tests.data_sets import MappingLoader, UnpackingLoader, Unsized


class Passes(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()


class PassesFrom(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


class Moves(DataLoader[Any]):
    """Moves each batch."""

    device = "cpu"

    def __iter__(self) -> Iterator[Any]:
        """Move each batch."""
        for batch, target in super().__iter__():
            moved = batch.to(self.device)
            yield moved, target


class Enumerates(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            yield batch + number


class Sums(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            total = batch if "total" not in locals() else total + batch  # noqa: F821 - as in the epoch before
            yield total


class Repeats(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            yield batch


class LeavesOut(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            if len(batch) == 4:
                yield batch


class CountsInAttribute(DataLoader[Any]):
    num_batches = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.num_batches += 1
            yield batch


class KeepsLast(DataLoader[Any]):
    last: Any = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            before = self.last
            self.last = batch
            yield batch + before


class KeepsInItem(DataLoader[Any]):
    kept: dict[str, Any] = {}  # noqa: RUF012 - all instances share it

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.kept["last"] = batch
            yield batch


class Asks(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield self.changed(batch)

    def changed(self, batch: Any) -> Any:
        """Return the batch."""
        return batch


class StartsAtTwo(DataLoader[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(super().__iter__(), 2, None)


class Derived(Enumerates):
    pass


@pytest.mark.parametrize("kind", [DataLoader, Unsized, UnpackingLoader, Passes, PassesFrom, Moves])
def test_class_that_takes_each_batch_alone(kind: Any) -> None:
    """Its code shows that nothing depends on earlier batches: it may begin in the middle."""
    assert takes_each_batch_alone(kind)


@pytest.mark.parametrize(
    "kind",
    [
        MappingLoader,
        Enumerates,
        Sums,
        Repeats,
        LeavesOut,
        CountsInAttribute,
        KeepsLast,
        KeepsInItem,
        Asks,
        StartsAtTwo,
        Derived,
    ],
)
def test_class_that_may_remember(kind: Any) -> None:
    """A class that counts, repeats, leaves out, or calls code that may count is followed by its output."""
    assert not takes_each_batch_alone(kind)


def test_class_without_source() -> None:
    """A class whose code can't be read is followed by its output."""
    names: dict[str, Any] = {"DataLoader": DataLoader}
    exec("class Made(DataLoader):\n    def __iter__(self):\n        return super().__iter__()\n", names)
    assert not takes_each_batch_alone(names["Made"])
