"""The cells of a notebook."""

# %%
from interrupt import Interrupt, finished
from lightning.pytorch import Trainer, seed_everything
from tiny import Net, loader

LR = 0.1

# %%
seed_everything(1)
model = Net(LR)

# %%
trainer = Trainer(max_epochs=2, accelerator="cpu", logger=False, callbacks=[Interrupt(f"lr={LR}")])
trainer.fit(model, loader())

# %%
finished(f"lr={LR}", model)
