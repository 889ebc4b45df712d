"""Make training data by the model itself: it writes users' questions, and answers them (Xu et al., Magpie, arXiv:2406.08464).

    python -m training.own_chats --model DIR --tokens 50_000_000 --out chats.jsonl
    python -m training.tokenize_data --model DIR --chat --sequence-length 1024 --out chats.bin chats.jsonl

Given only the beginning of its chat template, a chat model writes a question. Conversations without an end are left out. Each batch
is written as soon as it is answered; the same command goes on after the last one, also with more --tokens.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cli import Parser, run
from engine import LLM, SamplingParams
from engine.limits import EngineLimits
from errors import UserError
from files import writing
from options import above_zero, whole_number
from ranks.processes import is_rank

MARK = "<<question>>"


def batches(llm: LLM, length: int, size: int, temperature: float, number: int) -> Iterator[list[dict[str, Any]]]:
    """Conversations of at most `length` tokens, as {"messages", "tokens"}, from batch `number` on, without end. A batch is a function of
    the model, the arguments and its number."""
    if llm.tokenizer is None:
        raise UserError("the model has no tokenizer, so it writes no conversations")
    head, found, _ = llm.tokenizer.render_chat([{"role": "user", "content": MARK}]).partition(MARK)
    if not found:
        raise UserError("the chat template leaves out what the user says, so no question can begin")
    begun = llm.tokenizer.encode(head, add_special_tokens=False)
    while True:
        drawn = SamplingParams(max_tokens=length // 4, temperature=temperature, seed=2 * number * size)
        asked = [one.text.strip() for one in llm.generate([begun] * size, drawn) if one.finish_reason == "stop"]
        talks = [[{"role": "user", "content": question}] for question in dict.fromkeys(filter(None, asked))]
        drawn = SamplingParams(max_tokens=length // 2, temperature=temperature, seed=(2 * number + 1) * size)
        answers = zip(talks, llm.chat(talks, drawn), strict=True)
        yield [
            {
                "messages": [*talk, {"role": "assistant", "content": one.text}],
                "tokens": len(one.prompt_ids) + len(one.token_ids),
                "batch": number,
            }
            for talk, one in answers
            if one.finish_reason == "stop" and one.text.strip()
        ]
        number += 1


def write(llm: LLM, args: argparse.Namespace) -> None:
    """Add conversations to --out until it has --tokens. Raises UserError."""
    with writing(args.out), args.out.open("a+b") as file:
        file.seek(0)
        whole = [line for line in file if line.endswith(b"\n")]
        file.truncate(sum(map(len, whole)))
        known = [json.loads(line) for line in whole]
        done, number = sum(row["tokens"] for row in known), known[-1]["batch"] + 1 if known else args.first
        bar = tqdm(total=args.tokens, initial=done, unit="token", unit_scale=True)
        source = batches(llm, args.length, args.batch, args.temperature, number)
        while done < args.tokens:
            rows = next(source)
            file.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
            file.flush()
            done += sum(row["tokens"] for row in rows)
            bar.update(done - bar.n)


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--model", required=True, metavar="ORG/NAME|DIR", help="a chat model")
    parser.add_argument("--tokens", type=whole_number(1), required=True, metavar="N", help="of all conversations, at least")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="conversations, one a line")
    parser.add_argument("--length", type=whole_number(8), default=1024, metavar="N", help="most tokens of one (default: 1024)")
    parser.add_argument("--batch", type=whole_number(1), default=256, metavar="N", help="conversations at once (default: 256)")
    first = "number of the first batch, from which its chats follow (default: 0)"
    parser.add_argument("--first", type=whole_number(0), default=0, metavar="N", help=first)
    parser.add_argument("--temperature", type=above_zero, default=1.0, help="of what is drawn (default: 1)")
    args = parser.parse_args()
    if is_rank():
        raise UserError("every rank would write --out; start this command without a launcher")
    limits = EngineLimits(max_model_len=args.length, max_num_seqs=args.batch)  # one engine for all batches
    write(LLM(args.model, limits=limits), args)


if __name__ == "__main__":
    run(main)
