import torch
from lightning.pytorch import Trainer

from lightning_faulttolerant import StreamingDataLoader, StreamingDataset
from lightning_faulttolerant.streaming import MDSWriter
from tests.docs.small import MyModel, keep_buckets_in_memory, my_dataset, my_loader

keep_buckets_in_memory()
with MDSWriter(out="s3://bucket/data", columns={"y": "int"}) as writer:
    for number in range(40):
        writer.write({"y": number})
dataset = my_dataset()
state = {"model": MyModel().state_dict()}
loader = StreamingDataLoader(
    StreamingDataset("cache", remote="s3://bucket/data", shuffle=True, batch_size=32), batch_size=32
)
next(iter(loader))
checkpoint = {"loader": loader.state_dict()}
