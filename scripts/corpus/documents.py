"""Write a deterministic synthetic English corpus, and train the small tokenizer that goes with it.

The corpus trains models of a few million parameters whose answers are either right or wrong. It has stories told from a
simulated world, questions about them, and small exact tasks. Document `i` depends only on (seed, i, split, kind), so any
range can be generated independently, in parallel and repeatedly.

Every document has a key that identifies its content (the operands, the list, the cast and the things of a story). A hash
of the key puts 1/16 of all keys into the split "heldout" and the rest into "train", so the splits never share a key.

    python -m scripts.corpus.documents --documents 3
    python -m scripts.corpus.documents --tokenizer out/tokenizer
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from errors import UserError
from flags import Parser
from scripts.corpus import words
from scripts.corpus.stories import article, draw_cast, tell_story

# Share of documents by kind. Shares of tokens differ, because a story is about ten times as long as a sum.
MIXTURE: dict[str, float] = {
    "story": 0.20,
    "question": 0.26,
    "arithmetic": 0.18,
    "sorting": 0.09,
    "counting": 0.09,
    "copying": 0.09,
    "dialogue": 0.05,  # several turns, or a system message
    "request": 0.04,  # "Tell me a story about a fox and a lantern."
}
KINDS = tuple(MIXTURE)
SPLITS = ("train", "heldout")
HELDOUT_SHARE = 16  # one key in this many is held out

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>")  # ids 0 to 4
BEGIN, END, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS
MAX_LENGTH = 1024  # tokens
CHUNK = 512  # documents per work item

CHAT_TEMPLATE = (
    "{{- '<|begin|>' -}}"
    "{%- if tools -%}{{- '<|system|>You may call these tools: ' -}}{{- tools | tojson -}}{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] in ['assistant', 'system'] -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- elif message['role'] == 'developer' -%}{{- '<|system|>' -}}"
    "{%- else -%}{{- '<|user|>' -}}{%- endif -%}"
    "{%- set content = message['content'] -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- elif content -%}{%- for part in content -%}"
    "{%- if part is string -%}{{- part -}}{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

# `examples.json` of a model of about three million parameters trained on the corpus. The server's page offers these prompts.
EXAMPLES: dict[str, Any] = {
    "about": "a model of 3 million parameters, trained on synthetic English: short stories, questions about them, sums, sorting, "
    "counting and copying; it knows nothing else",
    "chat": [
        "What is 17 plus 25?",
        "Sort from smallest to largest: 41, 7, 88, 23",
        "Say lamp three times.",
        "Lily has a red kite. She gave the kite to Tom.\nWho has the kite?",
        "Tell me a story about a fox and a lantern.",
    ],
    "completion": ["Once upon a time there was a little fox", "One misty morning, Lily went to the"],
}


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
    text, _ = tell_story(rng, draw_cast(rng, species, noun), rng.random() < 0.5, words.ITEM_PLOTS)
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
    """The training text with special tokens: a chat as CHAT_TEMPLATE renders it, or a story between begin and end tokens."""
    if document.text is not None:
        return f"{BEGIN}{document.text}{END}"
    return BEGIN + "".join(f"<|{message['role']}|>{message['content']}{END}" for message in document.messages)


# ------------------------------------------------------------------------------------------------------- tokenizer


def train_tokenizer(path: Path, vocab_size: int = 1024, seed: int = 0, sample: int = 20000) -> None:
    """Train a byte-level BPE on `sample` training documents and write a Hugging Face tokenizer to the folder `path`.

    `vocab_size` includes the special tokens and all 256 bytes. Raises UserError if it cannot be reached exactly.
    """
    least = len(SPECIAL_TOKENS) + 256
    if vocab_size < least:
        raise UserError(f"vocabulary size is {vocab_size}; the special tokens and the bytes alone need {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_texts(seed, sample), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(f"{sample} documents give only {tokenizer.get_vocab_size()} of {vocab_size} tokens; raise --sample")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B:1", special_tokens=[(BEGIN, 0)]
    )
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(path / "tokenizer_config.json", _tokenizer_config())
    _write_json(path / "special_tokens_map.json", {"bos_token": BEGIN, "eos_token": END})


def _plain_texts(seed: int, sample: int) -> Iterator[str]:
    """The texts from which merges are learned, without special tokens."""
    for document in documents(seed, sample):
        yield from [document.text] if document.text else [message["content"] for message in document.messages]


def _tokenizer_config() -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {str(i): {"content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)},
        "bos_token": BEGIN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": MAX_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a folder or in a `tokenizer.json` file. Raises UserError if there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no tokenizer at {file}; make one with: python -m scripts.corpus.documents --tokenizer {path}")
    return Tokenizer.from_file(str(file))


@dataclass(frozen=True)
class _Range:
    """One work item: `count` documents from `start`."""

    seed: int
    start: int
    count: int
    split: str
    kind: str | None


_worker_tokenizer: Tokenizer | None = None


def _start_worker(tokenizer_path: Path) -> None:
    """Load the tokenizer once per process. Its own threads stay off, because the processes run in parallel already."""
    global _worker_tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer = load_tokenizer(tokenizer_path)


def _encode_range(work: _Range) -> tuple[int, np.ndarray]:
    """The number of documents in a range, and their token ids."""
    assert _worker_tokenizer is not None
    texts = [render(document) for document in documents(work.seed, work.count, work.split, work.kind, work.start)]
    encodings = _worker_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    ids = [token for encoding in encodings for token in encoding.ids]
    return work.count, np.array(ids, dtype=np.uint16)


def encode_corpus(
    tokenizer_path: Path,
    seed: int,
    count: int,
    processes: int,
    split: str = "train",
    kind: str | None = None,
    start: int = 0,
) -> np.ndarray:
    """Token ids (uint16) of `count` rendered documents, concatenated. They are the same for any number of processes.

    Raises UserError for a missing tokenizer, a vocabulary too large for uint16, and as `documents` does.
    """
    documents(seed, count, split, kind, start)
    if load_tokenizer(tokenizer_path).get_vocab_size() > 1 << 16:
        raise UserError(f"the tokenizer at {tokenizer_path} has more than 65536 tokens; ids are stored as uint16")
    ranges = [
        _Range(seed, first, min(CHUNK, start + count - first), split, kind) for first in range(start, start + count, CHUNK)
    ]
    pieces = [np.empty(0, dtype=np.uint16)]
    with tqdm(total=count, unit="doc", desc="encode", disable=None) as bar:
        for done, ids in _encoded(tokenizer_path, ranges, processes):
            pieces.append(ids)
            bar.update(done)
    return np.concatenate(pieces)


def _encoded(tokenizer_path: Path, ranges: Sequence[_Range], processes: int) -> Iterator[tuple[int, np.ndarray]]:
    """The encoded ranges in order, computed in this process or in a pool."""
    if processes <= 1 or len(ranges) <= 1:
        _start_worker(tokenizer_path)
        yield from map(_encode_range, ranges)
        return
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(processes, len(ranges)), _start_worker, (tokenizer_path,)) as pool:
        yield from pool.imap(_encode_range, ranges)


# ------------------------------------------------------------------------------------------------------- command line


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        description=(
            "Write a synthetic English corpus: stories from a simulated world, questions about them, and exact tasks.\n"
            "The same flags always give the same text. The splits train and heldout never share a task or a cast."
        ),
        epilog=(
            "examples:\n"
            "  python -m scripts.corpus.documents --documents 5                      five documents, as a model sees them\n"
            "  python -m scripts.corpus.documents --kind arithmetic --split heldout --json\n"
            "  python -m scripts.corpus.documents --tokenizer out/tokenizer          train the tokenizer and stop\n"
            "  python -m scripts.corpus.documents --stats --documents 5000 --tokenizer out/tokenizer\n\n"
            "kinds and their shares:\n  " + ", ".join(f"{kind} {share:.0%}" for kind, share in MIXTURE.items())
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=1, help="number that fixes the whole corpus (default 1)")
    parser.add_argument("--documents", type=int, default=10, metavar="N", help="how many documents (default 10)")
    parser.add_argument("--start", type=int, default=0, metavar="I", help="number of the first document (default 0)")
    parser.add_argument("--split", default="train", help="train or heldout (default train)")
    parser.add_argument("--kind", help="write one kind only; all kinds, mixed, when left out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write (default: standard output)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of the rendered text")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="train the tokenizer into this folder; with "
                        "--stats, count tokens with the one that is there")  # fmt: skip
    parser.add_argument("--vocab-size", type=int, default=1024, metavar="N", help="tokens in all (default 1024)")
    parser.add_argument("--sample", type=int, default=20000, metavar="N",
                        help="documents to train the tokenizer on (default 20000)")  # fmt: skip
    parser.add_argument("--stats", action="store_true", help="print documents, words, tokens and distinct share by kind")
    return parser


def _as_json(document: Document) -> str:
    fields: dict[str, Any] = {"kind": document.kind, "key": document.key}
    fields |= {"text": document.text} if document.text is not None else {"messages": document.messages}
    return json.dumps(fields, ensure_ascii=False)


def stats(stream: Iterator[Document], tokenizer: Tokenizer | None) -> str:
    """A table by kind: documents, mean words, mean and most tokens (with a tokenizer), and share of distinct texts."""
    counts: Counter[str] = Counter()
    n_words: Counter[str] = Counter()
    n_tokens: Counter[str] = Counter()
    longest: dict[str, int] = {}
    seen: dict[str, set[int]] = {kind: set() for kind in KINDS}
    for document in stream:
        text, kind = render(document), document.kind
        length = len(tokenizer.encode(text, add_special_tokens=False).ids) if tokenizer else 0
        counts[kind] += 1
        n_words[kind] += len(text.split())
        n_tokens[kind] += length
        longest[kind] = max(longest.get(kind, 0), length)
        seen[kind].add(hash(text))
    lines = [f"{'kind':<12}{'documents':>10}{'words':>8}{'tokens':>8}{'longest':>9}{'distinct':>10}"]
    for kind in filter(counts.__contains__, KINDS):
        count = counts[kind]
        tokens = f"{n_tokens[kind] / count:>8.1f}{longest[kind]:>9}" if tokenizer else f"{'-':>8}{'-':>9}"
        lines.append(f"{kind:<12}{count:>10}{n_words[kind] / count:>8.1f}{tokens}{len(seen[kind]) / count:>10.1%}")
    return "\n".join(lines)


def _write(lines: Iterator[str], out: Path | None) -> None:
    """Write lines to a file or to standard output. Raises UserError if the file cannot be written."""
    if out is None:
        sys.stdout.writelines(line + "\n" for line in lines)
        return
    try:
        with out.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error


def _run(arguments: argparse.Namespace) -> None:
    stream = documents(arguments.seed, arguments.documents, arguments.split, arguments.kind, arguments.start)
    if arguments.stats:
        tokenizer = load_tokenizer(arguments.tokenizer) if arguments.tokenizer else None
        _write(iter([stats(stream, tokenizer)]), arguments.out)
    elif arguments.tokenizer:
        try:
            train_tokenizer(arguments.tokenizer, arguments.vocab_size, arguments.seed, arguments.sample)
        except OSError as error:
            raise UserError(f"cannot write {arguments.tokenizer}: {error.strerror}") from error
        print(f"wrote {arguments.tokenizer}: {arguments.vocab_size} tokens", file=sys.stderr)
    else:
        _write(map(_as_json if arguments.json else render, stream), arguments.out)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code, 2 for wrong input."""
    try:
        _run(_parser().parse_args(argv))
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
