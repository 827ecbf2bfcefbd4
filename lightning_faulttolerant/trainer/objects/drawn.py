"""What the script drew before `fit`. Without a seed, each start draws another split or order: the first one is kept."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_faulttolerant.state import orders
from lightning_faulttolerant.state.objects.graph import is_at
from lightning_faulttolerant.state.objects.walk import Rules
from lightning_faulttolerant.state.orders import elements_of, is_sorted_by_name
from lightning_faulttolerant.state.splits import DrawnContents, Parts, contents_of, may_be_samples
from lightning_faulttolerant.trainer.log import tell

_DIGESTS, _NUMBERS, _ORDERS, _PARTS = "digests", "numbers", "orders", "parts"
_OF_LOADERS = ("dataset", "sampler", "batch_sampler", "collate_fn", "worker_init_fn")
_MAX_SEED = 2**32  # seeds of users are smaller, as NumPy and Lightning require; torch's own are not
_MAX_TOLD = 3
SEED_THEM = (
    "Without a seed, a script draws differently at each start. Call seed_everything before the draw, or pass "
    "random_split a generator with a seed."
)
"""The advice if a start drew something else."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnOutcome:
    """The outcome of restoring the values that were drawn.

    Args:
        notes: A line for each value that was restored, and for each that differs but was not drawn.
        differences: A line for each value that is not as it was, with both values.
    """

    notes: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


class Drawn:
    """Keeps the values that were drawn before the first start, and restores them in later starts.

    Args:
        rules: Returns the rules for what to leave out of the objects.
    """

    def __init__(self, rules: Callable[[], Rules]) -> None:
        self._rules = rules
        self._contents = DrawnContents(lists={}, numbers={}, parts={}, datasets={})
        self._orders: dict[str, tuple[str, object]] = {}
        self._parts = Parts()
        self._loaders: set[str] = set()
        self._module: object = None
        self._saved: Mapping[str, Any] = {}
        self._restored: Collection[str] = ()
        self._take_late: Callable[[DrawnOutcome], None] = lambda outcome: None

    def note(self, roots: Mapping[str, object], *, of_loader: bool) -> None:
        """Note the contents of objects before training changes them. Restore those of a loader that is set up late.

        Args:
            roots: The objects to start from, by name.
            of_loader: Whether they are the parts of a loader. Contents of a loader that can't be restored are refused.
        """
        is_late = of_loader and bool(self._saved) and not roots.keys() <= self._loaders
        self._module = roots.get("module", self._module)
        if of_loader:
            self._loaders.update(roots)
        found = contents_of(roots, self._rules())
        self._contents.numbers.update(found.numbers)
        self._contents.datasets.update(found.datasets)
        known = {id(one.value): self._orders[path] for path, one in self._contents.lists.items()}
        # Lists that could be reached before were restored before, and training may have changed them since.
        new = {path for path, one in found.lists.items() if id(one.value) not in known}
        new |= {path for path, part in found.parts.items() if not self._parts.has(part)}
        for path, content in found.lists.items():
            digest, order = known.get(id(content.value), self._orders.get(path, ("", None)))
            if digest != content.digest:
                order = orders.kept_order(content.value)
            known[id(content.value)] = self._orders[path] = (content.digest, order)
        self._contents.lists.update(found.lists)
        self._parts.note(found.parts)
        # Loaders that are created again in each epoch draw again in training, as in the uninterrupted run.
        if is_late and not _makes_loaders_again(self._module):
            self._take_late(self._compare(new))

    def tell(self) -> None:
        """Report values that may have been drawn without a seed, at the first start of a run."""
        if torch.initial_seed() >= _MAX_SEED and not os.environ.get("PL_GLOBAL_SEED"):  # nobody has set a seed
            lists = self._contents.lists
            kept = [path for path in self._kept_orders() if _is_users(path) and self._may_be_samples(path)]
            _tell_of([*self._parts.drawn, *(path for path in kept if _is_permuted(lists[path].value))])

    def state_dict(self) -> dict[str, object]:
        """Return the noted contents."""
        return {
            _DIGESTS: {**self._digests(), **self._parts.digests},
            _NUMBERS: dict(self._contents.numbers),
            _ORDERS: self._kept_orders(),
            _PARTS: self._parts.state_dict(),
        }

    def put_back(
        self, saved: Mapping[str, Any], take_late: Callable[[DrawnOutcome], None], *, restored: Collection[str] = ()
    ) -> DrawnOutcome:
        """Restore what the objects of the first start held, if those of this start hold the same elements.

        Args:
            saved: A `state_dict` of the first start.
            take_late: Receives the outcome for each loader that is set up later.
            restored: The paths of containers that training fed: the object state restores their contents.
        """
        self._saved, self._take_late, self._restored = saved, take_late, restored
        return self._compare(saved[_DIGESTS].keys()) if saved else DrawnOutcome()

    def _compare(self, paths: Collection[str]) -> DrawnOutcome:
        saved = self._saved
        digests = {path: digest for path, digest in saved[_DIGESTS].items() if path in paths}
        now = {**self._digests(), **self._parts.digests}
        split, failed = self._parts.put_back(saved[_PARTS], digests)
        ordered, others = self._put_in_order(digests, saved[_ORDERS])
        lists = self._contents.lists
        fed = {id(lists[path].value) for path in self._restored if path in lists}
        others = [path for path in others if id(lists[path].value) not in fed]
        done = [*split, *ordered]
        of_loaders = [path for path in others if _is_below(path, self._loaders)]
        refused = others if done else [path for path in of_loaders if self._may_be_samples(path)]
        lines = [_line(path, digests[path], now[path]) for path in refused]
        lines += [f"{_line(path, digests[path], now[path])}; {reason}" for path, reason in failed.items()]
        if done:
            numbers = self._contents.numbers
            lines += [
                f"{_line(path, text, numbers[path])}; it may depend on values that were drawn without a seed"
                for path, text in saved[_NUMBERS].items()
                if numbers.get(path, text) != text
            ]
        notes = [f"{path}: {_OF_FIRST}" for path in done]
        notes += [f"{_line(p, digests[p], now[p])}{_NO_SAMPLES}" for p in of_loaders if p not in refused]
        return DrawnOutcome(notes=notes, differences=lines)

    def _may_be_samples(self, path: str) -> bool:
        """Return whether a list may hold the samples of the data sets next to it, or a value for each sample."""
        place = path.partition(".")[0]
        datasets = self._contents.datasets
        near = [dataset for other, dataset in datasets.items() if is_at(other, place)] or list(datasets.values())
        return may_be_samples(self._contents.lists[path].value, near)

    def covers(self, saved: Mapping[str, Any], line: str) -> bool:
        """Return whether `put_back` also checks the difference of two fingerprints that `line` reports."""
        path = _PART_OF_CONCAT.sub(r".datasets[\1]", line.partition(": ")[0])
        digests = saved.get(_DIGESTS, {})
        is_part = path.endswith(_INDICES) and path.removesuffix(_INDICES) in digests.keys() & self._parts.digests.keys()
        return is_part or path in digests.keys() & self._contents.lists.keys()

    def _digests(self) -> dict[str, str]:
        return {path: content.digest for path, content in self._contents.lists.items()}

    def _kept_orders(self) -> dict[str, object]:
        return {path: order for path, (_, order) in self._orders.items() if order is not None}

    def _put_in_order(self, digests: Mapping[str, str], saved_orders: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the paths of the lists that are in their saved order again, and of those with other elements."""
        done, others = [], []
        for path, content in self._contents.lists.items():
            digest = digests.get(path, content.digest)
            if digest == content.digest:
                continue
            kept = saved_orders.get(path)
            elements = None if kept is None else orders.in_order(content.value, kept)
            if elements is None:
                others.append(path)
                continue
            content.set(elements)
            self._contents.lists[path] = replace(content, digest=digest)
            self._orders[path] = (digest, kept)
            done.append(path)
        return done, others


_OF_FIRST = "restored to what the first start drew"
_NO_SAMPLES = "; it differs from the first start, but is too short to hold the samples"
_INDICES = ".indices"
_PART_OF_CONCAT = re.compile(r"\.parts\.(\d+)")


def parts_of_loaders(loaders: Mapping[str, object]) -> dict[str, object]:
    """Return the parts of the loaders, by place and name."""
    found = {}
    for place, loader in loaders.items():
        if isinstance(loader, torch.utils.data.DataLoader):
            found.update({f"{place}.{name}": getattr(loader, name, None) for name in _OF_LOADERS})
    return found


def _line(path: str, saved: object, now: object) -> str:
    return f"{path}: {saved!r} when it was saved, {now!r} now"


def _is_users(path: str) -> bool:
    """Return whether an attribute is the user's. In others Lightning keeps how a loader or a sampler was created."""
    return not path.rpartition(".")[2].startswith("__pl_")


def _is_below(path: str, roots: Collection[str]) -> bool:
    return any(is_at(path, root) for root in roots)


def _makes_loaders_again(module: Any) -> bool:
    """Return whether the trainer of a module requests loaders again in later epochs."""
    with contextlib.suppress(AttributeError, RuntimeError):  # it has no trainer
        return bool(module.trainer.reload_dataloaders_every_n_epochs)
    return False


def _is_permuted(value: object) -> bool:
    """Return whether a value looks shuffled: it may hold names or numbers of samples, and no element occurs twice.

    Labels occur twice. Sentences are in the order in which they were read, and so are names that a program listed.
    """
    elements = list(value.values()) if isinstance(value, dict) else elements_of(value)
    if is_sorted_by_name(list(value) if isinstance(value, dict) else elements):
        return False
    texts = {str(element) for element in elements}
    is_text = any(isinstance(element, float) or (isinstance(element, str) and " " in element) for element in elements)
    return len(texts) == len(elements) and not is_text


def _tell_of(drawn: list[str]) -> None:
    if not drawn:
        return
    more = f" and {len(drawn) - _MAX_TOLD} more" if len(drawn) > _MAX_TOLD else ""
    tell(
        f"No seed is set, and {', '.join(drawn[:_MAX_TOLD])}{more} may have been drawn at random. A resumed run gets "
        "the values of this start back. To draw the same at each start, call seed_everything first."
    )
