"""The user's own loop: islands around any module and any torch optimizer, with the same algorithms as everywhere.

A round of an algorithm is a coroutine. Where it waits for training or for a gradient, the user's loop goes on; each step of the
user's optimizer brings the round further, up to its exchange and into the next round.
"""

from atoll.loop.islands import Islands as Islands
from atoll.loop.islands import islands as islands
from atoll.loop.joining import Joined as Joined
from atoll.loop.joining import join as join
