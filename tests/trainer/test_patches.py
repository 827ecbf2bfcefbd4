"""Replacements on single objects affect only those objects, and leave nothing behind."""

from __future__ import annotations

from typing import Any

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
