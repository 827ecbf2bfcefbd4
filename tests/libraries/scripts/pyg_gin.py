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
    def __init__(self, in_channels: int, out_channels: int, hidden_channels: int = 64, dropout: float = 0.5):
        super().__init__()
        self.gnn = GIN(in_channels, hidden_channels, 3, dropout=dropout, jk="cat")
        self.classifier = MLP([hidden_channels, hidden_channels, out_channels], norm="batch_norm", dropout=dropout)
        for stage in ("train", "val", "test"):
            setattr(self, f"{stage}_acc", Accuracy(task="multiclass", num_classes=out_channels))

    def step(self, stage, data):
        y_hat = self.classifier(global_add_pool(self.gnn(data.x, data.edge_index), data.batch))
        accuracy = getattr(self, f"{stage}_acc")
        accuracy(y_hat.softmax(dim=-1), data.y)
        self.log(f"{stage}_acc", accuracy, prog_bar=True, on_step=False, on_epoch=True, batch_size=len(data))
        return torch.nn.functional.cross_entropy(y_hat, data.y)

    def training_step(self, data, batch_idx):
        return self.step("train", data)

    def validation_step(self, data, batch_idx):
        self.step("val", data)

    def test_step(self, data, batch_idx):
        self.step("test", data)

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
    own = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}
    trainer = pl.Trainer(max_epochs=3, log_every_n_steps=5, callbacks=[checkpoint], **own)
    trainer.fit(model, datamodule)
    [metrics] = trainer.test(model, datamodule=datamodule)
    print("metrics", metrics)
    print("weights", sum(p.double().sum() for p in model.parameters()).item())
