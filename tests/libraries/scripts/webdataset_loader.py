"""Shards of WebDataset's and its WebLoader, as its documentation uses them."""

import lightning.pytorch as pl
import torch
import webdataset as wds
from sklearn.datasets import load_digits
from small_training import train


def write_shards():
    digits = load_digits()
    with wds.ShardWriter("digits-%06d.tar", maxcount=20, verbose=0) as sink:
        for index in range(80):
            image = torch.tensor(digits.images[index]).flatten() / 16
            sink.write({"__key__": f"{index:06d}", "image.pth": image, "cls": int(digits.target[index])})


def loss(net, batch):
    images, labels = batch
    return torch.nn.functional.cross_entropy(net(images.float()), labels)


if __name__ == "__main__":
    pl.seed_everything(0)
    write_shards()
    dataset = wds.WebDataset("digits-{000000..000003}.tar", shardshuffle=4, seed=0).shuffle(20, seed=0)
    dataset = dataset.decode().to_tuple("image.pth", "cls").batched(8)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)
    loader = loader.unbatched().shuffle(20, seed=0).batched(8).with_epoch(10)
    net = torch.nn.Sequential(torch.nn.Linear(64, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 10))
    train(net, loss, loader)
