"""What is in the files: index, shards, encodings, compression, hashes; reading and writing them."""
