"""Choose how to serve a model on some GPUs, so that answers come as fast as you want, and predict the load that this allows.

    python -m deploy.plan --model llama-3-70b --gpus 8 --gpu h200 --ttft 500 --itl 20 --prompt 2000 --answer 300
    python -m deploy.plan --model llama-3-8b --gpus 1 --gpu h100 --ttft 200 --itl 15 --widths bf16 fp8
    python -m deploy.plan --model ~/checkpoints/Llama-3.1-70B --gpus 4 --ttft 1000 --itl 25 --tp 2 4 --json

A plan is a number of tensor-parallel ranks (tp), as many replicas as the GPUs then allow, the width of the weights, the residual
variant, and the batch (--max-num-seqs). Each replica gets its share of the requests, which arrive at random (a Poisson process).
Most plans meet the goals if hardly anybody asks: what counts is the largest load at which --share of the requests still do, which
is found by simulating the server's steps. A step takes as long as it did in the sweeps of docs/results and of --sweeps; what was
not measured comes from a roofline whose figures are fitted to them. The column `times` says which of the two: trust `measured`
most. docs/planner.md explains the model, and how far predictions are from measured servers.

Wider weights are more accurate, and a variant other than `standard` needs a checkpoint that was trained for it: the planner knows
nothing of either. Name what you would accept with --widths and --variants.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints.hub import fetch_named
from checkpoints.presets import PRESETS, is_preset, named_config
from cli import Parser, note, run
from config import require_dense, usage
from errors import UserError
from files import model_name
from options import above_zero, whole_number
from quantized.scheme import SCHEMES

WIDTHS = ("bf16", *SCHEMES)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_argument_group("what is served, on what")
    what.add_argument("--model", required=True, metavar="DIR|PRESET", help=f"a checkpoint, or one of {', '.join(PRESETS)}")
    what.add_argument("--gpus", type=whole_number(1), required=True, metavar="N", help="how many GPUs there are")
    what.add_argument("--gpu", default="h200", metavar="NAME", help="h100 or h200 (default: h200)")
    goals = parser.add_argument_group("the goals")
    goals.add_argument("--ttft", type=above_zero, required=True, metavar="MS", help="longest time to the first token")
    goals.add_argument(
        "--itl", type=above_zero, required=True, metavar="MS", help="longest mean time between an answer's tokens"
    )
    goals.add_argument("--share", type=above_zero, default=0.9, help="of the requests that must keep both (default: 0.9)")
    goals.add_argument("--prompt", type=whole_number(1), default=1024, metavar="TOKENS", help="of a request (default: 1024)")
    goals.add_argument("--answer", type=whole_number(1), default=256, metavar="TOKENS", help="of a request (default: 256)")
    choice = parser.add_argument_group("what may be chosen")
    choice.add_argument(
        "--tp", type=whole_number(1), nargs="+", metavar="N", help="ranks (default: 1, 2, 4 and 8 that divide --gpus)"
    )
    choice.add_argument("--widths", nargs="+", metavar="WIDTH", help=f"{', '.join(WIDTHS)} (default: all, or the checkpoint's)")
    choice.add_argument(
        "--variants", nargs="+", metavar="NAME", help=f"{usage()} (default: standard and ladder, or the checkpoint's)"
    )
    choice.add_argument(
        "--max-num-seqs", type=whole_number(1, 4096), default=256, metavar="N", help="largest batch (default: 256)"
    )
    choice.add_argument(
        "--max-batch-tokens", type=whole_number(1, 2**17), metavar="N", help="as the server's (default: the server's)"
    )
    out = parser.add_argument_group("measurements and output")
    out.add_argument("--sweeps", type=Path, nargs="+", default=[], metavar="FILE", help="more rows, from make sweep")
    out.add_argument("--seed", type=int, default=0, help="of the arrivals (default: 0)")
    out.add_argument("--json", action="store_true", help="print one JSON object with all plans instead of a table")
    args = parser.parse_args(argv)
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    """Check the flags, and fill in defaults. Raises UserError."""
    fetch_named(args, model="config")
    require_dense(config := named_config(args.model), "this planner")
    if args.prompt + args.answer > config.max_seq_len:
        raise UserError(
            f"--prompt {args.prompt} and --answer {args.answer} exceed the context of {model_name(args.model)}, {config.max_seq_len} tokens"
        )
    if args.share > 1:
        raise UserError(f"--share {args.share:g} is above 1; 0.9 is nine of ten requests")
    bad = [tp for tp in args.tp or () if args.gpus % tp]
    if bad:
        raise UserError(f"--tp {bad[0]}: {args.gpus} GPUs cannot be shared by groups of {bad[0]}; give a divisor of --gpus")
    args.tp = args.tp or [tp for tp in (1, 2, 4, 8) if args.gpus % tp == 0]
    args.variants = args.variants or (["standard", "ladder"] if is_preset(args.model) else [config.variant_name])
    if config.quantization is not None:
        if args.widths:
            raise UserError(
                f"{model_name(args.model)} is quantized already ({config.quantization.description}); leave out --widths"
            )
        args.widths = ["bf16"]  # not quantized once more
    args.widths = args.widths or WIDTHS
    if unknown := set(args.widths) - set(WIDTHS):
        raise UserError(f"--widths {min(unknown)}: known are {', '.join(WIDTHS)}")


def command(args: argparse.Namespace, plan: dict[str, Any]) -> str:
    """How to start a replica of the plan."""
    config = named_config(args.model)
    words = ["python -m server", f"--tp {plan['tp']}", f"--model {model_name(args.model)}", f"--max-num-seqs {plan['batch']}"]
    if config.quantization is None and plan["width"] != "bf16":
        words.append(f"--quantize {plan['width']}")
    if plan["variant"] != config.variant_name:
        words.append(f"--variant {plan['variant']}")
    if args.max_batch_tokens:
        words.append(f"--max-batch-tokens {args.max_batch_tokens}")
    return " ".join(words)


HEAD = (
    "weights",
    "variant",
    "tp x replicas",
    "batch",
    "requests/s",
    "tokens/s",
    "TTFT p50/p90, ms",
    "ITL p50/p90, ms",
    "times",
)


def table(plans: Sequence[dict[str, Any]]) -> str:
    """The best plan of each width and variant, and the best one with measured times if the other's are not."""
    best: dict[tuple[str, ...], dict[str, Any]] = {}
    for plan in plans:
        best.setdefault((plan["width"], plan["variant"], plan["times"]), plan)
    lines = [HEAD, *map(_cells, best.values())]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def _cells(plan: dict[str, Any]) -> tuple[str, ...]:
    """A plan that meets the goals at no load has the latencies of a lone request."""
    load = f"{plan['requests_per_second']:.2f}", f"{plan['tokens_per_second']:,.0f}"
    ttft, itl = plan["ttft_ms"], plan["itl_ms"]
    latency = f"{ttft['p50']:.0f} / {ttft['p90']:.0f}", f"{itl['p50']:.1f} / {itl['p90']:.1f}"
    return (
        plan["width"],
        plan["variant"],
        f"{plan['tp']} x {plan['replicas']}",
        str(plan["batch"]),
        *load,
        *latency,
        plan["times"],
    )


def _none(args: argparse.Namespace, plans: Sequence[dict[str, Any]]) -> UserError:
    """That no plan meets the goals, and which ones would be met."""
    least = min(plans, key=lambda p: max(p["ttft_ms"]["p50"] / args.ttft, p["itl_ms"]["p50"] / args.itl))
    return UserError(
        f"no plan meets --ttft {args.ttft:g} and --itl {args.itl:g} at any load: a lone request to tp {least['tp']} with "
        f"{least['width']} weights and {least['variant']} takes {least['ttft_ms']['p50']:.1f} ms, and {least['itl_ms']['p50']:.2f} "
        "between tokens; raise the goals above that, or allow other --tp, --widths or --variants"
    )


def main() -> None:
    args = parse_args()
    from deploy.plan.choice import candidates  # imported here: wrong flags need not wait for the engine

    plans = candidates(args)
    if not plans[0]["requests_per_second"]:
        raise _none(args, plans)
    best, asked = plans[0], f"{args.prompt} + {args.answer} tokens"
    if args.json:
        print(json.dumps({"settings": vars(args), "plans": plans}, default=str))
        return
    print(
        f"{model_name(args.model)} on {args.gpus} x {args.gpu}: {asked}, {args.share:.0%} within TTFT {args.ttft:g} ms, ITL {args.itl:g} ms\n"
    )
    print(table(plans))
    print(f"\nthe largest load: {best['replicas']} x   {command(args, best)}")
    if best["variant"] != named_config(args.model).variant_name:
        note(f"note: {best['variant']} needs a checkpoint that was trained for it (docs/variants.md)")


if __name__ == "__main__":
    run(main)
