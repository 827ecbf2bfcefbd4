"""Patches of images through MONAI's ThreadDataLoader, whose thread reads ahead."""

import lightning.pytorch as pl
import monai
import torch
from monai.data import CacheDataset, ThreadDataLoader
from monai.transforms import Compose, EnsureChannelFirst, RandFlip, RandGaussianNoise, ScaleIntensity
from sklearn.datasets import load_digits
from small_training import mean_square, train

if __name__ == "__main__":
    pl.seed_everything(0)
    monai.utils.set_determinism(seed=0)
    images = [torch.tensor(image, dtype=torch.float32) for image in load_digits().images[:40]]
    channel = EnsureChannelFirst(channel_dim="no_channel")
    transform = Compose([channel, ScaleIntensity(), RandFlip(prob=0.5), RandGaussianNoise(prob=0.5)])
    dataset = CacheDataset(images, transform, progress=False)
    loader = ThreadDataLoader(dataset, batch_size=4, shuffle=True, num_workers=1, buffer_size=2)
    net = monai.networks.nets.Regressor(in_shape=(1, 8, 8), out_shape=(1,), channels=(4, 8), strides=(2, 2))
    train(net, mean_square, loader)
