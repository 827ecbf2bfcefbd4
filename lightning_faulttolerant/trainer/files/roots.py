"""The directories that a run writes below: some scripts get new ones at each start, from Hydra or after the time.

A path below a changed directory stands for the same path below the first start's directory, where the run's files are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer

from lightning_faulttolerant.trainer.identity.starts import hydra_config

DEFAULT_ROOT_DIR = "default_root_dir"
_HYDRA = "hydra.runtime.output_dir"
WORKING_DIRECTORY = "working directory"


def roots_of(trainer: Trainer) -> dict[str, str]:
    """Return the roots of a run by name, as absolute paths or URLs."""
    roots = {DEFAULT_ROOT_DIR: absolute(trainer.default_root_dir)}
    output_dir = _hydra_output_dir()
    if output_dir is not None:
        roots[_HYDRA] = absolute(output_dir)
    try:
        here = os.getcwd()
    except FileNotFoundError:  # the directory was removed
        return roots
    if any(_below(here, root) is not None for root in roots.values()):
        roots[WORKING_DIRECTORY] = here
    return roots


def absolute(path: str) -> str:
    """Return an absolute path; a URL of another file system stays as it is."""
    return path if "://" in path else os.path.abspath(os.path.expanduser(os.path.expandvars(path)))


def real(path: str) -> str:
    """Return an absolute path without links."""
    return path if "://" in path or not path else os.path.realpath(path)


class Moves:
    """The roots that differ from those of the first start of the run.

    Args:
        saved: The roots of the first start.
        now: The roots of this start.
        autosave: An autosave of the run. If it is below a root of this start, the whole directory was moved or copied,
            and the files of the run are there.
    """

    def __init__(
        self, saved: Mapping[str, str] | None = None, now: Mapping[str, str] | None = None, *, autosave: str = ""
    ) -> None:
        saved, now = saved or {}, now or {}
        self.roots = {
            name: saved[name]
            for name, root in now.items()
            if saved.get(name, root) != root and _is_changed(saved[name], root, autosave)
        }
        """The first start's roots that differ from this start's, by name."""
        pairs = {now[name]: root for name, root in reversed(self.roots.items())}
        self._pairs = sorted(pairs.items(), key=lambda pair: -len(pair[0]))

    def first(self, path: str) -> str | None:
        """Return where a path of this start was at the first start; ``None`` if it is below no changed root."""
        for now, saved in self._pairs:
            inside = _below(path, now)
            if inside is not None:
                return _join(saved, inside)
        for now, saved in self._pairs:  # Lightning follows links in some paths and not in others
            inside = _below(real(path), real(now))
            if inside is not None:
                return _join(real(saved), inside)
        return None


def _is_changed(saved: str, now: str, autosave: str) -> bool:
    is_moved = _below(real(autosave), real(now)) is not None and _below(real(autosave), real(saved)) is None
    is_there: bool = get_filesystem(saved).isdir(saved)
    return is_there and not is_moved


def _hydra_output_dir() -> str | None:
    hydra = hydra_config()
    return None if hydra is None else str(hydra.runtime.output_dir)


def _below(path: str, root: str) -> str | None:
    """Return a path relative to a root that it equals or is below; else ``None``."""
    root = root.rstrip("/")
    if path.rstrip("/") == root:
        return ""
    return path[len(root) + 1 :] if path.startswith(f"{root}/") else None


def _join(root: str, inside: str) -> str:
    return os.path.join(root, inside) if inside else root
