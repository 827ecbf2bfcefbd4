import os

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

from lightning_faulttolerant import FaultTolerance

os.makedirs("predictions")
model, loader = BoringModel(), DataLoader(RandomDataset(32, 8), batch_size=2)
loaders = loader
