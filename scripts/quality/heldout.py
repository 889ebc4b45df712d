"""What a model makes of held-out documents: the perplexity of stories, and exact answers to tasks."""

import math
from functools import cache

from engine import LLM, SamplingParams
from engine.llm import encode_chat, encode_texts
from scripts.corpus.documents import Document, documents, render
from text.tokenizer import Tokenizer

SEED = 2  # of the held-out documents
TASKS = ("question", "arithmetic", "sorting", "counting", "copying")
MAX_ANSWER = 64  # tokens


@cache
def held_out(kind: str, count: int) -> list[Document]:
    """The first held-out documents of a kind. A process that evaluates many models needs them for each."""
    return list(documents(SEED, count, split="heldout", kind=kind))


def held_out_stories(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Token ids of held-out stories, without begin tokens."""
    return encode_texts(tokenizer, [render(document) for document in held_out("story", count)], add_special_tokens=False)


def perplexity(llm: LLM, tokenizer: Tokenizer, items: int) -> float:
    """exp of the mean negative log-likelihood (nats) per token over held-out stories. Each is computed alone, because quantized
    all-reduces round the tokens of a batch together."""
    total, count = 0.0, 0
    for story in held_out_stories(tokenizer, items):
        logprobs = llm.score(story).logprobs
        total -= sum(p for p in logprobs if p is not None)
        count += len(logprobs) - 1
    return math.exp(total / count)


def matches(llm: LLM, tokenizer: Tokenizer, task: str, items: int) -> list[bool]:
    """Whether the greedy answer to each held-out prompt equals the expected text exactly."""
    asked = held_out(task, items)
    prompts = [encode_chat(tokenizer, document.prompt_messages) for document in asked]
    answers = llm.generate(prompts, SamplingParams(max_tokens=MAX_ANSWER, temperature=0))
    return [answer.text == document.answer for answer, document in zip(answers, asked, strict=True)]
