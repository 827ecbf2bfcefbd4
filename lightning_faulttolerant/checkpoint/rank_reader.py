"""Load a checkpoint in one of several ranks: of the ranks' states, only its own is read.

Each loaded byte is compared with a checksum. One rank verifies the whole file before the others read it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from lightning_faulttolerant.checkpoint import autosave_directory
from lightning_faulttolerant.checkpoint.autosave_directory import METADATA_NAME
from lightning_faulttolerant.checkpoint.described import TensorInfo
from lightning_faulttolerant.checkpoint.joined_file import opened_whole
from lightning_faulttolerant.checkpoint.rank_states import check, with_state_of
from lightning_faulttolerant.checkpoint.schema import DATA, KEY, states_in
from lightning_faulttolerant.checkpoint.staging import Staging
from lightning_faulttolerant.checkpoint.summary import read_summary
from lightning_faulttolerant.checkpoint.verify import damage_named, is_no_file, load_open_file, verify_open_file
from lightning_faulttolerant.errors import CheckpointError, DamagedCheckpointError
from lightning_faulttolerant.storage.store import is_url, local_copy, local_path


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReader:
    """Which states of a checkpoint a rank needs: its own, or all if another number of ranks has saved.

    Args:
        rank: The number of this rank.
        num_ranks: The number of ranks now.
    """

    rank: int
    num_ranks: int

    def load(self, path: str | os.PathLike[str], *, verifies_all: bool) -> dict[str, Any]:
        """Verify an autosave and load it, without the states of other ranks if they are not needed.

        Args:
            path: A file written by ``torch.save``, or a directory with a manifest, local or in a store.
            verifies_all: Verify the states of other ranks too, each also by the checksum of the rank that made it, and
                the shards of a directory; not needed if another rank has done so.

        Returns:
            The content; for a directory, without the shards. None of it is mapped to the file.

        Raises:
            DamagedCheckpointError: As `load_path`, for what is verified.
            UnsafeCheckpointError: As `load_path`.
            CheckpointError: As `load_path`.
        """
        if is_url(path):
            try:
                return self._load_file(path, verifies_all=verifies_all)
            except DamagedCheckpointError as error:
                if not is_no_file(error):
                    raise
        elif not os.path.isdir(local_path(path)):
            return self._load_file(path, verifies_all=verifies_all)
        directory = local_path(path)
        if verifies_all:
            autosave_directory.verify(directory)
        return self._load_file(os.path.join(directory, METADATA_NAME), verifies_all=verifies_all)

    def _load_file(self, path: str | os.PathLike[str], *, verifies_all: bool) -> dict[str, Any]:
        with contextlib.ExitStack() as stack:
            with damage_named(path):
                file = stack.enter_context(opened_whole(path, local_copy))
                left_out = None if verifies_all else self._not_needed(file, path)
                verification = verify_open_file(path, file, without=left_out)
            if self.num_ranks > 1 and (verifies_all or left_out is not None):
                mapped = load_open_file(file, verification, mapped=True)
                if self._is_as_saved(mapped.get(KEY)):
                    for rank in range(self.num_ranks) if verifies_all else ():  # no rank may refuse what this one takes
                        check(mapped[KEY], rank)
                    copied: dict[str, Any] = Staging().copy({**mapped, KEY: self._cut(mapped[KEY])})
                    return copied
            return load_open_file(file, verification)

    def _not_needed(self, file: IO[bytes], path: str | os.PathLike[str]) -> str | None:
        """Return the key of the record with the states of all ranks, if this rank needs only its own."""
        try:
            content = read_summary(file, name=os.fspath(path)).content
        except CheckpointError:  # the verification says what is wrong with it
            return None
        part = content.get(KEY) if isinstance(content, Mapping) else None
        states = states_in(part)
        if states is None or not self._is_as_saved(part):
            return None
        data = states[DATA]
        return data.storage.key if isinstance(data, TensorInfo) else None

    def _is_as_saved(self, part: Any) -> bool:
        return states_in(part) is not None and bool(part.get("world_size") == self.num_ranks)

    def _cut(self, part: Mapping[str, Any]) -> dict[str, Any]:
        own = with_state_of(part, self.rank)
        check(own, self.rank)
        return own
