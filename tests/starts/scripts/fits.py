"""Train a model, then train it again on other data."""

from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from tiny import Net, loader

seed_everything(1)
model = Net()
trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=[Interrupt("pretrain")])
trainer.fit(model, loader(num_rows=48))
finished("pretrain", model)

model.lr = 0.01
trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=[Interrupt("finetune")])
trainer.fit(model, loader())
finished("finetune", model)
