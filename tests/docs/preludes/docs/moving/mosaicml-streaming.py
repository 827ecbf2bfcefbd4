from lightning_faulttolerant import MDSWriter
from tests.docs.small import keep_buckets_in_memory

keep_buckets_in_memory()
with MDSWriter(out="s3://bucket/data", columns={"n": "int"}, size_limit="1kb") as writer:
    for n in range(1000):
        writer.write({"n": n})
