"""Train one model; a module of a package."""

import argparse

from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from tiny import SavingNet, loader

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--tag", default="")
arguments = parser.parse_args()

seed_everything(1)
model = SavingNet(lr=arguments.lr, hidden=8)
logger = CSVLogger("logs")
trainer = Trainer(max_epochs=2, accelerator="cpu", logger=logger, log_every_n_steps=1, callbacks=[Interrupt()])
trainer.fit(model, loader(batch_size=4))
finished("fit", model)
