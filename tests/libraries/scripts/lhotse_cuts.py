"""Cuts in buckets, as Lhotse's documentation and the recipes built on it load them."""

import lightning.pytorch as pl
import torch
from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler
from lhotse.testing.dummies import dummy_cut
from small_training import mean_square, train
from torch.utils.data import DataLoader, Dataset


class Durations(Dataset):
    """Gives a batch for a set of cuts, as Lhotse's data sets do."""

    def __getitem__(self, cuts: CutSet):
        return torch.tensor([[cut.duration, float(cut.num_samples)] for cut in cuts])


if __name__ == "__main__":
    pl.seed_everything(0)
    cuts = CutSet.from_cuts(dummy_cut(n, duration=1.0 + (n * 37 % 50) / 10) for n in range(120))
    sampler = DynamicBucketingSampler(cuts, max_duration=30.0, shuffle=True, num_buckets=4, drop_last=True)
    loader = DataLoader(Durations(), sampler=sampler, batch_size=None, num_workers=2)
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
    train(net, mean_square, loader, max_epochs=2, use_distributed_sampler=False)
