"""Plain attributes that an iterable data set keeps from one iteration to the next: an epoch count, a position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch.utils.data import Dataset, Sampler

from lightning_faulttolerant.loader.foreign import library_of

Values = Mapping[str, int | str]

_MAX_VALUES = 256
_MAX_CHARACTERS = 200
_DEPTH = 3


def plain_values(dataset: object) -> dict[str, int | str]:
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


def _walk(owner: object, prefix: str, depth: int) -> Iterator[tuple[str, int | str]]:
    has_setter = callable(getattr(owner, "set_epoch", None))
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        if has_setter and name == "epoch":
            continue
        if type(value) in (int, bool) or (type(value) is str and len(value) <= _MAX_CHARACTERS):
            yield f"{prefix}{name}", value
        elif isinstance(value, (Dataset, Sampler)) and depth:
            yield from _walk(value, f"{prefix}{name}.", depth - 1)
        elif isinstance(value, (list, tuple)) and depth:
            for i, item in enumerate(value[:_MAX_VALUES]):
                if isinstance(item, (Dataset, Sampler)):
                    yield from _walk(item, f"{prefix}{name}[{i}].", depth - 1)


class ValuesOfDataset:
    """The plain values of a data set, compared with those of its beginning, and with those of an earlier process.

    Args:
        dataset: The user's data set.
    """

    def __init__(self, dataset: object) -> None:
        self._dataset = dataset
        self._fresh: Values = plain_values(dataset)
        self.expected: Values | None = None
        """What has changed in the earlier process, to be compared once."""

    def now(self) -> tuple[Values, list[str]]:
        """Return what has changed since the beginning, and a text for each value that is not as expected."""
        found = changed(self._fresh, plain_values(self._dataset))
        expected, self.expected = self.expected, None
        return found, [] if expected is None else differences(expected, found)
