"""The runs whose autosaves are kept as files: they must be resumed from by every later version.

All values are whole numbers that floats hold exactly, so the weights do not depend on the version of torch.
``python -m tests.law.earlier_versions.runs format-<number>`` writes the files of this version.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_faulttolerant import FaultTolerance
from lightning_faulttolerant.testing import KillAt
from lightning_faulttolerant.testing.processes import run_ranks
from tests.runs import make_trainer

FILES = Path(__file__).parent
SEED = 7
KILLED_AT = 7
"""The batch, counted over all epochs, at which the run was killed. Its last autosave is one batch earlier."""


class NumbersDataset(Dataset[Tensor]):
    """Whole numbers with whole noise, which the worker draws."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(100.0 * index) + torch.randint(100, ())


class Sums(LightningModule):
    """Its weights are sums of what it has seen and drawn. It keeps a list and a gradient over two batches."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.Parameter(torch.zeros(2))
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append(float(batch.sum()))
        drawn = torch.randint(100, ())
        return -(self.sums * torch.stack([batch.sum(), drawn])).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=2.0)  # two, for the mean over two batches is a half


@dataclass(frozen=True)
class KeptRun:
    """A run whose autosave is kept."""

    name: str
    num_ranks: int = 1
    num_workers: int = 0

    def fit(self, directory: Path, callbacks: Sequence[Callback], ckpt_path: Path | None = None) -> dict[str, Any]:
        """Train in this process, and return what it has seen and learned."""
        arguments: dict[str, Any] = {"devices": self.num_ranks, "strategy": "ddp"} if self.num_ranks > 1 else {}
        loader = DataLoader(
            NumbersDataset(16 * self.num_ranks), batch_size=4, shuffle=True, num_workers=self.num_workers
        )
        module = Sums()
        trainer = make_trainer(list(callbacks), directory, max_epochs=3, accumulate_grad_batches=2, **arguments)
        trainer.fit(module, loader, ckpt_path=ckpt_path)
        return {"sums": module.sums.tolist(), "seen": module.seen, "next_draw": int(torch.randint(1 << 30, ()))}

    def start(self, directory: Path, *callbacks: Callback, seed: int, ckpt_path: Path | None = None) -> list[Any]:
        """Train in a process for each rank; return what each one returned, or an empty list if it was killed."""
        directory.mkdir()

        def main(rank: int) -> None:
            result = self.fit(directory / "run", callbacks, ckpt_path)
            (directory / f"{rank}.json").write_text(json.dumps(result), encoding="utf-8")

        outputs = [directory / f"{rank}.txt" for rank in range(self.num_ranks)]
        code = run_ranks(main, outputs=outputs, seed=seed, timeout_seconds=120)
        if code > 0:
            raise RuntimeError("\n".join(path.read_text(encoding="utf-8") for path in outputs))
        return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))]


RUNS = (KeptRun("workers", num_workers=2), KeptRun("ranks", num_ranks=2))


def write_files(version: str) -> None:
    """Write the files of the version of the package that is installed."""
    for run in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "killed")
            assert not run.start(path, FaultTolerance(every_n_train_steps=1), KillAt(KILLED_AT), seed=SEED)
            newest = max(path.rglob("*.ckpt"), key=lambda file: file.stat().st_mtime_ns)
            shutil.copy(newest, FILES / f"{run.name}-{version}.ckpt")


if __name__ == "__main__":
    write_files(sys.argv[1])
