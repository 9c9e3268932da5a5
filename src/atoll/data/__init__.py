"""Data: Text, Gaussians and Instructions, each a frozen spec that loads examples and deals them to shards.

A batch is read by shard and position. Readers keep no cursor: spec, seed, shard and position alone decide its content.
"""
