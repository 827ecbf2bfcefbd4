"""The hyperparameters hold the name of the run, which contains the time."""

from datetime import datetime

from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from tiny import SavingNet, loader

seed_everything(1)
model = SavingNet(lr=0.1, run_name=f"run-{datetime.now():%Y-%m-%d_%H-%M-%S}")
trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=[Interrupt()])
trainer.fit(model, loader())
finished("fit", model)
