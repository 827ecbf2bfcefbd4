"""Images through MONAI's CacheDataset, which each worker fills as it loads them."""

import lightning.pytorch as pl
import monai
import torch
from monai.data import CacheDataset, DataLoader
from monai.transforms import Compose, EnsureChannelFirst, RandFlip, RandGaussianNoise, Resize, ScaleIntensity
from sklearn.datasets import load_digits


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = monai.networks.nets.Regressor(in_shape=(1, 32, 32), out_shape=(1,), channels=(4, 8), strides=(2, 2))

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) ** 2).mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(0)
    monai.utils.set_determinism(seed=0)
    images = [torch.tensor(image, dtype=torch.float32) for image in load_digits().images[:48]]
    transform = Compose(
        [
            EnsureChannelFirst(channel_dim="no_channel"),
            ScaleIntensity(),
            Resize((32, 32)),
            RandFlip(prob=0.5),
            RandGaussianNoise(prob=0.5),
        ]
    )
    dataset = CacheDataset(images, transform, runtime_cache=True, progress=False)
    loader = DataLoader(dataset, batch_size=4, shuffle=True, num_workers=2)
    model = Net()
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", enable_progress_bar=False, logger=False)
    trainer.fit(model, loader)
    print("loss", trainer.callback_metrics["train_loss"].item())
    print("weights", sum(p.double().sum() for p in model.parameters()).item())
