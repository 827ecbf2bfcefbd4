"""SimCLR on handwritten digits, as the example for PyTorch Lightning of Lightly trains it."""

import pytorch_lightning as pl
import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from PIL import Image
from sklearn.datasets import load_digits


class SimCLR(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, stride=2), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(2)
        )
        self.projection_head = SimCLRProjectionHead(32, 32, 16)
        self.criterion = NTXentLoss()

    def forward(self, x):
        x = self.backbone(x).flatten(start_dim=1)
        return self.projection_head(x)

    def training_step(self, batch, batch_index):
        (x0, x1), _ = batch
        loss = self.criterion(self.forward(x0), self.forward(x1))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class Digits(torch.utils.data.Dataset):
    def __init__(self, transform):
        digits = load_digits()
        self.images, self.targets = digits.images[:64], digits.target[:64]
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = Image.fromarray((self.images[index] * 15).astype("uint8")).convert("RGB")
        return self.transform(image), self.targets[index]


if __name__ == "__main__":
    pl.seed_everything(0)
    model = SimCLR()
    dataset = Digits(SimCLRTransform(input_size=16, gaussian_blur=0.0))
    dataloader = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, drop_last=True, num_workers=2)
    trainer = pl.Trainer(max_epochs=2, devices=1, accelerator="cpu", enable_progress_bar=False, log_every_n_steps=4)
    trainer.fit(model=model, train_dataloaders=dataloader)
    print("loss", trainer.callback_metrics["train_loss"].item())
    print("weights", sum(p.double().sum() for p in model.parameters()).item())
