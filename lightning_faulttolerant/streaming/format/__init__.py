"""The file formats: index, shards, encodings, compression, and hashes; reading and writing them."""
