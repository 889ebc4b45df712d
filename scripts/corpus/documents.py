"""A deterministic synthetic English corpus.

The corpus trains models of a few million parameters whose answers are either right or wrong. It has stories told from a
simulated world, questions about them, and small exact tasks. Document `i` depends only on (seed, i, split, kind), so any
range can be generated independently, in parallel and repeatedly.

Every document has a key that identifies its content (the operands, the list, the cast and the things of a story). A hash
of the key puts 1/16 of all keys into the split "heldout" and the rest into "train", so the splits never share a key.
The key of a requested story is the animal and the item asked for. Its cast may also be in a story of the other split.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypedDict

from errors import UserError
from scripts.corpus import words
from scripts.corpus.plots import ITEM_PLOTS
from scripts.corpus.stories import article, draw_cast, tell_story

# Share of documents by kind. Shares of tokens differ, because a story is about ten times as long as a sum.
# Counting needs most examples: with a share of 0.09 models counted right in 58 to 68 %.
MIXTURE: dict[str, float] = {
    "story": 0.163,
    "question": 0.211,
    "arithmetic": 0.146,
    "sorting": 0.073,
    "counting": 0.26,
    "copying": 0.073,
    "dialogue": 0.041,  # several turns, or a system message
    "request": 0.033,  # "Tell me a story about a fox and a lantern."
}
KINDS = tuple(MIXTURE)
SPLITS = ("train", "heldout")
HELDOUT_SHARE = 16  # one key in this many is held out

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")  # ids 0 to 4
BEGIN, END, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS


class Message(TypedDict):
    """One turn of a chat; `role` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True)
class Document:
    """A story (`text`) or a chat (`messages`). `key` identifies its content and determines its split."""

    kind: str
    text: str | None = None
    messages: tuple[Message, ...] = ()
    key: str = ""

    @property
    def answer(self) -> str:
        """The content of the last message, which is the assistant's. Empty for a story."""
        return self.messages[-1]["content"] if self.messages else ""

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """All messages except the answer."""
        return self.messages[:-1]


def is_heldout(key: str) -> bool:
    """Whether `key` belongs to the split "heldout"."""
    return (zlib.crc32(key.encode()) * 0x9E3779B1 >> 16) % HELDOUT_SHARE == 0


def _chat(kind: str, key: str, prompt: str, answer: str) -> Document:
    messages: tuple[Message, ...] = ({"role": "user", "content": prompt}, {"role": "assistant", "content": answer})
    return Document(kind, None, messages, key)


# ------------------------------------------------------------------------------------------------------- stories


def _story(rng: random.Random, heldout: bool) -> Document:
    cast = draw_cast(rng)
    while is_heldout(cast.key) != heldout:
        cast = draw_cast(rng)
    return Document("story", tell_story(rng, cast)[0], (), cast.key)


def _question(rng: random.Random, heldout: bool) -> Document:
    cast = draw_cast(rng)
    while is_heldout(cast.key) != heldout:
        cast = draw_cast(rng)
    text, world = tell_story(rng, cast, short=True)
    questions = world.questions()
    central = [entry for entry in questions if entry[0][0] not in ("species", "colour", "went")]
    (kind, *arguments), answer = rng.choice(central if rng.random() < 0.7 else questions)
    asked = rng.choice(words.QUESTIONS[kind]).format(*arguments)
    return _chat("question", cast.key, f"{text}\n{asked}", answer)


def _request(rng: random.Random) -> Document:
    species, noun = rng.choice(words.ANIMALS), rng.choice(words.ITEMS)
    text, _ = tell_story(rng, draw_cast(rng, species, noun), rng.random() < 0.5, ITEM_PLOTS)
    phrasing = rng.choice((
        "Tell me a story about {} and {}.", "Write a story about {} and {}.", "Can you tell me a story with {} and {}?",
        "I would like a story about {} and {}.",
    ))  # fmt: skip
    return _chat("request", f"request:{species},{noun}", phrasing.format(article(species), article(noun)), text)


# ------------------------------------------------------------------------------------------------------- exact tasks

_SUMS = {
    "+": ("What is {0} plus {1}?", "{0} + {1} =", "Add {0} and {1}.", "What is the sum of {0} and {1}?"),
    "-": ("What is {0} minus {1}?", "{0} - {1} =", "Subtract {1} from {0}.", "Take {1} away from {0}."),
    "x": ("What is {0} times {1}?", "{0} x {1} =", "Multiply {0} by {1}.", "What is the product of {0} and {1}?"),
}
_ORDERS = {
    ("number", False): ("Sort from smallest to largest: {}", "Put these numbers in ascending order: {}"),
    ("number", True): ("Sort from largest to smallest: {}", "Put these numbers in descending order: {}"),
    ("word", False): ("Sort in alphabetical order: {}", "Put these words in alphabetical order: {}"),
    ("word", True): ("Sort in reverse alphabetical order: {}",),
}
_TIMES = {2: ("two times", "twice"), 3: ("three times",), 4: ("four times",)}


def _arithmetic(rng: random.Random) -> Document:
    operation = rng.choice("++--x")
    first, second = (rng.randint(0, 12 if operation == "x" else 99) for _ in range(2))
    low, high = min(first, second), max(first, second)
    if operation == "-":
        first, second = high, low
    result = {"+": first + second, "-": first - second, "x": first * second}[operation]
    prompt = rng.choice(_SUMS[operation]).format(first, second)
    return _chat("arithmetic", f"arithmetic:{low}{operation}{high}", prompt, str(result))


def _sorting(rng: random.Random) -> Document:
    size, descending = rng.randint(3, 6), rng.random() < 0.3
    kind = rng.choice(("number", "word"))
    drawn: list[Any] = rng.sample(range(100), size) if kind == "number" else rng.sample(words.WORDS, size)
    answer = ", ".join(map(str, sorted(drawn, reverse=descending)))
    prompt = rng.choice(_ORDERS[kind, descending]).format(", ".join(map(str, drawn)))
    return _chat("sorting", "sorting:" + ",".join(map(str, sorted(drawn))), prompt, answer)


def _counting(rng: random.Random) -> Document:
    size = rng.randint(2, 9)
    pool: Sequence[Any] = rng.choice((words.WORDS, words.STICKERS, range(10)))
    few = [str(entry) for entry in rng.sample(pool, min(size, rng.randint(2, 3)))]
    if rng.random() < 0.6:
        listed = [rng.choice(few) for _ in range(size)]
        target = rng.choice(few)
        content, answer = f"{target}: {', '.join(listed)}", listed.count(target)
        prompt = rng.choice(("How many times does {} appear: {}", "Count how often {} appears: {}"))
        prompt = prompt.format(target, ", ".join(listed))
    else:
        listed = [str(entry) for entry in rng.choices(pool, k=size)]
        content, answer = ", ".join(listed), size
        prompt = rng.choice(("How many items are in this list: {}", "Count the items: {}")).format(content)
    return _chat("counting", f"counting:{content}", prompt, str(answer))


def _copying(rng: random.Random) -> Document:
    def entry() -> str:
        draw = rng.random()
        if draw < 0.5:
            return rng.choice(words.WORDS)
        if draw < 0.7:
            return str(rng.randint(0, 99))
        return rng.choice(words.STICKERS if draw < 0.85 else rng.choice((words.GIRLS, words.BOYS)))

    if rng.random() < 0.25:
        times, said = rng.randint(2, 4), " ".join(entry() for _ in range(rng.randint(1, 2)))
        prompt = f"Say {said} {rng.choice(_TIMES[times])}."
        return _chat("copying", f"copying:{said} {times}", prompt, " ".join([said] * times))
    text = " ".join(entry() for _ in range(rng.randint(3, 8)))
    prompt = rng.choice(("Repeat exactly: {}", "Copy this: {}", "Repeat after me: {}")).format(text)
    return _chat("copying", f"copying:{text}", prompt, text)


_TASKS: dict[str, Callable[[random.Random], Document]] = {
    "arithmetic": _arithmetic, "sorting": _sorting, "counting": _counting, "copying": _copying, "request": _request,
}  # fmt: skip
_SHORT_TASKS = ("arithmetic", "arithmetic", "sorting", "counting", "copying")
_SYSTEM_MESSAGES = (
    "You are a helpful assistant.", "Answer briefly.", "You are a careful assistant. Give short, exact answers.",
    "Answer with the result only.",
)  # fmt: skip


def _task(rng: random.Random, kind: str, heldout: bool) -> Document:
    """A task of `kind`, drawn again until its key belongs to the split."""
    document = _TASKS[kind](rng)
    while is_heldout(document.key) != heldout:
        document = _TASKS[kind](rng)
    return document


def _name(rng: random.Random, heldout: bool) -> str:
    """A random name whose key for dialogues belongs to the split."""
    while True:
        name = rng.choice(rng.choice((words.GIRLS, words.BOYS)))
        if is_heldout(f"name:{name}") == heldout:
            return name


def _naming(rng: random.Random, name: str, between: list[Message], told_by_user: bool) -> Document:
    """A dialogue that states a name first, the user's or the assistant's, and asks for it at the end."""
    if told_by_user:
        given: list[Message] = [
            {"role": "user", "content": rng.choice((f"My name is {name}.", f"Hi, I am {name}."))},
            {"role": "assistant", "content": f"Hello, {name}!"},
        ]
    else:
        given = [{"role": "system", "content": f"Your name is {name}."}]
    asked: list[Message] = [
        {"role": "user", "content": f"What is {'my' if told_by_user else 'your'} name?"},
        {"role": "assistant", "content": name},
    ]
    return Document("dialogue", None, (*given, *between, *asked), f"name:{name}")


def _dialogue(rng: random.Random, heldout: bool) -> Document:
    """One to three tasks in a row, some with a system message, or a naming dialogue. All parts belong to the same split."""
    parts = [_task(rng, rng.choice(_SHORT_TASKS), heldout) for _ in range(rng.randint(1, 3))]
    turns: list[Message] = [message for part in parts for message in part.messages]
    form = rng.random()
    if form < 0.45:
        return _naming(rng, _name(rng, heldout), turns[: 2 * rng.randint(0, 1)], told_by_user=form < 0.25)
    if form < 0.75 or len(parts) == 1:
        turns.insert(0, {"role": "system", "content": rng.choice(_SYSTEM_MESSAGES)})
    return Document("dialogue", None, tuple(turns), parts[-1].key)


# ------------------------------------------------------------------------------------------------------- documents

_CUMULATIVE = tuple(accumulate(MIXTURE.values()))


def documents(seed: int, count: int, split: str = "train", kind: str | None = None, start: int = 0) -> Iterator[Document]:
    """Documents `start` to `start + count - 1` of a split. If `kind` is None, kinds are drawn by MIXTURE.

    Raises UserError for an unknown split or kind, or a negative count or start, at the call and not at the first document.
    """
    if split not in SPLITS:
        raise UserError(f"split is {split!r}; use one of {', '.join(SPLITS)}")
    if kind is not None and kind not in MIXTURE:
        raise UserError(f"kind is {kind!r}; use one of {', '.join(KINDS)}")
    if count < 0 or start < 0:
        raise UserError(f"count is {count} and start is {start}; neither may be negative")
    return (_document(seed, index, split, kind) for index in range(start, start + count))


def _document(seed: int, index: int, split: str, kind: str | None) -> Document:
    rng = random.Random(f"{seed}/{index}/{split}/{kind}")
    heldout = split == "heldout"
    chosen = kind or rng.choices(KINDS, cum_weights=_CUMULATIVE)[0]
    if chosen == "story":
        return _story(rng, heldout)
    if chosen == "question":
        return _question(rng, heldout)
    if chosen == "dialogue":
        return _dialogue(rng, heldout)
    return _task(rng, chosen, heldout)


def render(document: Document) -> str:
    """The training text with special tokens: a chat as the tokenizer's template renders it, or a story between begin and end
    tokens."""
    if document.text is not None:
        return f"{BEGIN}{document.text}{END}"
    return BEGIN + "".join(f"<|{message['role']}|>{message['content']}{END}" for message in document.messages)
