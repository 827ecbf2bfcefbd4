"""Deals rows to groups, by a seed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable

from tests.laws.rows import Group, Row, all_rows, fits

SEED = 41
"""The groups of `make test` and of the CI. The night has one of its own: ``LAWS_SEED``."""

LARGEST = 9


def seed() -> int:
    """Return the seed of this run."""
    return int(os.environ.get("LAWS_SEED", SEED))


def is_night() -> bool:
    """Return whether the night has chosen the seed."""
    return "LAWS_SEED" in os.environ


def deal(rows: Iterable[Row], *, largest: int = LARGEST, by_part: bool = False) -> list[Group]:
    """Return groups, so that each row is in one.

    A row comes when its name and the seed decide, so that a new row moves few others. With `by_part`, rows of one part
    of the state come together if they can.
    """
    groups: list[list[Row]] = []
    for each in sorted(rows, key=lambda each: hashlib.sha256(f"{seed()} {each.name}".encode()).hexdigest()):
        places = [group for group in groups if len(group) < largest and fits(each, group)]
        if places:
            apart = {id(group): by_part and each.part not in {other.part for other in group} for group in places}
            min(places, key=lambda group: (apart[id(group)], len(group))).append(each)
        else:
            groups.append([each])
    return [Group(rows=tuple(group)) for group in groups]


def groups_of(
    wanted: Callable[[Row], bool] = lambda _: True, *, largest: int = LARGEST, by_part: bool = False
) -> list[Group]:
    """Return the groups of all rows that are wanted."""
    return deal([each for each in all_rows().values() if wanted(each)], largest=largest, by_part=by_part)


def guilty(group: Group, law: Callable[[Group], None]) -> tuple[Group, Exception]:
    """Return the smallest part of a group that breaks a law, by halving, and how it does."""
    while True:
        rows = group.rows
        middle = len(rows) // 2
        for half in (rows[:middle], rows[middle:]):
            if half and half != rows:
                try:
                    law(Group(rows=half))
                except Exception as error:  # noqa: BLE001 - whatever breaks it
                    group, broken = Group(rows=half), error
                    break
        else:
            break
        if len(group.rows) == 1:
            return group, broken
    try:
        law(group)
    except Exception as error:  # noqa: BLE001 - whatever breaks it
        return group, error
    raise AssertionError(f"{group} broke a law, but obeys it now: the failure depends on chance.")


def check(group: Group, law: Callable[[Group], None]) -> None:
    """Check a law on a group. If it is broken, the error names the rows that break it."""
    try:
        law(group)
    except Exception as error:
        if len(group.rows) == 1:
            raise
        rows, cause = guilty(group, law)
        raise AssertionError(f"The rows {rows} break the law (in the group {group}).\n{cause}") from error
