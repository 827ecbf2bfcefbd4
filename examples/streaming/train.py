"""Train on handwritten digits in a bucket. Kill it and run it again: it ends with the same line.

    pip install "lightning-faulttolerant[s3,streaming]" scikit-learn
    export AWS_ENDPOINT_URL=http://localhost:5000    # any S3 server; not needed for Amazon S3
    python train.py s3://bucket/digits

The first start writes the data set to the bucket, in shards. Shards are fetched into `cache/` when they are needed.
After a kill, the loader continues in the middle of the epoch without delay: it reads no consumed sample again.
"""

import hashlib
import sys

import torch
from fsspec.core import url_to_fs
from lightning.pytorch import LightningModule, Trainer, seed_everything
from sklearn.datasets import load_digits
from torch import Tensor, nn

from lightning_faulttolerant import FaultTolerance, MDSWriter, StreamingDataLoader, StreamingDataset


def write(url: str) -> None:
    columns = {"image": "ndarray:float32:64", "label": "int"}
    with MDSWriter(out=url, columns=columns, size_limit="32kb", exist_ok=True) as writer:
        for image, label in zip(*load_digits(return_X_y=True), strict=True):
            writer.write({"image": (image / 16).astype("float32"), "label": int(label)})


class DigitNet(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch["image"]), batch["label"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def main(url: str) -> None:
    files, path = url_to_fs(url)
    if not files.exists(f"{path}/index.json"):  # the index is written last, so a data set with an index is complete
        write(url)
    seed_everything(1)
    digits = StreamingDataset(remote=url, local="cache", shuffle=True, batch_size=32)
    trainer = Trainer(max_epochs=20, accelerator="cpu", callbacks=[FaultTolerance()])
    model = DigitNet()
    trainer.fit(model, StreamingDataLoader(digits, batch_size=32, num_workers=2))
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
