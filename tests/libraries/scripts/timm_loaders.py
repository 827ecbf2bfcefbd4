"""A model and loaders of timm's, in a LightningModule: its loader keeps one iterator over all epochs."""

import lightning.pytorch as pl
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits
from timm.data import create_loader
from timm.loss import LabelSmoothingCrossEntropy
from timm.optim import create_optimizer_v2


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


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = timm.create_model("test_vit", num_classes=10, img_size=32, drop_rate=0.1)
        self.loss = LabelSmoothingCrossEntropy()

    def training_step(self, batch, batch_idx):
        images, targets = batch
        loss = self.loss(self.model(images), targets)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, targets = batch
        self.log("val_accuracy", (self.model(images).argmax(1) == targets).float().mean())

    def configure_optimizers(self):
        return create_optimizer_v2(self.model, opt="adamw", lr=1e-3)


if __name__ == "__main__":
    pl.seed_everything(0)
    train = create_loader(
        Digits(0, 64), input_size=(3, 32, 32), batch_size=8, is_training=True, use_prefetcher=False, re_prob=0.2,
        num_workers=2, use_multi_epochs_loader=True, device=torch.device("cpu"),
    )  # fmt: skip
    val = create_loader(
        Digits(64, 96), input_size=(3, 32, 32), batch_size=8, use_prefetcher=False, num_workers=2,
        use_multi_epochs_loader=True, device=torch.device("cpu"),
    )  # fmt: skip
    model = Classifier()
    trainer = pl.Trainer(max_epochs=3, accelerator="cpu", enable_progress_bar=False, logger=False)
    trainer.fit(model, train, val)
    print("metrics", {name: value.item() for name, value in trainer.callback_metrics.items()})
    print("weights", sum(p.double().sum() for p in model.parameters()).item())
