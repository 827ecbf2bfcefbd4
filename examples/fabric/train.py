"""Train on handwritten digits with Fabric, on one rank or many. Kill it and run it again: it ends with the same line.

    python train.py            one rank
    python train.py 2          two ranks

`ResumableDataLoader` keeps its place even if Fabric inserts a distributed sampler. Each rank has its own state and
writes it into the checkpoint's directory. `AtomicDirectory` turns the directory into a checkpoint in one instant, when
all ranks have written.
"""

import sys
from pathlib import Path

import torch
from lightning.fabric import Fabric
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from lightning_faulttolerant import AtomicDirectory, ResumableDataLoader

NUM_EPOCHS = 12
EVERY_N_STEPS = 20


def main(num_ranks: int = 1) -> None:
    fabric = Fabric(accelerator="cpu", devices=num_ranks, strategy="ddp" if num_ranks > 1 else "auto")
    fabric.launch()
    torch.manual_seed(fabric.global_rank)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
    loader = fabric.setup_dataloaders(ResumableDataLoader(data, batch_size=32, shuffle=True))
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    model, optimizer = fabric.setup(net, torch.optim.Adam(net.parameters()))
    saver = AtomicDirectory("checkpoints", is_master=fabric.is_global_zero, keep_last=2)
    own_file = f"rank-{fabric.global_rank}.pt"
    step = first_epoch = 0

    latest = saver.latest()
    if latest is not None:
        checkpoint = torch.load(Path(latest) / own_file, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step, first_epoch = checkpoint["step"], checkpoint["epoch"]
        loader.load_state_dict(checkpoint["loader"])  # last, since it restores the random states
        fabric.print(f"Resumed after step {step}, in epoch {first_epoch}.")

    for epoch in range(first_epoch, NUM_EPOCHS):
        for batch, targets in loader:
            loss = nn.functional.cross_entropy(model(batch), targets)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            step += 1
            if step % EVERY_N_STEPS == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "epoch": epoch}
                directory = saver.prepare_checkpoint_directory()
                torch.save({**state, "loader": loader.state_dict()}, Path(directory) / own_file)
                saver.symlink_latest(directory)
        fabric.print(f"epoch {epoch}: loss {loss.item():.4f}")

    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    fabric.print(f"done: {step} steps, loss {loss.item():.4f}, sum of weights {weights!r}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
