"""The user's own loop: islands around any module and any torch optimizer, with the same algorithms as everywhere.

A round of an algorithm is a coroutine. Where it waits for training or for a gradient, the user's loop goes on; each step of the
user's optimizer brings the round further, up to its exchange and into the next round.
"""
