"""What is in a saved object state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_faulttolerant.state.objects.graph import is_at

NODES, TABLE, LOST = "nodes", "table", "lost"
STATE, CONTENT = "<state>", "<content>"
"""Parts of an object, beside the names of its attributes."""


def parts_of(content: Mapping[str, Any]) -> set[str]:
    """Return the parts of an object that a state has."""
    names = {name for name, _ in content.get("attributes", ())} | set(content.get("gone", ()))
    return names | {part for part in (STATE, CONTENT) if part in content}


def path_of_part(path: str, part: str) -> str:
    """Return the path of a part of an object."""
    return path if part in (STATE, CONTENT) else f"{path}.{part}"


def owners_in(nodes: Mapping[str, Any]) -> frozenset[str]:
    """Return the paths of the objects that are carried by their own ``state_dict``."""
    return frozenset(path for path, content in nodes.items() if STATE in content)


def is_within(path: str, owners: Collection[str]) -> bool:
    """Return whether a path is that of one of these objects, or of a part of it."""
    return any(is_at(path, owner) for owner in owners)


def without_parts(nodes: Mapping[str, Any], parts: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Return the nodes of a state without these parts of them."""
    found = {}
    for path, content in nodes.items():
        names = parts.get(path, ())
        kept = {name: one for name, one in content.items() if name not in names}
        found[path] = {**kept, "attributes": [one for one in content.get("attributes", ()) if one[0] not in names]}
    return found


def filled_in(state: Mapping[str, Any]) -> list[str]:
    """Return the paths of the containers and tensors whose contents a state, if it isn't empty, holds."""
    return [path for path, content in state.get(NODES, {}).items() if CONTENT in content]


def names_in(state: Mapping[str, Any]) -> set[str]:
    """Return the paths of the attributes and objects in a state."""
    found = set()
    for path, content in state[NODES].items():
        found |= {path_of_part(path, part) for part in parts_of(content)}
    return found


def contents_of(state: Mapping[str, Any]) -> dict[str, object]:
    """Return the content of a state by the paths of `names_in`, each with the new objects that it refers to.

    The same contents are equal in all states, however their tables are arranged.
    """
    found: dict[str, object] = {}
    owners = owners_in(state[NODES])
    for path, content in state[NODES].items():
        if is_within(path, owners):  # what its own `load_state_dict` makes of it may be no state
            found.update({path: content[STATE]} if STATE in content else {})
            continue
        found.update({path: content[CONTENT]} if CONTENT in content else {})
        found.update((f"{path}.{name}", encoded) for name, encoded in content.get("attributes", ()))
        found.update((f"{path}.{name}", STATE) for name in content.get("gone", ()))
    return {path: _with_rows(encoded, state[TABLE]) for path, encoded in found.items()}


def _with_rows(encoded: object, table: Sequence[object]) -> list[object]:
    """Return an encoded value, and the rows of the table that it refers to, with numbers in the order of their use."""
    numbers: dict[int, int] = {}
    queue = [encoded]

    def numbered(value: object) -> object:
        if not isinstance(value, (list, tuple)):
            return value
        kind, number = value if len(value) == 2 else (None, None)
        if kind == "new" and type(number) is int and number < len(table):
            if number not in numbers:
                numbers[number] = len(queue)
                queue.append(table[number])
            return [kind, numbers[number]]
        return value if kind == "plain" else list(map(numbered, value))

    return [numbered(value) for value in queue]
