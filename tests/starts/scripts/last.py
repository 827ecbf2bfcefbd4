"""Restart logic in the script itself: continue from last.ckpt if it exists."""

from pathlib import Path

from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import Net, loader

seed_everything(1)
last = Path("checkpoints/last.ckpt")
saving = ModelCheckpoint(dirpath=last.parent, save_last=True, every_n_train_steps=2)
model = Net()
trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=[saving, Interrupt()])
trainer.fit(model, loader(), ckpt_path=last if last.exists() else None)
finished("fit", model)
