from lightning.pytorch import Trainer

from tests.docs.small import MyModel, keep_buckets_in_memory, my_loader

keep_buckets_in_memory()
model, train_loader = MyModel(), my_loader()
earlier = Trainer(enable_checkpointing=False)
earlier.fit(MyModel(), my_loader())
earlier.save_checkpoint("last.ckpt")
