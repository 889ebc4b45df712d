"""Compare answers with speculation and without, token by token: random prompts, parameters, limits and models of each variant, on
1, 2 and 4 ranks, with each source of drafts. CPU, fp32.

    python -m tests.same_tokens --prompts 10000 --jobs 12

The two runs compute steps of other sizes, so their logits may differ in the last bits. A request with other tokens is therefore
checked again without a cache: it is a near-tie, which the last line counts, or the run fails. The seed that is printed repeats a run.
"""

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from multiprocessing.util import Finalize
from pathlib import Path

import torch
from tqdm import tqdm

import tests.conftest  # noqa: F401, one thread, and the scheduling that gloo's threads need
from engine.protocol import Submit
from tests.engine.test_drafts import accepted, bent_submits, draft_for, predicting
from tests.engine.test_engine import ALONE, PLAIN, WINDOWS, Answer, assert_same, config_of, engine_of, load, random_model, serve
from tests.support.ranks import Ranks
from tp import World
from training.export import save_checkpoint

TOGETHER = 20  # prompts of a case
RANKS = 1, 2, 4
VARIANTS = [name for name in (*PLAIN, *WINDOWS) if name != "upper-bound"]  # which has no head on several ranks
SOURCES = "ngram", "prediction", "itself", "parallel", "head"
LIMITS = (
    (dict(), 1000),
    (dict(max_batch_tokens=13, max_num_seqs=4), 2),
    (dict(n_blocks=30, max_batch_tokens=32), 3),
    (dict(max_num_seqs=1), 1),
)


def rank_compares(
    world: World, directory: Path, source: str, submits: list[Submit], seed: int
) -> tuple[dict[str, Answer], dict[str, Answer], int]:
    """The answers without drafts and with them, and how many drafted tokens were accepted."""
    random.seed(seed)
    torch.manual_seed(seed)
    model, (limits, at_once) = load(world, directory), random.choice(LIMITS)
    plain = serve(engine_of(model, world=world, **limits), submits, at_once)
    if source == "prediction":
        submits = predicting(submits, plain)
    draft = None if source in ("ngram", "prediction") else draft_for(model, source)
    engine = engine_of(model, world=world, draft=draft, draft_tokens=random.choice([1, 3, 7]), **limits)
    return plain, serve(engine, submits, at_once), accepted(engine)


@cache
def ranks() -> Ranks:
    """The ranks of this process."""
    found = Ranks(max(RANKS))
    Finalize(None, found.close, exitpriority=1)
    return found


def compare(seed: int) -> Counter[str]:
    """Run the case of this seed. Raises AssertionError."""
    random.seed(seed)
    torch.manual_seed(seed)
    n, name, source = RANKS[seed % 3], random.choice(VARIANTS), SOURCES[seed % len(SOURCES)]
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(random_model(config_of(name)), Path(folder), torch.float32)
        submits = bent_submits(TOGETHER)
        arguments = Path(folder), source, submits, seed
        results = [rank_compares(ALONE, *arguments)] if n == 1 else ranks().run(n, rank_compares, *arguments)
        plain, fast, right = results[0]
        where = f"seed {seed}: {name} on {n} ranks with {source}"
        assert all(other == results[0] for other in results), f"{where}: the ranks disagree"
        others = [s for s in submits if plain[s.request_id].tokens != fast[s.request_id].tokens]
        for submit in others:
            try:
                assert_same(load(ALONE, Path(folder)), submit, fast[submit.request_id].tokens)
            except AssertionError as e:
                raise AssertionError(f"{where}: {e}") from None
    tokens = sum(len(answer.tokens) for answer in fast.values())
    return Counter(
        {"tokens": tokens, "near-ties": len(others), f"accepted from {source}": right, f"prompts on {n} ranks": len(fast)}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10_000, help=f"rounded up to a multiple of {TOGETHER} (default: 10000)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with 4 ranks and 1 GB (default: 1)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(2**31), help="default: another one each time"
    )
    args = parser.parse_args()
    cases, total, start = -(-args.prompts // TOGETHER), Counter[str](), time.monotonic()
    with ProcessPoolExecutor(args.jobs, get_context("spawn")) as pool:
        running = pool.map(compare, range(args.seed, args.seed + cases))
        try:
            for found in tqdm(running, total=cases, desc=f"seed {args.seed}", unit_scale=TOGETHER, unit="prompts"):
                total.update(found)  # a sum would leave out zeros
        except AssertionError as e:
            pool.shutdown(cancel_futures=True)
            sys.exit(f"--seed {args.seed}: {e}")
    counts = ", ".join(f"{name} {number}" for name, number in sorted(total.items()))
    minutes = (time.monotonic() - start) / 60
    print(f"{cases * TOGETHER} prompts have the same tokens with drafts, --seed {args.seed}, {minutes:.1f} min: {counts}")


if __name__ == "__main__":
    from tests import same_tokens  # ranks import its functions by this name

    same_tokens.main()
