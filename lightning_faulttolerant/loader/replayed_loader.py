"""A loader that is not a ``DataLoader`` and has no state: any iterable, resumed by a replay.

A user's ``DataLoader`` class may have its own ``__iter__``. If that visibly does the same with each batch, whatever
came before, a resume may begin in the middle of the torch loader's batches. Anything else (a thread that reads ahead, a
count, a persistent iterator) is followed by its batches.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_faulttolerant.loader.exactness import Exactness, why_not_drawn_again
from lightning_faulttolerant.loader.iteration import IterationOwner
from lightning_faulttolerant.loader.objects import torch_loaders_in
from lightning_faulttolerant.loader.replayer import ReplayedIteration, Replayer
from lightning_faulttolerant.loader.stateful_loader import WholeLoader
from lightning_faulttolerant.loader.tracked_class import REPLAYED, class_of, is_resumable, keeps_own_position, swap
from lightning_faulttolerant.state.generators import HeldGenerators


@functools.cache
def takes_each_batch_alone(user_class: type[DataLoader[object]]) -> bool:
    """Return whether the batches of a class are torch's, each changed on its own or not at all."""
    for base in user_class.__mro__:
        if base is DataLoader:
            return True
        if "__iter__" in vars(base) and not _is_simple(vars(base)["__iter__"]):
            return False
    return False


def _is_simple(function: Any) -> bool:
    try:
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return False
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return False
    statements = [one for one in definition.body if not _is_text(one)]
    if len(statements) != 1:
        return False
    [statement] = statements
    if isinstance(statement, ast.Return):
        return _is_torchs(statement.value)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.YieldFrom):
        return _is_torchs(statement.value.value)
    if not isinstance(statement, ast.For) or statement.orelse or not _is_torchs(statement.iter):
        return False
    return _forgets(definition, statement)


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _is_torchs(value: ast.expr | None) -> bool:
    """Return whether an expression is ``super().__iter__()``."""
    match value:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[]), attr="__iter__"), args=[]):
            return True
    return False


def _forgets(definition: ast.FunctionDef, loop: ast.For) -> bool:
    """Return whether nothing that a loop does with a batch depends on earlier batches, with one yield at the end."""
    nodes = [node for statement in loop.body for node in ast.walk(statement)]
    yields = [node for node in nodes if isinstance(node, (ast.Yield, ast.YieldFrom))]
    last = loop.body[-1]
    is_yielded_last = isinstance(last, ast.Expr) and isinstance(last.value, ast.Yield) and yields == [last.value]
    if not is_yielded_last or any(isinstance(node, _UNCLEAR) for node in nodes):
        return False
    # It may only read settings from itself: a method, or any callable, may count.
    names = {argument.arg for argument in definition.args.args}
    if any(isinstance(node, ast.Call) and _may_count(node, names) for node in nodes):
        return False
    if any(_keeps(node, names) for node in nodes):
        return False
    stored, set_before = _names_of(loop, ast.Store), _names_of(loop.target, ast.Store)
    for statement in loop.body:
        read = {
            node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        if read & stored - set_before or not isinstance(statement, (ast.Assign, ast.Expr)):
            return False
        set_before |= _names_of(statement, ast.Store)
    return True


_UNCLEAR = (
    ast.Global, ast.Nonlocal, ast.NamedExpr, ast.AugAssign, ast.Lambda, ast.FunctionDef, ast.ClassDef, ast.Await,
    ast.Break, ast.Continue, ast.Return, ast.Delete, ast.With, ast.Try,
)  # fmt: skip


def _may_count(call: ast.Call, names: set[str]) -> bool:
    """Return whether a call is on something that `names` hold, or takes its next item."""
    takes_next = isinstance(call.func, ast.Name) and call.func.id == "next"
    parts = [call.func, *(call.args if takes_next else [])]
    return any(_names_of(part, ast.Load) & names for part in parts)


def _keeps(node: ast.AST, names: set[str]) -> bool:
    """Return whether it stores something that outlives the batch, in an attribute or in an item of `names`."""
    is_place = isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store)
    return is_place and (isinstance(node, ast.Attribute) or bool(_names_of(node, ast.Load) & names))


def _names_of(node: ast.AST, context: type[ast.expr_context]) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, context)}


def is_replayed(loader: object) -> bool:
    """Return whether `loader` is followed by its batches: it is not torch's, or its class does more with them."""
    if not isinstance(loader, DataLoader):
        return True
    return not (is_resumable(loader) or keeps_own_position(loader) or takes_each_batch_alone(type(loader)))  # type: ignore[arg-type]  # mypy says it is not Hashable


def why_not_replayed(loader: object) -> str | None:
    """Return why `loader` can't be drawn from again, or ``None`` if it can, as far as that is known in advance."""
    for name, inner in torch_loaders_in(loader).items():
        reason = why_not_drawn_again(inner)
        if reason is not None:
            return reason if inner is loader else f"it takes its batches from {name}, and {reason}"
    return None


class ReplayedLoader(WholeLoader):
    """Follows any iterable through its iterations.

    Args:
        loader: The user's loader.
        exactness: Collects what is not exact.
        owner: Says which iterations are followed.
        place: Which of the trainer's loaders it is.
        older: The objects that follow the fit's other loaders, created before.
    """

    def __init__(
        self,
        loader: Any,
        *,
        exactness: Exactness,
        owner: IterationOwner,
        place: str,
        older: Iterable[WholeLoader] = (),
    ) -> None:
        super().__init__(loader, owner=owner, place=place)
        kind: Any = type(loader)
        self._user_class = kind.__base__ if hasattr(kind, REPLAYED) else kind
        self._is_swapped = False
        others = [one.replayer for one in older if isinstance(one, ReplayedLoader)]
        name = f"loader {place} ({self._user_class.__name__})"
        self.replayer: Replayer = Replayer(loader, name=name, exactness=exactness, older=others)

    @property
    def iteration(self) -> ReplayedIteration | None:
        """The latest iteration."""
        return self.replayer.iteration

    @property
    def held(self) -> HeldGenerators:
        """The generators that the loader holds."""
        return self.replayer.held

    def follow(self) -> None:
        """Observe the loader's iterations. Until `leave`, its class is one derived from its own.

        If its class doesn't allow that, or it is already followed in another place, `followed` stands in for it.
        """
        is_plain = isinstance(self.loader, torch.Tensor) or not hasattr(self._user_class, "__iter__")
        if not (is_plain or hasattr(type(self.loader), REPLAYED)):
            try:
                swap(self.loader, class_of(self._user_class, self.iterate, **{REPLAYED: True}))
            except TypeError:  # one of Python's classes, or a class that can't be derived from
                pass
            else:
                self._is_swapped = True
                return
        kind = _SizedStandIn if hasattr(self._user_class, "__len__") else _StandIn
        self.followed = kind(self.loader, self.iterate, self._make_iterator)

    def leave(self) -> None:
        """Restore the loader's own class."""
        if self._is_swapped:
            swap(self.loader, self._user_class)
            self._is_swapped = False

    def _make_iterator(self) -> Iterator[object]:
        own = getattr(self._user_class, "__iter__", None)
        made: Iterator[object] = iter(self.loader) if own is None else own(self.loader)
        return made

    def _begun(self, make_iterator: Callable[[], Iterator[object]]) -> Iterator[object]:
        return self.replayer.iterate(make_iterator)

    def state_dict(self, consumed: int | None, iteration: ReplayedIteration | None = None) -> dict[str, object]:
        """Return the position, as `Replayer.state_dict` does."""
        return self.replayer.state_dict(consumed, iteration)

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Bring the loader to a position of `state_dict`."""
        self.replayer.load_state_dict(state_dict, self._make_iterator)

    def replayed(self) -> list[object]:
        """Return the loader, and the iterators and similar objects in it, which a replay creates again."""
        return [self.loader, *self.replayer.live()]


class _StandIn:
    """Stands in for a loader whose class can't be derived from, such as a generator."""

    def __init__(
        self,
        loader: Any,
        iterate: Callable[[Callable[[], Iterator[object]]], Iterator[object]],
        make_iterator: Callable[[], Iterator[object]],
    ) -> None:
        self.user_loader = loader
        self._iterate = iterate
        self._make_iterator = make_iterator

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "user_loader":
            raise AttributeError(name)
        return getattr(self.user_loader, name)

    def __iter__(self) -> Iterator[object]:
        return self._iterate(self._make_iterator)


class _SizedStandIn(_StandIn):
    def __len__(self) -> int:
        return len(self.user_loader)


def user_loader_of(loader: Any) -> Any:
    """Return the loader that `loader` stands in for, or `loader` itself."""
    return loader.user_loader if isinstance(loader, _StandIn) else loader
