"""Cuts read lazily from a manifest, in batches by duration, as the recipes built on Lhotse load them."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from lhotse import CutSet
from lhotse.dataset import DynamicCutSampler
from lhotse.testing.dummies import dummy_cut
from torch.utils.data import DataLoader, Dataset


class Durations(Dataset):
    """Gives a batch for a set of cuts, as Lhotse's data sets do."""

    def __getitem__(self, cuts: CutSet):
        return {"features": torch.tensor([[cut.duration, float(cut.num_samples)] for cut in cuts])}


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = (self.layer(batch["features"]) ** 2).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(0)
    manifest = Path("cuts.jsonl.gz")
    if not manifest.exists():
        CutSet.from_cuts(dummy_cut(n, duration=1.0 + (n * 37 % 50) / 10) for n in range(120)).to_file(manifest)
    cuts = CutSet.from_jsonl_lazy(manifest).repeat(2).shuffle(buffer_size=30)
    sampler = DynamicCutSampler(cuts, max_duration=30.0, shuffle=True)
    loader = DataLoader(Durations(), sampler=sampler, batch_size=None, num_workers=2)
    model = Model()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", enable_progress_bar=False, logger=False, use_distributed_sampler=False
    )
    trainer.fit(model, loader)
    print("loss", trainer.callback_metrics["train_loss"].item())
    print("weights", sum(p.double().sum() for p in model.parameters()).item())
