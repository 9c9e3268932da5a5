"""Data: Text, Gaussians and Instructions, each a frozen record of settings that loads examples and partitions them into shards.

A batch is read by shard and position. Readers keep no cursor: spec, seed, shard and position alone decide its content.
"""
