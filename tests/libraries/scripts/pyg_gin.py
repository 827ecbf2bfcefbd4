"""PyTorch Geometric's example examples/pytorch_lightning/gin.py, on graphs made here, smaller, and with 2 workers."""

import lightning.pytorch as pl
import torch
from torch_geometric.data import Data, InMemoryDataset
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.transforms import OneHotDegree
from torchmetrics import Accuracy


class Graphs(InMemoryDataset):
    """Rings with few or many chords. Like TUDataset, it keeps each graph that it has taken out."""

    def __init__(self):
        super().__init__()
        one_hot = OneHotDegree(29)
        self.data, self.slices = self.collate([one_hot(graph(n)) for n in range(150)])


def graph(n: int) -> Data:
    generator = torch.Generator().manual_seed(n)
    nodes = 20 + n % 11
    ring = torch.stack([torch.arange(nodes), (torch.arange(nodes) + 1) % nodes])
    chords = torch.randint(nodes, (2, 4 if n % 2 else 16), generator=generator)
    edges = torch.cat([ring, chords], 1)
    return Data(edge_index=torch.cat([edges, edges.flip(0)], 1).unique(dim=1), y=torch.tensor([n % 2]), num_nodes=nodes)


class Model(pl.LightningModule):
    def __init__(
        self, in_channels: int, out_channels: int, hidden_channels: int = 64, num_layers: int = 3, dropout: float = 0.5
    ):
        super().__init__()
        self.gnn = GIN(in_channels, hidden_channels, num_layers, dropout=dropout, jk="cat")
        self.classifier = MLP([hidden_channels, hidden_channels, out_channels], norm="batch_norm", dropout=dropout)
        self.train_acc = Accuracy(task="multiclass", num_classes=out_channels)
        self.val_acc = Accuracy(task="multiclass", num_classes=out_channels)
        self.test_acc = Accuracy(task="multiclass", num_classes=out_channels)

    def forward(self, x, edge_index, batch):
        x = self.gnn(x, edge_index)
        x = global_add_pool(x, batch)
        return self.classifier(x)

    def training_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index, data.batch)
        loss = torch.nn.functional.cross_entropy(y_hat, data.y)
        self.train_acc(y_hat.softmax(dim=-1), data.y)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index, data.batch)
        self.val_acc(y_hat.softmax(dim=-1), data.y)
        self.log("val_acc", self.val_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=len(data))

    def test_step(self, data, batch_idx):
        y_hat = self(data.x, data.edge_index, data.batch)
        self.test_acc(y_hat.softmax(dim=-1), data.y)
        self.log("test_acc", self.test_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=len(data))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


if __name__ == "__main__":
    pl.seed_everything(0)
    dataset = Graphs().shuffle()
    test_dataset = dataset[: len(dataset) // 10]
    val_dataset = dataset[len(dataset) // 10 : 2 * len(dataset) // 10]
    train_dataset = dataset[2 * len(dataset) // 10 :]
    datamodule = LightningDataset(train_dataset, val_dataset, test_dataset, batch_size=16, num_workers=2)
    model = Model(dataset.num_node_features, dataset.num_classes)
    checkpoint = pl.callbacks.ModelCheckpoint(monitor="val_acc", save_top_k=1, mode="max")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=3,
        log_every_n_steps=5,
        callbacks=[checkpoint],
        enable_progress_bar=False,
        logger=False,
    )
    trainer.fit(model, datamodule)
    [metrics] = trainer.test(model, datamodule=datamodule)
    print("metrics", metrics)
    print("weights", sum(p.double().sum() for p in model.parameters()).item())
