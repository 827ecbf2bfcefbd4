"""Cuts read lazily from a manifest, in batches by duration, as the recipes built on Lhotse load them."""

from pathlib import Path

import lightning.pytorch as pl
import torch
from lhotse import CutSet
from lhotse.dataset import DynamicCutSampler
from lhotse.testing.dummies import dummy_cut
from small_training import mean_square, train
from torch.utils.data import DataLoader, Dataset


class Durations(Dataset):
    """Gives a batch for a set of cuts, as Lhotse's data sets do."""

    def __getitem__(self, cuts: CutSet):
        return torch.tensor([[cut.duration, float(cut.num_samples)] for cut in cuts])


if __name__ == "__main__":
    pl.seed_everything(0)
    manifest = Path("cuts.jsonl.gz")
    if not manifest.exists():
        CutSet.from_cuts(dummy_cut(n, duration=1.0 + (n * 37 % 50) / 10) for n in range(120)).to_file(manifest)
    cuts = CutSet.from_jsonl_lazy(manifest).repeat(2).shuffle(buffer_size=30)
    sampler = DynamicCutSampler(cuts, max_duration=30.0, shuffle=True)
    loader = DataLoader(Durations(), sampler=sampler, batch_size=None, num_workers=2)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    train(net, mean_square, loader, max_epochs=2, use_distributed_sampler=False)
