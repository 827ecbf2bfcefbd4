"""Plain attributes that an iterable data set keeps from one iteration to the next: an epoch count, a position.

The samples of an iterable data set that are drawn again and dropped, with a digest of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset, Sampler

from lightning_faulttolerant.loader.foreign import library_of
from lightning_faulttolerant.loader.sample_digest import sample_digest

Values = Mapping[str, int | str]

_MAX_VALUES = 256
_MAX_CHARACTERS = 200
_DEPTH = 3


def plain_values(dataset: Any) -> dict[str, int | str]:
    """Return the integers and short strings among the attributes of a data set, and of those that it holds, by path.

    Floats are left out: they are more often a clock than a position. Values set by ``set_epoch`` are left out, too.
    """
    values: dict[str, int | str] = {}
    if library_of(dataset) is not None:  # its epochs are saved
        return values
    for name, value in _walk(dataset, "", _DEPTH):
        if len(values) == _MAX_VALUES:
            break
        values[name] = value
    return values


def changed(before: Values, now: Values) -> dict[str, int | str]:
    """Return the values in `now` that `before` lacks or holds differently."""
    return {name: value for name, value in now.items() if name not in before or before[name] != value}


def differences(expected: Values, found: Values) -> list[str]:
    """Return a text for each value that differs, with both values."""
    names = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]
    return [f"{name} ({_said(expected, name)} then, {_said(found, name)} now)" for name in names]


def _said(values: Values, name: str) -> str:
    return repr(values[name]) if name in values else "as at first"


def _walk(owner: Any, prefix: str, depth: int) -> Iterator[tuple[str, int | str]]:
    is_told = callable(getattr(owner, "set_epoch", None))
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if is_told and name == "epoch":
            continue
        if type(value) in (int, bool) or (type(value) is str and len(value) <= _MAX_CHARACTERS):
            yield f"{prefix}{name}", value
        elif isinstance(value, (Dataset, Sampler)) and depth:
            yield from _walk(value, f"{prefix}{name}.", depth - 1)
        elif isinstance(value, (list, tuple)) and depth:
            for i, item in enumerate(value[:_MAX_VALUES]):
                if isinstance(item, (Dataset, Sampler)):
                    yield from _walk(item, f"{prefix}{name}[{i}].", depth - 1)


class DrawnAgain:
    """Counts samples that are drawn again.

    Args:
        samples: The iterator. `iter` is not called on it: a data set that is its own iterator would begin again.
    """

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples
        self.num_drawn, self.digest = 0, 0

    def draw_up_to(self, number: int) -> None:
        """Draw samples until this number is reached, or no more come."""
        while self.num_drawn < number:
            try:
                sample = next(self._samples)
            except StopIteration:
                return
            self.digest = sample_digest(sample, self.digest)
            self.num_drawn += 1
