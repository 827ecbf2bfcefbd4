"""Where a writer's files go: a directory, a remote, or both."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


class Output:
    """Takes the files of a data set one by one, and its index last.

    Args: see ``DatasetWriter``.
    """

    def __init__(
        self,
        out: str | tuple[str, str],
        *,
        keep_local: bool,
        progress_bar: bool,
        max_workers: int | None,
        retry: int,
        exist_ok: bool,
        storage_options: Mapping[str, Any] | None,
    ) -> None:
        self.local = os.path.expanduser(out if isinstance(out, str) else out[0])
        os.makedirs(self.local, exist_ok=True)
        if os.listdir(self.local) and not exist_ok:
            raise FileExistsError(f"There is something in {self.local} already.")

    def add(self, basename: str, data: bytes) -> None:
        """Write a file of the data set."""
        with open(os.path.join(self.local, basename), "wb") as file:
            file.write(data)

    def publish(self, basename: str, data: bytes) -> None:
        """Write the index, when all else is written."""
        path = os.path.join(self.local, basename)
        with open(f"{path}.tmp", "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)

    def abandon(self) -> None:
        """Give up: there will be no index."""
