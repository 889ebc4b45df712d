"""Which replica a request goes to: the one that knows most of its prompt, unless others have much less to do.

Standard library only, so that tests need no router.
"""

import json
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# What a prompt is made of, in the order in which chat templates write it. The adapter has a prefix cache of its own.
FIELDS = ("model", "tools", "system", "instructions", "messages", "input", "prompt")
PIECE = 128  # characters of a prompt that a key stands for, about two blocks of 16 tokens in a server's prefix cache
MOST_PIECES = 1024  # of a prompt; what follows changes no decision
MOST_BYTES = 1 << 20  # of a body that is read for its prompt; longer ones take the time of others
MOST_KEYS = 65536  # remembered for each replica, the newest: 8M characters, more than most KV caches hold
SLACK = 8  # requests that a replica may have more than the idlest one and still get those whose prompt it knows


@dataclass(frozen=True)
class Call:
    """A request on its way to a replica. keys: see `prefix_keys`. avoid: replicas that have failed it."""

    method: str
    target: str  # path and query, percent-encoded
    headers: list[tuple[str, str]]
    body: bytes
    keys: tuple[int, ...]
    avoid: frozenset[str] = frozenset()


def prefix_keys(body: bytes) -> tuple[int, ...]:
    """A key for each prefix of whole pieces of the prompt in a JSON body. Equal prefixes have equal keys within this process.

    A longer conversation has the keys of the shorter one, and more. Without a readable prompt there are none.
    """
    try:
        fields = json.loads(body) if len(body) <= MOST_BYTES else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        return ()
    text = "".join(json.dumps(fields[name]) for name in FIELDS if name in fields)[: PIECE * MOST_PIECES]
    keys, key = [], 0
    for at in range(0, len(text) - PIECE + 1, PIECE):
        key = hash((key, text[at : at + PIECE]))
        keys.append(key)
    return tuple(keys)


class Affinity:
    """Remembers which prefixes each replica has computed."""

    def __init__(self, slack: int = SLACK, most_keys: int = MOST_KEYS) -> None:
        self._slack, self._most = slack, most_keys
        self._known: dict[str, OrderedDict[int, None]] = {}

    def rank(self, keys: Sequence[int], loads: Mapping[str, int]) -> list[str]:
        """The replicas, best first. loads: the requests that each has, running and waiting; others are forgotten.

        First are those with at most `slack` requests more than the idlest: by how many keys they know, then by load. The others
        follow by load. Equal ones are in random order.
        """
        self._known = {name: known for name, known in self._known.items() if name in loads}
        limit = min(loads.values(), default=0) + self._slack

        def order(name: str) -> tuple[int, int, float]:
            return (-self._depth(name, keys) if loads[name] <= limit else 1), loads[name], random.random()

        return sorted(loads, key=order)

    def learn(self, name: str, keys: Sequence[int]) -> None:
        """Note that a replica computes the prompt with these keys."""
        known = self._known.setdefault(name, OrderedDict())
        for key in keys:
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._most:
            known.popitem(last=False)

    def _depth(self, name: str, keys: Sequence[int]) -> int:
        known = self._known.get(name, OrderedDict())
        return next((depth for depth, key in enumerate(keys) if key not in known), len(keys))
