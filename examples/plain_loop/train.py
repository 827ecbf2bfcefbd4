"""Train on handwritten digits in a plain PyTorch loop. Kill it and run it again: it ends with the same line.

`ResumableDataLoader` is a `DataLoader` with `state_dict()` and `load_state_dict()`. Its state holds the place in the
epoch, the random states of its workers, and those of this process, which dropout uses. Whenever the process dies,
`atomic_torch_save` leaves either the old file or the new one.
"""

from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

from lightning_faulttolerant import ResumableDataLoader, atomic_torch_save

NUM_EPOCHS = 6
EVERY_N_STEPS = 20
CHECKPOINT = Path("checkpoint.pt")


class NoisyDigits(Dataset):
    def __init__(self) -> None:
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.images[index] + 0.1 * torch.randn(64), self.labels[index]  # the noise is drawn in the workers


def main() -> None:
    torch.manual_seed(0)
    data = NoisyDigits()
    loader = ResumableDataLoader(data, batch_size=32, shuffle=True, num_workers=2, persistent_workers=True)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.3), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters())
    step = 0

    if CHECKPOINT.exists():
        checkpoint = torch.load(CHECKPOINT, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        step = checkpoint["step"]
        loader.load_state_dict(checkpoint["loader"])  # last, since it restores the random states
        print(f"Resumed after step {step}, in epoch {loader.epoch}.")

    for epoch in range(loader.epoch, NUM_EPOCHS):
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % EVERY_N_STEPS == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                atomic_torch_save({**state, "loader": loader.state_dict()}, CHECKPOINT)
        print(f"epoch {epoch}: loss {loss.item():.4f}")

    model.eval()
    accuracy = (model(data.images).argmax(1) == data.labels).float().mean().item()
    weights = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"done: {step} steps, accuracy {accuracy:.4f}, sum of weights {weights!r}")


if __name__ == "__main__":
    main()
