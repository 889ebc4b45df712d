"""What a model makes of held-out documents: likelihoods of stories, and exact answers to tasks; with errors over stories and prompts.

An evaluation, as `evaluate` returns it, is part of a row of scripts/quality/seeds.py and of other commands that train models.
"""

import gc
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine import LLM, SamplingParams
from engine.limits import EngineLimits
from scripts.corpus.documents import Document, documents, render
from scripts.lib.statistics import ratio_error
from text.tokenizer import Tokenizer
from text.tokenizer_files import load_tokenizer

SEED = 2  # of the held-out documents
TASKS = ("question", "arithmetic", "sorting", "counting", "copying")
MAX_ANSWER = 64  # tokens
# of `opened`; without limits, calls with other lengths make a new engine, whose graphs are captured anew
LIMITS = EngineLimits(max_num_seqs=256, max_batch_tokens=8192, whole_sequences=True)


@cache
def held_out(kind: str, count: int, seed: int = SEED) -> list[Document]:
    """The first held-out documents of a kind. A process that evaluates many models needs them for each."""
    return list(documents(seed, count, split="heldout", kind=kind))


def held_out_stories(tokenizer: Tokenizer, count: int, seed: int = SEED) -> list[list[int]]:
    """Token ids of held-out stories, without begin tokens. seed: of the held-out documents."""
    return [tokenizer.encode(render(document), add_special_tokens=False) for document in held_out("story", count, seed)]


def likelihoods(llm: LLM, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """The log-likelihoods (nats) of the tokens of each prompt but its first, as the engine computes them."""
    answers = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    return [[token.chosen.logprob for token in answer.prompt_logprobs or [] if token is not None] for answer in answers]


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
    prompts = [tokenizer.encode_chat(document.prompt_messages) for document in asked]
    answers = llm.generate(prompts, SamplingParams(max_tokens=MAX_ANSWER, temperature=0))
    return [answer.text == document.answer for answer, document in zip(answers, asked, strict=True)]


def opened(path: Path) -> LLM:
    """The model of a checkpoint, with one engine for all evaluations."""
    return LLM(path, load_tokenizer(path), limits=LIMITS)


def told(llm: LLM, stories: int, seed: int = SEED) -> list[tuple[float, int]]:
    """The log-likelihood (nats) and tokens of each held-out story. seed: of the held-out documents."""
    assert llm.tokenizer is not None
    found = likelihoods(llm, held_out_stories(llm.tokenizer, stories, seed))
    return [(round(sum(story), 4), len(story)) for story in found]


def evaluate(llm: LLM, stories: int, items: int) -> dict[str, Any]:
    """What `told` says of each held-out story, and whether each prompt of a task was answered exactly."""
    assert llm.tokenizer is not None
    answers = {task: [*map(int, matches(llm, llm.tokenizer, task, items))] for task in TASKS}
    return {"stories": told(llm, stories), "answers": answers}


def free() -> None:
    """Free what training holds, and undo what it has set."""
    torch.set_float32_matmul_precision("highest")
    gc.collect()  # frees the trainer, whose hooks refer to each other
    torch.compiler.reset()  # what was compiled for it counts against the limit of the next one
    torch.cuda.empty_cache()


# --- statistics of evaluations ------------------------------------------------------------------------------------------------


def nats(row: dict[str, Any]) -> float:
    """The mean negative log-likelihood of a token of the stories."""
    return -float(sum(s for s, _ in row["stories"])) / sum(n for _, n in row["stories"])


def share(row: dict[str, Any], task: str) -> float:
    """Of exact answers to a task, or of all tasks: `mean`."""
    if task == "mean":
        return sum(share(row, one) for one in TASKS) / len(TASKS)
    return float(sum(row["answers"][task])) / len(row["answers"][task])


Answers = Mapping[str, Sequence[float]]
"""For each task a number for each prompt: 1 for an exact answer and 0 for another one, or a difference of these."""


@cache
def keys(kind: str, count: int) -> list[str]:
    """The keys of the first held-out documents of a kind. Few pairs of small numbers are held out, so those of arithmetic repeat."""
    return [document.key for document in held_out(kind, count)]


def prompts_error(models: Sequence[Answers], task: str) -> float:
    """The standard error over prompts of the mean of `task` (or of all tasks: `mean`) and of `models`, which got the same prompts.

    Models agree on which prompts are hard, so the models' mean for a prompt counts as one value. Prompts with the same key ask the
    same, so they are one cluster."""
    if task == "mean":
        return math.sqrt(sum(prompts_error(models, one) ** 2 for one in TASKS)) / len(TASKS)
    means = [sum(same) / len(same) for same in zip(*(answers[task] for answers in models), strict=True)]
    return clustered(task, means, [1] * len(means))


def clustered(kind: str, values: Sequence[float], sizes: Sequence[float]) -> float:
    """The standard error of the sum of `values` over that of `sizes`, of the first held-out documents of a kind."""
    sums, totals = defaultdict[str, float](float), defaultdict[str, float](float)
    for key, value, size in zip(keys(kind, len(values)), values, sizes, strict=True):
        sums[key] += value
        totals[key] += size
    return ratio_error(list(sums.values()), list(totals.values()))[1]


def stories_error(rows: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]] = ()) -> float:
    """The standard error over stories of the mean `nats` of some rows, less that of `others` if there are any."""
    sizes = [n for _, n in rows[0]["stories"]]
    told = [[s for s, _ in row["stories"]] for row in rows]
    less = [[s for s, _ in row["stories"]] for row in others] or [[0.0] * len(sizes)]
    means = [sum(a) / len(a) - sum(b) / len(b) for a, b in zip(zip(*told, strict=True), zip(*less, strict=True), strict=True)]
    return clustered("story", means, sizes)


def difference(a: Answers, b: Answers) -> Answers:
    return {task: [x - y for x, y in zip(a[task], b[task], strict=True)] for task in TASKS}
