"""Images through MONAI's CacheDataset, which each worker fills as it loads them."""

import lightning.pytorch as pl
import monai
import torch
from monai.data import CacheDataset, DataLoader
from monai.transforms import Compose, EnsureChannelFirst, RandFlip, RandGaussianNoise, Resize, ScaleIntensity
from sklearn.datasets import load_digits
from small_training import mean_square, train

if __name__ == "__main__":
    pl.seed_everything(0)
    monai.utils.set_determinism(seed=0)
    images = [torch.tensor(image, dtype=torch.float32) for image in load_digits().images[:48]]
    channel, resize = EnsureChannelFirst(channel_dim="no_channel"), Resize((32, 32))
    transform = Compose([channel, ScaleIntensity(), resize, RandFlip(prob=0.5), RandGaussianNoise(prob=0.5)])
    dataset = CacheDataset(images, transform, runtime_cache=True, progress=False)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    net = monai.networks.nets.Regressor(in_shape=(1, 32, 32), out_shape=(1,), channels=(4, 8), strides=(2, 2))
    train(net, mean_square, loader)
