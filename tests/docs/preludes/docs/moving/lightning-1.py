import torch
from lightning.pytorch import Trainer

from tests.docs.small import MyModel, my_loader

model, train_loader = MyModel(), my_loader()
earlier = Trainer(enable_checkpointing=False)
earlier.fit(MyModel(), my_loader())
earlier.save_checkpoint(".pl_auto_save.ckpt")
checkpoint = torch.load(".pl_auto_save.ckpt")
torch.save({**checkpoint, "pytorch-lightning_version": "1.9.5"}, ".pl_auto_save.ckpt")
