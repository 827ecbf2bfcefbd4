"""What the script drew before `fit`: without a seed each start draws another split or order; the first one's stands."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_faulttolerant.state.drawn import orders
from lightning_faulttolerant.state.drawn.contents import Contents, contents_of
from lightning_faulttolerant.state.drawn.splits import Parts
from lightning_faulttolerant.state.objects.graph import Rules, is_at
from lightning_faulttolerant.trainer.telling import tell

_DIGESTS, _NUMBERS, _ORDERS, _PARTS = "digests", "numbers", "orders", "parts"
_OF_LOADERS = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")
_MAX_SEED = 2**32  # users' seeds are smaller, NumPy and Lightning take no other; torch's own are not
_MAX_TOLD = 3
SEED_THEM = (
    "What a script draws before fit is the same in each start only with a seed: call seed_everything before it is"
    " drawn, or pass random_split a generator with a seed."
)
"""What to do where it is another one."""


class Drawn:
    """Keeps what was drawn before the first start, and puts it back in later ones.

    Args:
        rules: Returns what of the objects is left out.
    """

    def __init__(self, rules: Callable[[], Rules]) -> None:
        self._rules = rules
        self._contents = Contents(lists={}, numbers={}, parts={})
        self._orders: dict[str, tuple[str, Any]] = {}
        self._parts = Parts()
        self._loaders: set[str] = set()

    def note(self, roots: Mapping[str, Any], *, of_loader: bool) -> None:
        """Note what objects hold before training changes it.

        Args:
            roots: The objects to begin with, by name.
            of_loader: Whether a loader consists of them: what can't be put back there is refused.
        """
        if of_loader:
            self._loaders.update(roots)
        found = contents_of(roots, self._rules())
        self._contents.lists.update(found.lists)
        self._contents.numbers.update(found.numbers)
        for path, content in found.lists.items():
            if self._orders.get(path, ("", None))[0] != content.digest:
                self._orders[path] = (content.digest, orders.kept_order(content.value))
        self._parts.note(found.parts)

    def tell(self) -> None:
        """Say what may have been drawn without a seed, at the first start of a run."""
        if not _has_seed():
            lists = self._contents.lists
            permuted = [p for p, order in self._kept_orders().items() if order and _is_permuted(lists[p].value)]
            _tell_of([*self._parts.drawn, *permuted])

    def state_dict(self) -> dict[str, Any]:
        """Return what was noted."""
        return {
            _DIGESTS: {**self._digests(), **self._parts.digests},
            _NUMBERS: self._contents.numbers,
            _ORDERS: self._kept_orders(),
            _PARTS: self._parts.state_dict(),
        }

    def put_back(self, saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Give the objects of this start what those of the first one had, where they hold the same elements.

        Args:
            saved: A `state_dict` of the first start.

        Returns:
            A line for each thing that has it back, and one for each that has not, with both values.
        """
        if not saved:
            return [], []
        digests = saved[_DIGESTS]
        now = dict(self._parts.digests)
        split, failed = self._parts.put_back(saved[_PARTS], digests)
        ordered, others = self._put_in_order(saved)
        done = [*split, *ordered]
        refused = [path for path in others if done or any(is_at(path, root) for root in self._loaders)]
        lines = [_line(path, digests[path], self._contents.lists[path].digest) for path in refused]
        lines += [f"{_line(path, digests[path], now[path])}; {reason}" for path, reason in failed.items()]
        if done:
            numbers = self._contents.numbers
            lines += [
                f"{_line(path, text, numbers[path])}; it may come from what was drawn"
                for path, text in saved[_NUMBERS].items()
                if numbers.get(path, text) != text
            ]
        return [f"{path}: {_OF_FIRST}" for path in done], lines

    def covers(self, saved: Mapping[str, Any], line: str) -> bool:
        """Return whether a difference of two fingerprints is one that `put_back` looks at, too."""
        path = _PART_OF_CONCAT.sub(r".datasets[\1]", line.partition(": ")[0])
        digests = saved.get(_DIGESTS, {})
        is_part = path.endswith(_INDICES) and path.removesuffix(_INDICES) in digests.keys() & self._parts.digests.keys()
        return is_part or path in digests.keys() & self._contents.lists.keys()

    def _digests(self) -> dict[str, str]:
        return {path: content.digest for path, content in self._contents.lists.items()}

    def _kept_orders(self) -> dict[str, Any]:
        return {path: order for path, (_, order) in self._orders.items() if order is not None}

    def _put_in_order(self, saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the paths of what is in its order again, and of what holds other elements."""
        done, others = [], []
        for path, content in self._contents.lists.items():
            digest = saved[_DIGESTS].get(path, content.digest)
            if digest == content.digest:
                continue
            kept = saved[_ORDERS].get(path)
            elements = None if kept is None else orders.in_order(content.value, kept)
            if elements is None:
                others.append(path)
                continue
            content.set(elements)
            self._contents.lists[path] = replace(content, digest=digest)
            self._orders[path] = (digest, kept)
            done.append(path)
        return done, others


_OF_FIRST = "as the first start drew it"
_INDICES = ".indices"
_PART_OF_CONCAT = re.compile(r"\.parts\.(\d+)")


def parts_of_loaders(loaders: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the loaders consist of, by place and name."""
    found = {}
    for place, loader in loaders.items():
        if isinstance(loader, DataLoader):
            found.update({f"{place}.{name}": getattr(loader, name, None) for name in _OF_LOADERS})
    return found


def _line(path: str, saved: Any, now: Any) -> str:
    return f"{path}: {saved!r} when it was saved, {now!r} now"


def _has_seed() -> bool:
    return torch.initial_seed() < _MAX_SEED or bool(os.environ.get("PL_GLOBAL_SEED"))


def _is_permuted(value: Any) -> bool:
    """Return whether no element comes twice: labels do, names of files and numbers of samples do not."""
    elements = list(value.values()) if isinstance(value, dict) else list(value)
    texts = {str(element) for element in elements}
    return len(texts) == len(elements) and not any(isinstance(element, float) for element in elements)


def _tell_of(drawn: list[str]) -> None:
    if not drawn:
        return
    more = f" and {len(drawn) - _MAX_TOLD} more" if len(drawn) > _MAX_TOLD else ""
    tell(
        f"No seed is set, and {', '.join(drawn[:_MAX_TOLD])}{more} may have been drawn at random. A resumed run gets"
        " those of this start back. Call seed_everything before they are drawn, and each start draws the same."
    )
