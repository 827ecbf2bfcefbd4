"""Each start writes to its own directory, named by the time."""

from datetime import datetime

from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from tiny import Net, loader

seed_everything(1)
output = f"runs/{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"
model = Net()
trainer = Trainer(
    max_epochs=2,
    accelerator="cpu",
    default_root_dir=output,
    logger=CSVLogger(output),
    log_every_n_steps=1,
    callbacks=[Interrupt()],
)
trainer.fit(model, loader())
finished("fit", model)
