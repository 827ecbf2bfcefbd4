"""Checkpoints of several files, each in its own directory that is a checkpoint only when it is complete.

For loops that write files themselves, on one rank or many. A directory has its final name from the start. It becomes a
checkpoint in one instant, when its manifest is written. Until then, and after a crash, it counts as incomplete.

`find_ranks` finds the ranks that share a series.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast, final

import torch.distributed as dist

from lightning_faulttolerant.checkpoint.contents import commit_files, deal_files, list_files, sum_files
from lightning_faulttolerant.checkpoint.directory_series import DirectorySeries
from lightning_faulttolerant.checkpoint.manifest import MANIFEST_NAME, FileEntry, check_metadata
from lightning_faulttolerant.checkpoint.ranks import Alone, RankGroup, Ranks, together
from lightning_faulttolerant.errors import CheckpointError
from lightning_faulttolerant.storage.store import is_url, local_path

_MESSAGE = (
    "The ranks could not agree on a checkpoint: {}. Nothing was committed by this step. Look for the first error of "
    "the other ranks. All of them must call the methods of a saver in the same order; if a rank can't finish its part "
    "of a checkpoint, it should call abort(), so that the others don't wait."
)


def find_ranks(strategy: str, group: Any, timeout: timedelta) -> tuple[Ranks, int]:
    """Return the ranks that participate.

    Args:
        strategy: ``"sync_any"``, ``"sync_all"``, ``"async"`` or ``"mono"``.
        group: A ``torch.distributed`` group; None for the default group.
        timeout: How long one step may wait for the slowest rank.

    Returns:
        The ranks, and this one's number for the name of an ``"async"`` series.

    Raises:
        ValueError: If there are several processes and no process group, or this rank is not in the group.
        CheckpointError: If the other ranks do not answer.
    """
    is_grouped = dist.is_available() and dist.is_initialized()
    if group is not None and (not is_grouped or dist.get_rank(group) < 0):
        raise ValueError("This process is not in the process group that was given. Create the saver only on its ranks.")
    if strategy == "mono":
        return Alone(), 0
    if strategy == "async":
        return Alone(), dist.get_rank(group) if is_grouped else _number_from_environment("RANK", 0)
    if is_grouped:
        return _joined(group, timeout), 0
    num_ranks = _number_from_environment("WORLD_SIZE", 1)
    if num_ranks > 1:
        raise ValueError(
            f'WORLD_SIZE is {num_ranks} but no process group exists: with strategy="{strategy}", each rank would '
            "act as the only one, and overwrite the others. Call torch.distributed.init_process_group before you "
            'create the saver, or pass strategy="async" (each rank its own directories).'
        )
    return Alone(), 0


def _joined(group: Any, timeout: timedelta) -> Ranks:
    ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
    return RankGroup(ranks, timeout, message=_MESSAGE) if len(ranks) > 1 else Alone()


def _number_from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


_Result = TypeVar("_Result")

_STRATEGIES = ("sync_any", "sync_all", "async", "mono")
_MAX_NAME_CHARACTERS = 80
_LONGEST_PAUSE_SECONDS = 0.5


@final
class AtomicDirectory:
    """A saver that puts each checkpoint into a new directory, and keeps a link to the latest complete one.

    The directories are ``<name>_checkpoint_<n>``, or ``<name>_checkpoint_<n>_force`` if they are kept forever. The link
    is ``<name>.latest_checkpoint``. The file ``<name>.latest_checkpoint.txt`` holds the same path as text, for copies
    and for file systems without links. Both are hints: the latest is the newest directory whose manifest verifies. A
    new saver finds it, sets damaged newer ones aside (``….damaged``, never deleted) and sets the link to it.

    Under ``"sync_any"`` and ``"sync_all"`` the ranks of the process group share one series, in one directory that all
    of them see. Then **all ranks call** the constructor, ``prepare_checkpoint_directory``, ``symlink_latest`` (or, on a
    rank whose part failed, ``abort``) and ``latest``, in the same order. If one rank fails, all raise. If one is dead,
    the others raise within ``timeout``.

    Directories of ``cycling_utils`` are read too. They have no manifests and can't be verified. By that package's rule,
    the directory that its link points to and those with lower numbers are complete. A directory that verifies is
    preferred.

    Args:
        output_directory: A local directory, created if it is missing; ``~`` is the home directory. Relative to the
            current directory of the process.
        is_master: Whether this rank manages the disk; at most one rank. If no rank does, the first one is the master.
        name: The prefix of the directories' names. Savers with different names may share a directory.
        keep_last: How many complete checkpoints to keep, besides the one that is being written. Those that are kept
            forever count. Older ones are deleted once a newer one is complete. 0 or less: all.
        strategy: ``"sync_any"``: one series; a checkpoint is kept forever if any rank requests it. ``"sync_all"``: if
            all ranks request it. ``"async"``: each rank has its own series, ``<name>_rank_<r>``, and does not
            communicate. ``"mono"``: as if there were no process group. Without one, all but ``"async"`` are the same.
        device: Not used: ranks communicate over the CPU. Accepted for scripts written for ``cycling_utils``.
        verify: Read the contents of a directory before accepting it as the latest. Otherwise only presence and sizes
            are compared.
        fsync: Wait until a checkpoint is on the disk before it becomes one, so that it survives a power loss.
        group: The process group that shares the series; None for the default one.
        timeout: How long the ranks wait for the slowest of them, in each step.

    Raises:
        ValueError: If an argument is wrong, the ranks disagree on one, or there are several ranks and no process group.
        NoValidCheckpointError: If there are checkpoints, but none is usable.
        CheckpointError: If another rank fails or does not answer.

    Example:
        >>> import tempfile
        >>> output_directory = tempfile.mkdtemp()
        >>> saver = AtomicDirectory(output_directory, keep_last=2)
        >>> for step in range(3):
        ...     directory = saver.prepare_checkpoint_directory()
        ...     _ = (Path(directory) / "step.txt").write_text(str(step))
        ...     saver.symlink_latest(directory)
        >>> latest = os.readlink(os.path.join(output_directory, saver.symlink_name))
        >>> (Path(latest) / "step.txt").read_text()
        '2'
    """

    def __init__(
        self,
        output_directory: str | os.PathLike[str],
        is_master: bool = False,
        name: str = "AtomicDirectory",
        keep_last: int = -1,
        strategy: str = "sync_any",
        device: object = None,
        *,
        verify: bool = True,
        fsync: bool = True,
        group: object = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        _check_arguments(output_directory, name=name, keep_last=keep_last, strategy=strategy, timeout=timeout)
        self._ranks, number = find_ranks(strategy, group, timeout)
        self.name = f"{name}_rank_{number}" if strategy == "async" else name
        self.output_directory = os.path.abspath(os.path.expanduser(local_path(output_directory)))
        self.keep_last = keep_last
        self.strategy = strategy
        self.device = device
        self._fsync = fsync
        self._timeout = timeout
        self._prepared: Path | None = None
        self._series = DirectorySeries(Path(self.output_directory), name=self.name, verify=verify, fsync=fsync)
        self._master = self._agree_on_master(is_master)
        self.is_master = self._ranks.rank == self._master
        self.latest()

    @property
    def symlink_name(self) -> str:
        """The name of the link to the latest checkpoint."""
        return f"{self.name}.latest_checkpoint"

    def prepare_checkpoint_directory(self, force_save: bool = False) -> str:
        """Create the directory for the next checkpoint; called by all ranks.

        It has its final name, but is not a checkpoint before ``symlink_latest``. An earlier directory that was prepared
        but neither completed nor aborted is deleted, and so are the leftovers of a killed process.

        Args:
            force_save: Keep this checkpoint forever.

        Returns:
            The absolute path. The directory holds the beginning of a manifest and nothing else.

        Raises:
            OSError: If it can't be created.
            CheckpointError: If another rank fails or does not answer.
        """
        wishes = self._ranks.to_all("prepare", bool(force_save))
        forced = all(wishes) if self.strategy == "sync_all" else any(wishes)
        path = self._here(self._by_master("begin", lambda: self._begin(forced=forced)))
        together(self._ranks, "wait", lambda: self._wait_for(path))
        self._prepared = path
        return str(path)

    def symlink_latest(
        self, checkpoint_directory: str | os.PathLike[str], *, metadata: dict[str, Any] | None = None
    ) -> None:
        """Turn a prepared directory into the latest checkpoint; called by all ranks when their files are closed.

        Each file is read once, by one of the ranks, for its checksum. Then the manifest is written, the link is set to
        the directory, and the checkpoints beyond ``keep_last`` are deleted.

        Args:
            checkpoint_directory: The path that ``prepare_checkpoint_directory`` returned.
            metadata: Kept in the manifest (the master's): dicts, lists, strings, finite numbers, booleans and None.

        Raises:
            ValueError: If the directory is empty, was not prepared, differs between the ranks, or holds something that
                can't be part of a checkpoint, such as a link that points outside. You can fix it and complete it then.
            OSError: If something can't be written. Complete checkpoints stay complete.
            CheckpointError: If another rank fails, has called ``abort``, or does not answer.
        """
        path = self._path_of(checkpoint_directory)
        self._end(path, metadata=metadata or {}, completes=True)
        # On a network file system one rank's listing may be stale: a file counts if any rank sees it.
        names = set().union(*together(self._ranks, "list", lambda: list_files(path)))
        shares = self._by_master("deal", lambda: deal_files(path, names, num_shares=self._ranks.num_ranks))
        summed = together(self._ranks, "sum", lambda: sum_files(path, shares[self._ranks.rank], fsync=self._fsync))
        files = {name: entry for share in summed for name, entry in share.items()}
        self._by_master("commit", lambda: self._commit(path, files, metadata or {}))
        self._prepared = None

    def abort(self, checkpoint_directory: str | os.PathLike[str]) -> None:
        """Give up a prepared directory and delete it; called instead of ``symlink_latest``.

        One rank is enough: the ranks that call ``symlink_latest`` then raise, and nothing is committed.

        Args:
            checkpoint_directory: The path that ``prepare_checkpoint_directory`` returned.

        Raises:
            ValueError: If it was not prepared, or is complete.
            CheckpointError: If another rank fails or does not answer.
        """
        path = self._path_of(checkpoint_directory)
        self._end(path, metadata={}, completes=False)

    def latest(self) -> str | None:
        """Return the newest checkpoint that verifies; called by all ranks.

        Damaged ones that are newer are set aside under another name, and the link is set to the returned one.

        Returns:
            The absolute path, or None if no checkpoint was ever written.

        Raises:
            NoValidCheckpointError: If there are checkpoints, but none is usable.
            OSError: If something can't be read for a reason that is not damage.
            CheckpointError: If another rank fails or does not answer.
        """
        path = self._by_master("latest", self._series.recover)
        return None if path is None else str(self._here(path))

    def history(self) -> list[str]:
        """List the checkpoints, oldest first, as this rank sees the disk, without verifying them.

        Returns:
            Absolute paths.
        """
        if not os.path.isdir(self.output_directory):
            return []
        return [str(entry.path) for entry in self._series.committed()]

    def is_checkpoint_directory(self, path_str: str | os.PathLike[str]) -> str | None:
        """Return the number of an existing directory with a name of this series, complete or not.

        Args:
            path_str: Any path.

        Returns:
            The number in its name, with ``_force`` after it if it is kept forever; None for any other path.
        """
        return self._series.suffix(Path(path_str).name) if os.path.isdir(path_str) else None

    def _agree_on_master(self, is_master: bool) -> int:
        mine = {"strategy": self.strategy, "name": self.name}
        answers = self._ranks.to_all("make a saver", (mine, is_master))
        for place, (others, _) in enumerate(answers):
            if others != answers[0][0]:
                raise ValueError(
                    f"The ranks disagree: {self._ranks.label(0)} has {answers[0][0]}, but {self._ranks.label(place)} "
                    f"has {others}. They would wait for each other. Create the saver with the same arguments on each."
                )
        masters = [place for place, (_, is_one) in enumerate(answers) if is_one]
        if len(masters) > 1:
            raise ValueError(
                f"is_master is True on {', '.join(map(self._ranks.label, masters))}. They would overwrite each other. "
                "Pass it on one rank, or on none."
            )
        return masters[0] if masters else 0

    def _by_master(self, step: str, work: Callable[[], _Result]) -> _Result:
        result = together(self._ranks, step, lambda: work() if self.is_master else None)[self._master]
        return cast("_Result", result)

    def _path_of(self, checkpoint_directory: str | os.PathLike[str]) -> Path:
        path = Path(os.path.abspath(checkpoint_directory))
        is_below = path.parent.is_dir() and os.path.samefile(path.parent, self.output_directory)  # maybe through a link
        return self._here(path) if is_below else path

    def _here(self, path: Path) -> Path:
        # Ranks on other nodes may have mounted the output directory elsewhere.
        return Path(self.output_directory) / path.name

    def _begin(self, *, forced: bool) -> Path:
        if self._prepared is not None:
            self._series.drop(self._prepared)
        return self._series.begin(forced=forced)

    def _wait_for(self, path: Path) -> None:
        # On a network file system, a directory that another node created may appear late.
        deadline, pause_seconds = time.monotonic() + self._timeout.total_seconds(), 0.01
        while not (path / MANIFEST_NAME).exists():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"After {self._timeout}, {self._ranks.label(self._ranks.rank)} does not see {path}, which "
                    f"{self._ranks.label(self._master)} created. The ranks must share the output directory. Put it on "
                    'a file system that all see, or pass strategy="async".'
                )
            time.sleep(pause_seconds)
            pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)

    def _end(self, path: Path, *, metadata: dict[str, Any], completes: bool) -> None:
        """Synchronize the ranks at the end of a checkpoint, both those that complete it and those that abort it."""

        def check() -> tuple[str, bool]:
            check_metadata(metadata)
            self._check_begun(path)
            return path.name, completes

        answers = together(self._ranks, "end", check)
        names = {name for name, _ in answers}
        if len(names) > 1:
            raise ValueError(
                f"The ranks end different checkpoints: {', '.join(sorted(names))}. Nothing was committed. On each "
                "rank, pass the path that prepare_checkpoint_directory returned."
            )
        gave_up = [self._ranks.label(place) for place, (_, completed) in enumerate(answers) if not completed]
        if not gave_up:
            return
        self._by_master("drop", lambda: self._series.drop(path))
        self._prepared = None
        if completes:
            raise CheckpointError(
                f"The checkpoint {path} was aborted by {', '.join(gave_up)} and deleted. Earlier ones still exist."
            )

    def _check_begun(self, path: Path) -> None:
        is_ours = str(path.parent) == self.output_directory and self._series.suffix(path.name) is not None
        if is_ours and self._series.is_begun(path):
            return
        state = "is already complete, or missing" if is_ours else f"is no {self.name} in {self.output_directory}"
        raise ValueError(f"{path} {state}. Pass the path that prepare_checkpoint_directory returned, once.")

    def _commit(self, path: Path, files: dict[str, FileEntry], metadata: dict[str, Any]) -> None:
        commit_files(path, files, metadata=metadata, fsync=self._fsync)
        self._series.finish(path, keep_last=self.keep_last)


def _check_arguments(output_directory: Any, *, name: str, keep_last: int, strategy: str, timeout: timedelta) -> None:
    if is_url(output_directory):
        raise ValueError(
            f"output_directory is {os.fspath(output_directory)}, but must be a local directory: files are written "
            "into it by path. For an object store, use FaultTolerance(dirpath=...), or atomic_torch_save with a URL."
        )
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy is {strategy!r}, but must be one of {', '.join(_STRATEGIES)}.")
    if not name or len(name) > _MAX_NAME_CHARACTERS or {"/", "\0", os.sep} & set(name):
        raise ValueError(
            f"name is {name!r}. It begins the names of directories: it needs 1 to {_MAX_NAME_CHARACTERS} characters, "
            "none of them a slash."
        )
    if type(keep_last) is not int:
        raise TypeError(f"keep_last is {keep_last!r}, but must be an integer; 0 or less keeps all.")
    if timeout <= timedelta(0):
        raise ValueError(f"timeout is {timeout}, but must be positive.")
