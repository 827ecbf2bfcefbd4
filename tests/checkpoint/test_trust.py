"""An autosave is trusted only if no user other than this one and root could have written it."""

from __future__ import annotations

import grp
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_faulttolerant.checkpoint.trust import why_not_trusted
from tests.processes import in_child

SOMEBODY = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture
def directory() -> Iterator[Path]:
    """A directory of this user's below /tmp, which is sticky, with a subdirectory that holds a file."""
    with tempfile.TemporaryDirectory(dir="/tmp") as path:
        os.chmod(path, 0o755)
        run = Path(path) / "run"
        run.mkdir(mode=0o755)
        (run / "file").write_text("")
        os.chmod(run / "file", 0o644)
        yield Path(path)


def _group_of(monkeypatch: pytest.MonkeyPatch, *members: str) -> None:
    """Let every group be one with the user's name, with these members."""
    user = pwd.getpwuid(os.geteuid())
    monkeypatch.setattr(grp, "getgrgid", lambda number: grp.struct_group((user.pw_name, "x", number, list(members))))
    monkeypatch.setattr(pwd, "getpwall", lambda: [user])


def reason(place: Path) -> str:
    """Return why a place is not trusted."""
    found = why_not_trusted(place)
    assert found is not None
    return found


def test_what_only_the_user_writes_to_is_trusted(directory: Path) -> None:
    """A file, its directory, and a sticky directory far above are trusted."""
    assert why_not_trusted(directory / "run" / "file") is None
    assert why_not_trusted(directory / "run") is None
    assert why_not_trusted(f"file://{directory}/run/file") is None


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o722])
@pytest.mark.parametrize("place", ["run/file", "run", "."])
def test_what_everybody_writes_to_is_not(directory: Path, place: str, mode: int) -> None:
    """Neither the file, nor its directory, nor one above may be open to all; the place and its mode are named."""
    os.chmod(directory / place, mode)
    assert f"{(directory / place).resolve()} is writable by everybody (mode 0{mode:o})" == reason(
        directory / "run" / "file"
    )


GROUPS = {
    "others": (["somebody"], None, True),
    "the user's own, as on systems where a umask of 002 is usual": ([], None, False),
    "the user's own, with an access list that gives rights to others": ([], b"a list", True),
}


@pytest.mark.parametrize(("members", "access_list", "is_refused"), GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("place", ["run/file", "run", "."])
def test_what_a_group_writes_to(directory, monkeypatch, place, members, access_list, is_refused):
    """A group with other members counts as others; the user's own does not, unless its rights are those of a list."""
    os.chmod(directory / place, 0o775)
    _group_of(monkeypatch, *members)
    monkeypatch.setattr(os, "getxattr", lambda place, name: access_list or b"")

    def main():  # what a process knows of groups, it keeps
        found = why_not_trusted(directory / "run" / "file")
        assert (found is not None and "is writable by its group" in found) == is_refused
        assert is_refused or found is None

    assert in_child(main) == 0


@needs_root
@pytest.mark.parametrize("place", ["run/file", "run", "."])
def test_what_belongs_to_somebody_else_is_not(directory: Path, place: str) -> None:
    """Its owner could write to it, whatever its current mode is."""
    os.chown(directory / place, SOMEBODY, 0)
    assert reason(directory / "run" / "file") == f"{(directory / place).resolve()} belongs to the user {SOMEBODY}"


def test_a_sticky_directory_may_not_hold_the_file_itself(directory: Path) -> None:
    """Others can't replace a file in it, but can put one of their own there before us."""
    os.chmod(directory / "run", 0o1777)
    assert "is writable by everybody" in reason(directory / "run" / "file")


def test_below_a_directory_that_nobody_else_enters_all_is_trusted(directory: Path) -> None:
    """An example is a home directory of mode 0700 with a umask of 002."""
    os.chmod(directory, 0o700)
    os.chmod(directory / "run", 0o777)
    assert why_not_trusted(directory / "run" / "file") is None


def test_a_link_is_followed(directory: Path) -> None:
    """The link's target counts, and each directory on the way there."""
    opened = directory / "opened"
    opened.mkdir()
    os.chmod(opened, 0o777)
    (directory / "link").symlink_to("run")
    assert why_not_trusted(directory / "link" / "file") is None
    (opened / "link").symlink_to("../run")
    assert str(opened) in reason(opened / "link" / "file")
    (directory / "again").symlink_to(opened / "link")
    assert str(opened) in reason(directory / "again" / "file")


@needs_root
def test_a_link_of_somebody_else_is_not_trusted(directory: Path) -> None:
    """In a sticky directory, others may put a link in our way."""
    shared = directory / "shared"
    shared.mkdir()
    os.chmod(shared, 0o1777)
    (shared / "link").symlink_to(directory / "run")
    os.lchown(shared / "link", SOMEBODY, 0)
    assert reason(shared / "link" / "file") == f"{shared.resolve()}/link belongs to the user {SOMEBODY}"


def test_links_in_a_circle_end(directory: Path) -> None:
    """A circle of links does not cause an endless wait."""
    (directory / "one").symlink_to("two")
    (directory / "two").symlink_to("one")
    assert "can't be read" in reason(directory / "one" / "file")


def test_what_is_not_there_or_in_a_store_is_not_trusted(directory: Path) -> None:
    """A missing file, or one in a store, is not trusted, as it is unknown who may write to it."""
    assert "can't be read" in reason(directory / "nothing")
    assert "is in a store" in str(why_not_trusted("s3://bucket/run/file"))


@needs_root
def test_another_user_trusts_his_own_and_roots(directory: Path) -> None:
    """The rule is that of the running user: all trust root's files, and each user trusts its own."""
    file = directory / "run" / "file"

    def trusts() -> bool:
        def main() -> None:
            os.setgroups([])
            os.setegid(SOMEBODY)
            os.seteuid(SOMEBODY)
            assert why_not_trusted(file) is None

        return in_child(main) == 0

    assert trusts()
    os.chown(file, SOMEBODY, SOMEBODY)
    assert trusts()
    assert reason(file).endswith(f"belongs to the user {SOMEBODY}")
    os.chown(file, SOMEBODY + 1, SOMEBODY)
    assert not trusts()
