"""Train one model for each fold."""

from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from tiny import Net, Noisy
from torch.utils.data import DataLoader, Subset

seed_everything(1)
data = Noisy(36)
for fold in range(3):
    rows = Subset(data, [index for index in range(36) if index % 3 != fold])
    model = Net()
    trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=[Interrupt(f"fold-{fold}")])
    trainer.fit(model, DataLoader(rows, batch_size=4, shuffle=True))
    finished(f"fold-{fold}", model)
