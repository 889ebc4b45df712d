import json
import random

from deploy.routing import PIECE, Affinity, prefix_keys


def chat(*turns: str, **more: object) -> bytes:
    return json.dumps({**more, "messages": [{"role": "user", "content": turn} for turn in turns]}).encode()


def word(rng: random.Random, length: int) -> str:
    return "".join(rng.choices("abcdefgh ", k=length))


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of keys that two prompts share; none follows one that differs."""
    same = [a == b for a, b in zip(one, other, strict=False)]
    depth = same.index(False) if False in same else len(same)
    assert not any(same[depth:])
    return depth


def test_keys_are_those_of_the_common_prefix(seed):
    rng = random.Random(seed)
    system, first, second = word(rng, 5 * PIECE), word(rng, 3 * PIECE), word(rng, 3 * PIECE)
    keys = prefix_keys(chat(system, first, model="m", temperature=rng.random()))
    longer = prefix_keys(chat(system, first, second, model="m", max_tokens=3))
    assert common(keys, longer) >= len(keys) - 1 >= 7  # the last piece may have the end of the list
    assert 5 <= common(keys, prefix_keys(chat(system, second, model="m"))) < len(keys)
    assert common(keys, prefix_keys(chat(system, first, model="adapter"))) == 0


def test_bodies_without_a_prompt_have_no_keys(seed):
    rng = random.Random(seed)
    for body in (b"", b"[1]", b"{", b"[" * 100_000, b'{"prompt": "short"}', b"\xff", bytes(rng.randbytes(300))):
        assert prefix_keys(body) == ()
    for size, pieces in ((PIECE - 1, 0), (PIECE, 1), (3 * PIECE - 1, 2), (3 * PIECE, 3)):
        assert len(prefix_keys(json.dumps({"prompt": "x" * (size - 2)}).encode())) == pieces  # 2 for the quotes
    assert len(prefix_keys(json.dumps({"prompt": [rng.randrange(99) for _ in range(9 * PIECE)]}).encode())) >= 18


def test_a_replica_is_chosen_by_prefix_unless_it_has_too_much_to_do(seed):
    rng = random.Random(seed)
    affinity, keys = Affinity(slack=4), rng.sample(range(2**60), 10)
    load = rng.randrange(100)
    affinity.learn("a", keys[:3])
    affinity.learn("b", keys[:8])
    assert affinity.rank(keys, {"a": load, "b": load + 4, "c": load}) == ["b", "a", "c"]
    assert affinity.rank(keys, {"a": load, "b": load + 5, "c": load}) == ["a", "c", "b"]
    assert affinity.rank((), {"a": load + 1, "b": load + 9, "c": load}) == ["c", "a", "b"]
    assert affinity.rank(keys, {"a": load + 1, "c": load}) == ["a", "c"]  # b has ended …
    assert affinity.rank(keys, {"b": load + 1, "c": load}) == ["c", "b"]  # … and is a new one
    assert affinity.rank(keys, {}) == []


def test_old_prefixes_are_forgotten_and_idle_replicas_share_what_is_unknown():
    affinity = Affinity(most_keys=4)
    affinity.learn("a", (1, 2, 3))
    affinity.learn("a", (1, 5, 6))
    assert affinity.rank((2,), {"a": 1, "b": 0})[0] == "b"
    assert affinity.rank((1, 5), {"a": 1, "b": 0})[0] == "a"
    assert {Affinity().rank((1, 2), {"a": 0, "b": 0})[0] for _ in range(100)} == {"a", "b"}
