"""Cuts in buckets, as Lhotse's documentation and the recipes built on it load them."""

import lightning.pytorch as pl
import torch
from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler
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
    cuts = CutSet.from_cuts(dummy_cut(n, duration=1.0 + (n * 37 % 50) / 10) for n in range(120))
    sampler = DynamicBucketingSampler(cuts, max_duration=30.0, shuffle=True, num_buckets=4, drop_last=True)
    loader = DataLoader(Durations(), sampler=sampler, batch_size=None, num_workers=2)
    model = Model()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", enable_progress_bar=False, logger=False, use_distributed_sampler=False
    )
    trainer.fit(model, loader)
    print("loss", trainer.callback_metrics["train_loss"].item())
    print("weights", sum(p.double().sum() for p in model.parameters()).item())
