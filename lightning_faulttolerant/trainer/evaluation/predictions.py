"""Predictions of an interrupted ``predict``: files next to its autosaves, each with the predictions since the last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer

from lightning_faulttolerant.checkpoint.atomic import save_to_file
from lightning_faulttolerant.checkpoint.autosave_directory import PREDICTIONS_NAME
from lightning_faulttolerant.checkpoint.opaque import pack
from lightning_faulttolerant.storage.store import open_file, open_store
from lightning_faulttolerant.trainer.evaluation import compat as runs
from lightning_faulttolerant.trainer.save.trust import Trust

_PREDICTIONS, _POOL = "predictions", "pool"


class Predictions:
    """The predictions of one rank.

    Args:
        trainer: The trainer that predicts.
        directory: The directory of the autosaves, as a path or a URL.
        rank: The number of this rank.
        trust: Decides whether predictions that are objects may be unpickled.
    """

    def __init__(self, trainer: Trainer, directory: str, *, rank: int, trust: Trust) -> None:
        self._trainer = trainer
        self._store = open_store(directory)
        self._rank = rank
        self._trust = trust
        self._files: list[str] = []
        self._num_written: list[int] = []

    def write(self) -> dict[str, Any]:
        """Write the predictions since the last call into a file of their own. Return the names of all files so far.

        Raises:
            OSError: If the file can't be written.
            UnsafeCheckpointError: If a prediction can't be pickled.
        """
        predictions = runs.predictions_of(self._trainer.predict_loop)
        if not runs.keeps_predictions(self._trainer) or not predictions:  # at its end it drops those of a writer
            return {"files": [], "num": []}
        begun = self._num_written or [0] * len(predictions)
        new = [of_loader[done:] for of_loader, done in zip(predictions, begun, strict=True)]
        if any(new):
            packed = pack({_PREDICTIONS: new})
            self._trust.check(packed, packed.checkpoint, self._store.url)
            name = self._next_name()
            with self._store.writer(name) as file:
                save_to_file({**packed.checkpoint, _POOL: packed.pool}, file)
            self._files.append(name)
            self._num_written = [len(of_loader) for of_loader in predictions]
        return {"files": list(self._files), "num": list(self._num_written)}

    def _next_name(self) -> str:
        matches = (PREDICTIONS_NAME.fullmatch(name) for name in self._store.names())
        number = 1 + max((int(match["number"]) for match in matches if match is not None), default=0)
        return f"predictions-rank={self._rank}-{number:08d}.pt"

    def load(self, state: Mapping[str, Any]) -> None:
        """Give the predictions of `state`, a result of `write`, back to the loop.

        Raises:
            UnsafeCheckpointError: If some of them are objects, and the directory is not trusted.
            OSError: If a file can't be read.
        """
        self._files, self._num_written = list(state["files"]), list(state["num"])
        predictions: list[list[object]] = [[] for _ in self._num_written]
        for name in self._files:
            for of_loader, new in zip(predictions, self._read(name), strict=True):
                of_loader.extend(new)
        if predictions:
            runs.predictions_of(self._trainer.predict_loop)[:] = predictions

    def _read(self, name: str) -> Sequence[list[Any]]:
        path = self._store.path(name)
        with open_file(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
        self._trust.restore(content, content.pop(_POOL), path)
        found: Sequence[list[object]] = content[_PREDICTIONS]
        return found
