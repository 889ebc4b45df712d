"""What the main loop of the ranks shares."""

from engine.worker import share
from tests.support.ranks import Ranks
from tp import World

EVENTS = [[b"a", b"", b"\0" * 100_000], [], [b"b"]]  # of three steps


def shared(world: World) -> list[list[bytes]]:
    return [share(world, events if world.rank == 0 else [b"of rank 1"]) for events in EVENTS]


def test_all_ranks_get_the_events_of_rank_0(ranks: Ranks) -> None:
    assert ranks.run(2, shared) == [EVENTS, EVENTS]
