"""Compare answers with speculation and without, token by token: random prompts, parameters, grammars, limits and models of each
variant, with plain and quantized weights, on 1, 2 and 4 ranks, with each source of drafts. CPU, fp32.

    python -m tests.same_tokens --prompts 10000 --jobs 12
    python -m tests.same_tokens --minutes 30 --write

Many cases run with --deterministic, where logits have the same bits in every batch: all tokens must be the same. In the others
the two runs compute steps of other sizes, so their logits may differ in the last bits. A request with other tokens is therefore
checked again without a cache: it is a near-tie, which is counted, or the run fails. Grammars and quantized weights are always
deterministic. The seed that is printed repeats a run. Writes same-tokens.json.
"""

import argparse
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from multiprocessing import get_context
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import msgspec
import torch
from tqdm import tqdm

import tests.conftest  # noqa: F401, one thread, and the scheduling that gloo's threads need
from checkpoints.export import save_checkpoint
from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import Parser, run
from comm import TreeCommunicator
from config import ModelConfig
from engine.protocol import Submit
from errors import UserError
from kernels import determinism
from options import whole_number
from scripts.lib.machine import machine
from scripts.lib.results import add_write_option, results_folder, write_json
from tests.engine.test_drafts import JSON, accepted, bent_submits, draft_for, predicting
from tests.engine.test_engine import (
    ALONE,
    PLAIN,
    WINDOWS,
    Answer,
    assert_same,
    config_of,
    engine_of,
    load,
    random_model,
    serve,
    tiny_tokenizer,
)
from tests.support.ranks import Ranks
from tp import World

RANKS = 1, 1, 1, 2, 2, 4  # in turn; each step of more ranks than cores is slow
VARIANTS = [name for name in (*PLAIN, *WINDOWS) if name != "upper-bound"]  # which has no head on several ranks
SOURCES = "ngram", "prediction", "itself", "parallel", "head"
LONGEST = 64  # tokens of an answer
LINES = r"start: /([^eai]*\n)*/"  # forbids many tokens, and to end within a line
OFTEN = 4, 4, 2, 2, 1  # how often each of LIMITS comes
LIMITS: tuple[tuple[dict[str, Any], int, int], ...] = (  # of an engine; requests that arrive before each step, and in all
    (dict(), 1000, 100),
    (dict(), 7, 100),
    (dict(max_batch_tokens=13, max_num_seqs=4), 2, 20),
    (dict(n_blocks=40, max_batch_tokens=32), 3, 20),
    (dict(max_num_seqs=1), 1, 5),
)


@dataclass(frozen=True)
class Case:
    """Requests to one model. exact: computed with --deterministic. drafted: most tokens of a draft."""

    seed: int
    ranks: int
    variant: str
    source: str
    exact: bool
    quantize: str | None
    grammars: bool
    limits: dict[str, Any]
    at_once: int
    prompts: int
    drafted: int

    @classmethod
    def of(cls, seed: int) -> "Case":
        rng = random.Random(seed)
        exact = rng.random() < 0.4
        return cls(
            seed,
            RANKS[seed % len(RANKS)],
            rng.choice(VARIANTS),
            SOURCES[seed % len(SOURCES)],
            exact,
            rng.choice([None, "int8", "int4"]) if exact else None,
            exact and rng.random() < 0.5,
            *rng.choices(LIMITS, OFTEN)[0],
            rng.choice([1, 3, 7]),
        )

    @property
    def config(self) -> ModelConfig:
        config = replace(config_of(self.variant), max_seq_len=128)
        if self.grammars:
            config = replace(config, vocab_size=tiny_tokenizer().vocab_size)
        return replace(config, head_dim=16, intermediate_size=320) if self.quantize else config  # large enough for groups

    def submits(self) -> list[Submit]:
        """Requests of all kinds, if there are grammars half of them under one."""
        found = []
        for i in range(self.prompts):
            [one] = bent_submits(1, max_tokens=random.randint(1, LONGEST))
            late = random.random() < 0.5
            under = dict(grammar=LINES if late else JSON, late_grammar=late) if self.grammars and i % 2 else {}
            found.append(Submit(f"r{i}", one.prompt_ids, msgspec.structs.replace(one.params, **under)))
        return found


@contextmanager
def maybe_deterministic(exact: bool) -> Iterator[None]:
    determinism.enable(exact)
    try:
        yield
    finally:
        determinism.enable(False)


def rank_compares(
    world: World, directory: Path, case: Case, submits: list[Submit]
) -> tuple[dict[str, Answer], dict[str, Answer], int]:
    """The answers without drafts and with them, and how many drafted tokens were accepted."""
    random.seed(case.seed)
    torch.manual_seed(case.seed)
    with maybe_deterministic(case.exact):
        if case.exact and world.world_size > 1:
            world = replace(world, comm=TreeCommunicator())
        config = model_config(str(directory), None, world.world_size, case.quantize)
        model = load_model(str(directory), config, world, torch.float32)
        settings = dict(tokenizer=tiny_tokenizer() if case.grammars else None, world=world, **case.limits)
        plain = serve(engine_of(model, **settings), submits, case.at_once)
        if case.source == "prediction":
            submits = predicting(submits, plain)
        if case.source == "parallel":
            draft = random_model(replace(config_of("parallel"), vocab_size=config.vocab_size))
        else:
            draft = None if case.source in ("ngram", "prediction") else draft_for(model, case.source)
        others = 500 if case.source == "ngram" else 0
        engine = engine_of(model, draft=draft, draft_tokens=case.drafted, ngram_prompts=others, **settings)
        return plain, serve(engine, submits, case.at_once), accepted(engine)


@cache
def ranks() -> Ranks:
    """The ranks of this process."""
    found = Ranks(max(RANKS))
    Finalize(None, found.close, exitpriority=1)
    return found


def compare(case: Case) -> Counter[str]:
    """Run a case, and count what it had. Raises AssertionError."""
    random.seed(case.seed)
    torch.manual_seed(case.seed)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        save_checkpoint(random_model(case.config), directory, torch.float32)
        submits = case.submits()
        arguments = directory, case, submits
        results = [rank_compares(ALONE, *arguments)] if case.ranks == 1 else ranks().run(case.ranks, rank_compares, *arguments)
        assert all(other == results[0] for other in results), f"{case}: the ranks disagree"
        plain, fast, right = results[0]
        others = [s for s in submits if ends(plain[s.request_id]) != ends(fast[s.request_id])]
        assert not (case.exact and others), f"{case}: {others[0]} has {fast[others[0].request_id]} after drafts"
        for submit in others:
            try:
                assert_same(load(ALONE, directory), submit, fast[submit.request_id].tokens)
            except AssertionError as e:
                raise AssertionError(f"{case}: {e}") from None
    found = {
        "prompts": case.prompts,
        "tokens": sum(len(answer.tokens) for answer in fast.values()),
        "near_ties": len(others),
        "deterministic_prompts": case.exact * case.prompts,
        "prompts_under_a_grammar": sum(bool(s.params.grammar) for s in submits),
        "prompts_to_quantized_weights": bool(case.quantize) * case.prompts,
        f"prompts_on_{case.ranks}_ranks": case.prompts,
        f"prompts_with_drafts_of_{case.source}": case.prompts,
        "accepted": right,
        f"accepted_from_{case.source}": right,
    }
    return Counter(found)


def ends(answer: Answer) -> tuple[list[int], str | None]:
    return answer.tokens, answer.finish_reason


def results(args: argparse.Namespace) -> Iterator[Counter[str]]:
    """What the cases had, until there are enough prompts or the time is over."""
    seeds, stop = count(args.seed), time.monotonic() + 60 * args.minutes
    if args.jobs == 1:  # needs no further process
        yield from (compare(Case.of(seed)) for seed in seeds)
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        running: set[Future[Counter[str]]] = set()
        try:
            while running or time.monotonic() < stop:
                while len(running) < args.jobs and time.monotonic() < stop:
                    running.add(pool.submit(compare, Case.of(next(seeds))))
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (one.result() for one in done)
        finally:
            pool.shutdown(cancel_futures=True)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--prompts", type=whole_number(1), default=10_000, help="at least so many (default: 10000)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many (default: no limit)")
    parser.add_argument("--jobs", type=whole_number(1), default=1, help="processes, each with 4 ranks and 1 GB (default: 1)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: another one each time"
    )
    add_write_option(parser)
    args = parser.parse_args()
    folder, total, start = results_folder(args), Counter[str](), time.monotonic()
    with tqdm(total=args.prompts, desc=f"seed {args.seed}", unit="prompts") as bar:
        try:
            for found in results(args):
                total.update(found)  # a sum would leave out zeros
                bar.update(found["prompts"])
                if total["prompts"] >= args.prompts or time.monotonic() > start + 60 * args.minutes:
                    break
        except AssertionError as e:
            raise UserError(f"--seed {args.seed}: {e}") from None
    minutes = round((time.monotonic() - start) / 60, 1)
    path = write_json("same-tokens", {"machine": machine(), "seed": args.seed, "minutes": minutes, **total}, folder)
    print(f"{total['prompts']} prompts have the same tokens with drafts; wrote {path}")


if __name__ == "__main__":
    from tests import same_tokens  # ranks import its functions by this name

    run(same_tokens.main)
