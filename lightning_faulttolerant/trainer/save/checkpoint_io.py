"""Writes and reads a Trainer's own checkpoints: they are written whole or not at all, and verified when read."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from lightning_faulttolerant.checkpoint.saving import save_to_file
from lightning_faulttolerant.checkpoint.verify import load_file
from lightning_faulttolerant.errors import DamagedCheckpointError, UnsafeCheckpointError
from lightning_faulttolerant.storage.local import remove_abandoned
from lightning_faulttolerant.storage.store import is_url, local_path, open_store, split_path
from lightning_faulttolerant.trainer.bases import AnyCheckpointIO, served_of_any

Path = str | os.PathLike[str]


class AtomicCheckpointIO(AnyCheckpointIO):
    """A ``CheckpointIO`` that no crash can leave with a damaged file. It verifies each record of a file that it reads.

    `FaultTolerance` uses it for ``ModelCheckpoint`` and ``trainer.save_checkpoint`` if the Trainer has the default
    ``CheckpointIO``. It also works without the callback, and inside Lightning's ``AsyncCheckpointIO``. Paths may be
    URLs.

    Args:
        weights_only: The default for ``fit(..., weights_only=...)``. With False, a file may run any code when it is
            loaded: only for files that you trust.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_faulttolerant import AtomicCheckpointIO
        >>> trainer = Trainer(plugins=[AtomicCheckpointIO()], logger=False)
    """

    def __init__(self, *, weights_only: bool = True) -> None:
        self._weights_only = weights_only

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Path, storage_options: object | None = None) -> None:
        """Write a checkpoint. A crash at any moment leaves either the old file or the new one.

        A crash may also leave a hidden temporary file. After an hour, the next save into the directory removes it.

        Args:
            checkpoint: Anything that ``torch.save`` can write. It is streamed, not copied.
            path: A file or a URL. Missing parent directories are created.
            storage_options: Not used.

        Raises:
            TypeError: If `storage_options` are passed.
            OSError: If the file can't be written; the old one is still there.
        """
        if storage_options is not None:
            raise TypeError(
                "`Trainer.save_checkpoint(..., storage_options=...)` is not supported by AtomicCheckpointIO, nor by "
                "Lightning. Put the options of a file system into fsspec's configuration."
            )
        given = _as_given(path)
        directory, name = split_path(given if is_url(given) else os.path.realpath(given))
        if not is_url(directory):
            remove_abandoned(pathlib.Path(directory))
        with open_store(directory).writer(name) as file:
            save_to_file(checkpoint, file)

    def load_checkpoint(
        self,
        path: Path,
        map_location: object = lambda storage, location: storage,
        weights_only: bool | None = None,
    ) -> dict[str, object]:
        """Verify a checkpoint and load it, from one reading of the file.

        Args:
            path: A file or a URL. A directory is loaded as Lightning does it.
            map_location: As in ``torch.load``.
            weights_only: As in ``torch.load``; ``None`` for the value passed to the constructor.

        Raises:
            FileNotFoundError: If the file does not exist.
            DamagedCheckpointError: If the file is truncated, is not a ``torch.save`` file, or has a changed byte.
            UnsafeCheckpointError: If the file holds an object that ``weights_only=True`` refuses.
        """
        path = _as_given(path)
        weights_only = self._weights_only if weights_only is None else weights_only
        if not is_url(path) and os.path.isdir(path):
            lightnings = served_of_any()
            more = lightnings.weights_only_argument(weights_only)
            loaded: dict[str, object] = lightnings.TorchCheckpointIO().load_checkpoint(path, map_location, **more)
            return loaded
        try:
            return load_file(path, map_location=map_location, weights_only=weights_only)
        except DamagedCheckpointError as damage:
            if isinstance(damage.__cause__, FileNotFoundError):
                raise FileNotFoundError(f"Checkpoint file not found: {path}") from damage
            raise
        except UnsafeCheckpointError as refusal:
            raise UnsafeCheckpointError(f"{refusal} {_remedy()}") from refusal.__cause__

    def remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint, file or directory, if it exists."""
        served_of_any().TorchCheckpointIO().remove_checkpoint(_as_given(path))


def _as_given(path: Path) -> str:
    # As fsspec does, which Lightning's own ``CheckpointIO`` uses to open files.
    text = os.fspath(path)
    return text if is_url(text) else os.path.expanduser(local_path(text))


def _remedy() -> str:
    lightnings = "`fit(..., weights_only=False)`, or " if served_of_any().HAS_WEIGHTS_ONLY else ""
    return (
        "To load it under a Trainer, even if it runs code: "
        f"{lightnings}`Trainer(plugins=[AtomicCheckpointIO(weights_only=False)])`."
    )
