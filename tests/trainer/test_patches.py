"""Replacements on single objects affect only those objects, and leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_faulttolerant.trainer.patches import Patches


class Owner:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def act(self) -> str:
        return "original"


def around(name: str) -> Any:
    """Return a wrapper that adds `name` to the result of the original."""
    return lambda original: lambda: f"{name}({original()})"


def test_patches_are_on_the_object_only_and_leave_nothing() -> None:
    """A replacement affects that object alone; after the undo, nothing of it is left in the object's variables."""
    owner, other = Owner(), Owner()
    before = dict(vars(owner))
    patches = Patches()
    patches.wrap(owner, "act", around("a"))
    patches.wrap(owner, "act", around("b"))
    assert (owner.act(), other.act()) == ("b(a(original))", "original")
    patches.undo()
    assert vars(owner) == before
    assert owner.act() == "original"
    assert vars(Owner)["act"](owner) == "original"


def test_patch_over_somebody_elses_gives_theirs_back() -> None:
    """If the object already had another replacement, that one is restored."""
    owner = Owner()
    theirs = around("theirs")(owner.act)
    owner.act = theirs  # type: ignore[method-assign]
    patches = Patches()
    patches.wrap(owner, "act", around("ours"))
    assert owner.act() == "ours(theirs(original))"
    patches.undo()
    assert vars(owner)["act"] is theirs


def test_undo_twice_is_harmless() -> None:
    """A second undo changes nothing; a replacement that was set in between stays."""
    owner, patches = Owner(), Patches()
    patches.wrap(owner, "act", around("a"))
    patches.undo()
    owner.act = lambda: "since"  # type: ignore[method-assign]
    patches.undo()
    assert owner.act() == "since"


def test_wrapper_takes_the_original_and_its_arguments() -> None:
    """The wrapper gets the method that was there, whether ours or the object's own, and what it is called with."""
    owner, patches = Owner(), Patches()
    owner.add = lambda first, second=0: first + second  # type: ignore[attr-defined]
    patches.around(owner, "add", lambda add, first, **kwargs: 10 * add(first, **kwargs))
    patches.around(owner, "add", lambda add, *args, **kwargs: -add(*args, **kwargs))
    assert owner.add(1, second=2) == -30  # type: ignore[attr-defined]
    patches.undo()
    assert owner.add(1, second=2) == 3  # type: ignore[attr-defined]


def test_an_error_leaves_no_other_patch_behind() -> None:
    """If one replacement can't be undone, all others are, and the error is raised."""
    owner, other, patches = Owner(), Owner(), Patches()
    for each, name in ((owner, "first"), (other, "second"), (owner, "third")):
        patches.wrap(each, "act", around(name))
    del other.act  # type: ignore[method-assign] # the user's code has put it back
    with pytest.raises(AttributeError):
        patches.undo()
    assert (owner.act(), "act" in vars(owner)) == ("original", False)
