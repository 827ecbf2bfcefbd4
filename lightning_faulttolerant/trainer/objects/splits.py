"""The splits that a script draws before `fit`: a resume restores those of the first start, all parts together.

The parts are the `Subset` and `SubsetRandomSampler` objects of the process. A loader's place or an attribute identifies
a part that training reaches; its size identifies any other one, such as a test set that only the script holds.
"""

from __future__ import annotations

import contextlib
import gc
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, SubsetRandomSampler

from lightning_faulttolerant.state.objects import kinds
from lightning_faulttolerant.state.objects.decoding import set_attribute
from lightning_faulttolerant.state.reachable import path_name, walk
from lightning_faulttolerant.trainer.log import tell
from lightning_faulttolerant.trainer.run.changes import NamedDifference
from lightning_faulttolerant.trainer.run.fingerprint import digest_list

_CLASSES = (Subset, SubsetRandomSampler)
_INDICES = "indices"
_LEVEL = 1
_MAX_SEED = 2**32  # seeds of users are smaller, as NumPy and Lightning require; torch's own are not
_MAX_TOLD = 3

_Pair = tuple["_Part", "_Part"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Part:
    """One part, as it was before training.

    Args:
        of: The class of the part, and the class and length of its data set: parts of the same are restored together.
        path: The path by which training reaches it; empty if only the script holds it.
        indices: A copy of its indices.
        owner: The `Subset` or the sampler; ``None`` in a saved state.
    """

    of: str
    path: str
    indices: Tensor
    owner: object = None

    @property
    def key(self) -> str | int:
        """What identifies the part among those of one data set."""
        return self.path or len(self.indices)

    @property
    def name(self) -> str:
        return self.path or f"{self.of} with {len(self.indices)} indices"

    @property
    def is_sorted(self) -> bool:
        return bool((self.indices[1:] >= self.indices[:-1]).all())

    def put(self, indices: Tensor) -> None:
        """Replace the indices, in place if possible: the script may hold the same list."""
        held: Any = kinds.attributes(self.owner)[_INDICES]
        values = indices if isinstance(held, Tensor) else indices.tolist()
        if isinstance(held, (tuple, range)):
            set_attribute(self.owner, _INDICES, tuple(values))
            return
        if kinds.is_array(held) and not held.flags.writeable:
            held = held.copy()
            set_attribute(self.owner, _INDICES, held)
        held[:] = values


class Splits:
    """Keeps the indices of all parts, and restores them in later starts.

    Args:
        roots: The objects that training reaches, by name; ``None`` to leave all parts alone.
    """

    def __init__(self, roots: Mapping[str, object] | None) -> None:
        self._parts: list[_Part] = []
        if roots is None:
            return
        reached = walk(deque(((("item", name),), root) for name, root in roots.items()))
        paths = {id(value): path_name(path) for path, value in reached if issubclass(type(value), _CLASSES)}
        found = [_part(owner, paths.get(id(owner), "")) for owner in _living()]
        self._parts = sorted((part for part in found if part is not None), key=lambda part: (not part.path, part.path))

    def tell(self) -> None:
        """Report the parts of training that may have been drawn without a seed, at the first start of a run."""
        drawn = [part.path for part in self._parts if part.path and not part.is_sorted]
        if not drawn or torch.initial_seed() < _MAX_SEED or os.environ.get("PL_GLOBAL_SEED"):
            return
        more = f" and {len(drawn) - _MAX_TOLD} more" if len(drawn) > _MAX_TOLD else ""
        tell(
            f"No seed is set, and {', '.join(drawn[:_MAX_TOLD])}{more} may have been drawn at random. A resumed run "
            "gets these indices back. To draw the same at each start, call seed_everything first."
        )

    def state_dict(self) -> list[dict[str, object]]:
        """Return the indices of all parts; empty if none was drawn."""
        parts = [] if all(part.is_sorted for part in self._parts) else self._parts
        return [{"of": part.of, "path": part.path, _INDICES: _packed(part.indices)} for part in parts]

    def put_back(self, saved: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[NamedDifference]]:
        """Restore the indices of the first start, for each data set whose parts are known.

        Args:
            saved: A `state_dict` of the first start.

        Returns:
            A note for each part that was restored, and each part of training that differs.
        """
        then = [_Part(of=one["of"], path=one["path"], indices=_unpacked(one[_INDICES])) for one in saved]
        notes, differences = list[str](), list[NamedDifference]()
        for of in dict.fromkeys(part.of for part in then):
            pairs = _pairs(self._parts, then, of)
            restored = _restorable(pairs)
            for part, other in pairs:
                if part.indices.equal(other.indices):
                    continue
                if (part, other) in restored:
                    part.put(other.indices)
                    self._parts[self._parts.index(part)] = replace(part, indices=other.indices)
                    notes.append(f"{part.name}: restored to what the first start drew")
                elif part.path:
                    now, before = digest_list(part.indices.tolist()), digest_list(other.indices.tolist())
                    differences.append(NamedDifference.of(f"{part.path}.{_INDICES}", repr(before), repr(now)))
        return notes, differences


def _pairs(here: Sequence[_Part], then: Sequence[_Part], of: str) -> list[_Pair]:
    """Return the parts of one data set, each with its saved counterpart, if that is the only one."""
    now, before = ([part for part in parts if part.of == of] for parts in (here, then))
    keys, others = [part.key for part in now], [part.key for part in before]
    return [
        (part, before[others.index(part.key)])
        for part in now
        if keys.count(part.key) == 1 and others.count(part.key) == 1
    ]


def _restorable(pairs: list[_Pair]) -> list[_Pair]:
    """Return the pairs that can be restored together: both of their starts hold the same samples.

    Parts of an earlier fit need not be among them, so the parts of training may suffice.
    """
    for some in (pairs, [pair for pair in pairs if pair[0].path]):
        sides = [torch.cat([one.indices for one in side]).sort().values for side in zip(*some, strict=True)]
        if sides and sides[0].equal(sides[1]):
            return some
    return []


def _living() -> Iterator[object]:
    """Yield all parts that exist in this process, without calling code of any other object."""
    classes: list[type] = list(_CLASSES)
    for kind in classes:
        classes += type.__subclasses__(kind)
    wanted = set(map(id, classes))
    yield from [value for value in gc.get_objects() if id(type(value)) in wanted]


def _part(owner: Any, path: str) -> _Part | None:
    """Return what is known of a part; ``None`` if it is empty, or its indices are not integers in a plain container."""
    own = kinds.attributes(owner)  # a property of a subclass may read a file
    indices: Any = own.get(_INDICES)
    dataset = own.get("dataset")
    length = None
    with contextlib.suppress(Exception):  # any class may raise anything
        length = None if isinstance(dataset, IterableDataset) else len(dataset)  # type: ignore[arg-type]
    with contextlib.suppress(Exception):
        values: Any = indices.tolist() if isinstance(indices, Tensor) or kinds.is_array(indices) else indices
        found = torch.tensor(list(values) if type(values) in (list, tuple, range) else 0.0)
        if found.dim() == 1 and not found.is_floating_point():
            of = f"{type(owner).__qualname__} of {type(dataset).__qualname__} [{length}]"
            return _Part(of=of, path=path, indices=found.long(), owner=owner)
    return None


def _packed(indices: Tensor) -> bytes:
    return zlib.compress(indices.numpy().tobytes(), _LEVEL)


def _unpacked(packed: bytes) -> Tensor:
    data = bytearray(zlib.decompress(packed))
    return torch.frombuffer(data, dtype=torch.int64) if data else torch.zeros(0, dtype=torch.int64)


_OF_LOADERS = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")


def parts_of_loaders(loaders: Mapping[str, object]) -> dict[str, object]:
    """Return the parts of the loaders, by place and name."""
    found = {}
    for place, loader in loaders.items():
        if isinstance(loader, torch.utils.data.DataLoader):
            found.update({f"{place}.{name}": getattr(loader, name, None) for name in _OF_LOADERS})
    return found
