"""A model and loaders of timm's, in a LightningModule: its loader keeps one iterator over all epochs."""

import lightning.pytorch as pl
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from small_training import train
from timm.data import create_loader
from timm.loss import LabelSmoothingCrossEntropy


class Digits(torch.utils.data.Dataset):
    """Images as timm's image folders give them; `create_loader` sets the transform."""

    transform = None

    def __init__(self, begin, end):
        digits = load_digits()
        self.images, self.targets = digits.images[begin:end], digits.target[begin:end]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = Image.fromarray((self.images[index] * 15).astype("uint8")).convert("RGB")
        return self.transform(image), int(self.targets[index])


def loss(net, batch):
    images, targets = batch
    return LabelSmoothingCrossEntropy()(net(images), targets)


if __name__ == "__main__":
    pl.seed_everything(0)
    options = {"input_size": (3, 32, 32), "batch_size": 8, "use_prefetcher": False, "num_workers": 2}
    options |= {"use_multi_epochs_loader": True, "device": torch.device("cpu")}
    loaders = [create_loader(Digits(0, 64), is_training=True, re_prob=0.2, **options)]
    loaders += [create_loader(Digits(64, 96), **options)]
    train(timm.create_model("test_vit", num_classes=10, img_size=32, drop_rate=0.1), loss, *loaders)
