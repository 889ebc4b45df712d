"""Quantized layers on GPUs: captured graphs give the greedy tokens of the CPU. Skipped without a GPU.

`python -m torch.distributed.run … -m tests.quantized.test_gpu FOLDER` is one rank of the test on 2 GPUs.
"""

import json
import random
import sys
from pathlib import Path

import pytest
import torch

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from comms import Local
from config import ModelConfig
from engine import LLM, SamplingParams
from layers.attention import Causal
from quantized.scheme import SCHEMES
from scripts.corpus.documents import documents, render
from scripts.quantize import calibration, quantize_model
from tests.quantized.writers import FORMATS, write
from tests.support.command_line import MODELS
from tests.support.gpus import most_ranks, torchrun
from tp import World, init_world

GPUS = most_ranks()
FAMILIES = (
    "fp8 by channel, dynamic",
    "int8 by channel, dynamic",
    "W4A16 group 32 asymmetric",
    "HF block fp8",
    "ModelOpt fp8",
    "GPTQ 4 bits act-order asymmetric",
    "AWQ",
)
CASES = ("int8", "int4", *FAMILIES)  # fp8 at load would round activations on the CPU
SHAPE = ModelConfig(
    vocab_size=101, hidden_size=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, intermediate_size=512, max_seq_len=64
)
PROMPTS, NEW_TOKENS = [[3, 1, 4, 1, 5], [9, 2, 6], list(range(20)), *([i] * (i + 1) for i in range(5))], 12
# Least lead of the best token's logit, of about 10 in size, which rounding cannot change
LEADS = {torch.float32: 1e-2, torch.bfloat16: 1.0}  # bf16: logits of 16 and more have steps of 0.125
ROUNDED = 2.0  # the same where a layer of many rows rounds its inputs to fp8

pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def write_all(folder: Path) -> None:
    for i, name in enumerate(FAMILIES):
        write(SHAPE, FORMATS[name], folder / name, folder / ("plain" if i == 0 else f"plain {i}"))


def greedy(world: World, folder: Path, dtype: torch.dtype, exact: bool) -> list[list[list[tuple[int, float]]]]:
    """For each case and prompt the tokens and the lead of each over the second best. exact: of the weights in fp32 that the
    checkpoints were made from, whose inputs are not rounded."""
    params, found = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logprobs=2), []
    for i, case in enumerate(CASES):
        quantize, path = (case, folder / "plain") if case in SCHEMES else (None, folder / case)
        if exact and case not in SCHEMES:
            path = folder / f"plain {i - 2}" if i > 2 else folder / "plain"
        config = model_config(str(path), None, world.world_size, quantize)
        llm = LLM(load_model(str(path), config, world, dtype), world=world)
        answers = llm.generate(PROMPTS, params)
        runner = llm._engine[1].runner  # type: ignore[index]
        assert (runner.graphs is None) == (world.device.type == "cpu") and runner.is_captured(len(PROMPTS))
        found.append(
            [
                [
                    (token, entry.top[0].logprob - entry.top[1].logprob)
                    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
                ]
                for answer in answers
            ]
        )
    return found


def assert_same(
    found: list[list[list[tuple[int, float]]]], expected: list[list[list[tuple[int, float]]]], leads: list[float]
) -> None:
    """All tokens up to the first near-tie are the same; a rounded case may have none before it. leads: of each case."""
    for ours, theirs, lead in zip(found, expected, leads, strict=True):
        clear = [next((i for i, (_, by) in enumerate(answer) if by <= lead), len(answer)) for answer in theirs]
        assert any(clear) or lead == ROUNDED
        for got, right, count in zip(ours, theirs, clear, strict=True):
            assert [token for token, _ in got[:count]] == [token for token, _ in right[:count]]


def leads_of_kernels() -> list[float]:
    """Of each case in bf16. The kernels round no inputs, except for fp8 weights in steps of many rows."""
    return [ROUNDED if case in ("fp8 by channel, dynamic", "ModelOpt fp8") else LEADS[torch.bfloat16] for case in CASES]


def test_one_gpu_gives_the_cpu_s_tokens(tmp_path: Path, seed: int) -> None:
    write_all(tmp_path)
    cpu, gpu = (World(0, 1, torch.device(device), Local()) for device in ("cpu", "cuda"))
    expected = greedy(cpu, tmp_path, torch.float32, exact=True)
    assert_same(greedy(gpu, tmp_path, torch.bfloat16, exact=False), expected, leads_of_kernels())


def test_without_kernels_a_gpu_gives_the_cpu_s_tokens(tmp_path: Path, seed: int) -> None:
    """In fp32, by PyTorch; inputs that are rounded may lie in the middle of two codes."""
    write_all(tmp_path)
    cpu, gpu = (greedy(World(0, 1, torch.device(d), Local()), tmp_path, torch.float32, exact=False) for d in ("cpu", "cuda"))
    kept = [i for i, case in enumerate(CASES) if case in SCHEMES or FORMATS[case].activations == "none"]
    assert_same([gpu[i] for i in kept], [cpu[i] for i in kept], [LEADS[torch.float32]] * len(kept))
    assert_same(gpu, cpu, [LEADS[torch.bfloat16]] * len(CASES))


def test_gptq_on_a_gpu_is_nearer_than_rounding(tmp_path: Path, seed: int) -> None:
    source, text = MODELS / "tiny-hybrid", "".join(map(render, documents(random.randrange(1 << 30), 200)))
    tokens = calibration(str(source), text, model_config(str(source), None, 1), 8, 64).to("cuda")
    world, context = World(0, 1, torch.device("cuda"), Local()), Causal(64, torch.device("cuda"))
    for method in ("gptq", "rtn"):
        quantize_model(str(source), tmp_path / method, "int4", method, None, 32, 256, "cuda")
    with torch.inference_mode():
        exact, *found = (
            load_model(str(path), model_config(str(path), None, 1), world, torch.float32)(tokens, context)
            for path in (source, tmp_path / "gptq", tmp_path / "rtn")
        )
    gptq, nearest = ((logits - exact).square().mean() for logits in found)
    assert gptq < nearest


@pytest.mark.skipif(GPUS < 2, reason="needs 2 GPUs")
def test_two_gpus_give_the_tokens_of_the_weights(tmp_path: Path, seed: int) -> None:
    write_all(tmp_path)
    torchrun(2, "-m", "tests.quantized.test_gpu", str(tmp_path), timeout=280)
    expected = greedy(World(0, 1, torch.device("cpu"), Local()), tmp_path, torch.float32, exact=True)
    for rank in range(2):
        assert_same(json.loads((tmp_path / f"rank{rank}.json").read_text()), expected, leads_of_kernels())


def main() -> None:
    world, folder = init_world("cuda", "auto"), Path(sys.argv[1])
    (folder / f"rank{world.rank}.json").write_text(json.dumps(greedy(world, folder, torch.bfloat16, exact=False)))


if __name__ == "__main__":
    main()
