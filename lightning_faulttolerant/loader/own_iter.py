"""What a user's ``DataLoader`` class does in its own ``__iter__``.

If it visibly does the same with each batch, whatever came before, a resume may begin in the middle of the torch
loader's batches. Anything else (a thread that reads ahead, a count, a persistent iterator) is followed by its batches.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import Any

from torch.utils.data import DataLoader


@functools.cache
def takes_each_batch_alone(user_class: type[DataLoader[Any]]) -> bool:
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
