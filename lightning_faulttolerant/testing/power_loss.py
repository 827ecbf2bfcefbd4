"""Simulate a power loss at a chosen step: of the files, only the content that a disk had to keep is left.

A disk has to keep the content of a file as of its last fsync, and a name as of the last fsync of its directory.
"""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, final

from lightning_faulttolerant.testing.faults import Step
from lightning_faulttolerant.testing.faulty_files import FaultyFiles

Kept = Literal["synced", "names", "removals"]


class PowerLost(BaseException):  # not an Exception: no program may catch it and continue
    """Raised in the program when the machine loses its power; ``PowerLoss`` catches it at the end of its block."""


@final
class PowerLoss:
    """A context manager that loses the power before a chosen step, or at the end of its block.

    Afterwards the directory holds what a disk kept. From the chosen step on, every step raises ``PowerLost`` and does
    nothing. At the end of the block, the files below the directory are set to the state of the disk. It sees the same
    steps as ``FaultyFiles``: a file written in another way counts as never synced.

    File systems may keep more than they must, and some of it without the rest. A protocol is safe if it survives all
    three modes:

    - ``"synced"``: only what was synced, file by file and directory by directory.
    - ``"names"``: all new names, renames and removals, but no unsynced content: such a file is empty.
    - ``"removals"``: like ``"synced"``, but deleted files are gone even if the directory was not synced.

    Args:
        directory: Its content at the start of the block counts as synced.
        at: The number of the first step (see ``FaultyFiles``) that does not happen; None: the end of the block.
        keeps: One of the three modes.

    Attributes:
        has_lost: Whether the power was lost at a step, not at the end of the block.

    Example:
        >>> import tempfile
        >>> directory = Path(tempfile.mkdtemp())
        >>> with PowerLoss(directory, keeps="names"):
        ...     _ = (directory / "notes.txt").write_text("never synced")
        >>> (directory / "notes.txt").read_text()
        ''
    """

    def __init__(self, directory: str | os.PathLike[str], *, at: int | None = None, keeps: Kept = "synced") -> None:
        if keeps not in ("synced", "names", "removals"):
            raise ValueError(f'keeps is {keeps!r}, but must be "synced", "names" or "removals".')
        self._root = Path(os.path.realpath(directory))
        self._at = at
        self._keeps: Kept = keeps
        self._files = FaultyFiles(directory, self._take)
        self._lock = threading.RLock()
        self._image: _Node | None = None

    @property
    def has_lost(self) -> bool:
        """Whether the power was lost at a step."""
        return self._image is not None

    @property
    def steps(self) -> list[Step]:
        """The steps up to the power loss; the last one is the step at which it happened."""
        return self._files.steps[: self._at]

    def __enter__(self) -> PowerLoss:
        self._disk = _Disk(self._root)
        self._files.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._files.__exit__()
        image = self._image or self._disk.image(self._keeps)
        for path in self._root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        image.write_to(self._root)
        return isinstance(error, PowerLost)

    def _take(self, step: Step, carry_out: Callable[..., object]) -> Any:
        with self._lock:  # one step at a time, so that the recorded state matches the done steps
            if self._image is None and self._at is not None and step.number >= self._at:
                self._image = self._disk.image(self._keeps)
            if self._image is not None:
                raise PowerLost(f"The power was lost at {step}")
            return self._disk.carry_out(step, carry_out)


@dataclass(eq=False)
class _Node:
    """A file, a directory or a link, as far as the disk has to keep it."""

    mode: int
    content: bytes = b""
    target: str = ""
    entries: dict[str, _Node] = field(default_factory=dict)
    unlinked: set[str] = field(default_factory=set)

    def write_to(self, path: Path) -> None:
        """Create it at a path; a directory may already exist."""
        if stat.S_ISDIR(self.mode):
            path.mkdir(exist_ok=True)
            for name, node in self.entries.items():
                node.write_to(path / name)
        elif stat.S_ISLNK(self.mode):
            path.symlink_to(self.target)
        else:
            path.write_bytes(self.content)


class _Disk:
    """Records what the disk has to keep. A node is identified by its inode as long as that has a name."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._nodes: dict[int, _Node] = {}
        self._sync_all(root)

    def image(self, keeps: Kept) -> _Node:
        root = self._node(self._root)
        if keeps == "names":
            return self._as_named(self._root)
        return _without_unlinked(root) if keeps == "removals" else _copy(root)

    def carry_out(self, step: Step, carry_out: Callable[..., object]) -> Any:
        if step.kind in ("fsync", "fsync_directory"):  # recorded, not done: slow, and this is not the real disk
            return self._note(step)
        gone = _inode_that_goes(step)
        result = carry_out()
        if gone is not None:  # the next file may get its inode number
            self._nodes.pop(gone, None)
        self._note(step)
        return result

    def _note(self, step: Step) -> None:
        if step.kind in ("unlink", "rmdir"):
            self._node(step.path.parent).unlinked.add(step.path.name)
        elif step.kind == "fsync" and step.path.exists():
            self._node(step.path).content = step.path.read_bytes()
        elif step.kind == "fsync_directory":
            node = self._node(step.path)
            node.entries = {name: self._node(step.path / name) for name in os.listdir(step.path)}
            node.unlinked = set()

    def _node(self, path: Path) -> _Node:
        status = os.lstat(path)
        if status.st_ino not in self._nodes:
            target = os.readlink(path) if stat.S_ISLNK(status.st_mode) else ""
            self._nodes[status.st_ino] = _Node(mode=status.st_mode, target=target)
        return self._nodes[status.st_ino]

    def _sync_all(self, path: Path) -> _Node:
        node = self._node(path)
        if stat.S_ISDIR(node.mode):
            node.entries = {name: self._sync_all(path / name) for name in os.listdir(path)}
        elif stat.S_ISREG(node.mode):
            node.content = path.read_bytes()
        return node

    def _as_named(self, path: Path) -> _Node:
        node = self._node(path)
        is_directory = stat.S_ISDIR(node.mode)
        entries = {name: self._as_named(path / name) for name in os.listdir(path)} if is_directory else {}
        return _Node(mode=node.mode, content=node.content, target=node.target, entries=entries)


def _inode_that_goes(step: Step) -> int | None:
    if step.kind not in ("unlink", "rmdir", "rename") or not os.path.lexists(step.path):
        return None
    status = os.lstat(step.path)
    return status.st_ino if status.st_nlink == 1 or stat.S_ISDIR(status.st_mode) else None


def _copy(node: _Node) -> _Node:
    entries = {name: _copy(child) for name, child in node.entries.items()}
    return _Node(mode=node.mode, content=node.content, target=node.target, entries=entries)


def _without_unlinked(node: _Node) -> _Node:
    kept = {name: child for name, child in node.entries.items() if name not in node.unlinked}
    entries = {name: _without_unlinked(child) for name, child in kept.items()}
    return _Node(mode=node.mode, content=node.content, target=node.target, entries=entries)
