"""What the scripts about loaders share: a small training, which prints what it has come to."""

import lightning.pytorch as pl
import torch


class Module(pl.LightningModule):
    """A network with a loss."""

    def __init__(self, net, loss):
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch, batch_idx):
        loss = self.loss(self.net, batch)
        self.log("train_loss", loss, batch_size=1)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(self.net, batch), batch_size=1)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def train(net, loss, *loaders, **options):
    """Train a network, and print metrics and weights."""
    own = {"max_epochs": 3, "accelerator": "cpu", "enable_progress_bar": False, "logger": False, **options}
    trainer, model = pl.Trainer(**own), Module(net, loss)
    trainer.fit(model, *loaders)
    print("metrics", {name: value.item() for name, value in trainer.callback_metrics.items()})
    print("weights", sum(p.double().sum() for p in model.parameters()).item())


def mean_square(net, batch):
    """Return a loss for batches without targets."""
    return (net(batch) ** 2).mean()
