from tests.docs.small import keep_buckets_in_memory

keep_buckets_in_memory()
