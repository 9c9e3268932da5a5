"""`atoll.islands`: the algorithms of this package around a user's own PyTorch loop.

An algorithm's round is a coroutine. It suspends where it needs a training step or a gradient. Each step of the user's loop resumes
it, up to the exchange with the other islands and into the next round.
"""
