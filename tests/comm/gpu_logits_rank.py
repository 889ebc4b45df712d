"""One rank of test_on_gpus.py: the error of a prompt's logits in bf16 with each communicator, compared with the same weights
in fp32. Rank 0 prints one JSON line for each case.

Arguments: communicators.
"""

import json
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from checkpoints.presets import model_config
from checkpoints.weights import load_model
from cli import run
from comms.registry import choose
from layers.attention import Causal
from model import Transformer
from tp import World, init_world

MODEL = "llama-3-70b:3"
BIASED = "standard, with biases"  # biases in every linear layer: its all-reduces are not fused
VARIANTS = ("standard", "hybrid:1", "ladder", "parallel", BIASED)
TOKENS = (8, 640)  # rows of a decode step, and of a prompt


def loaded(world: World, communicator: str, variant: str, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    there = replace(world, comm=choose("cuda", communicator).build())
    if variant != BIASED:
        return load_model(MODEL, model_config(MODEL, variant, world.world_size), there, dtype)
    config = replace(model_config(MODEL, "standard", world.world_size), qkv_bias=True, o_bias=True, mlp_bias=True)
    model, generator = load_model(MODEL, config, there, dtype), torch.Generator(world.device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # those added after an all-reduce are the same on all ranks
            parameter.normal_(0.0, 0.1, generator=generator)
    return model


def logits(model: Transformer, ids: Tensor) -> tuple[Tensor, int]:
    """(logits (T, vocab), number of fused all-reduces) of a second pass, because the first may measure strategies."""
    context = Causal(ids.shape[1], ids.device)
    model(ids, context)
    before = getattr(model.comm, "fused", 0)
    found = model(ids, context)[0]
    model.comm.check()
    return found, getattr(model.comm, "fused", 0) - before


def main() -> None:
    world = init_world("cuda", "nccl")
    prompt = torch.randint(1000, (1, max(TOKENS)), device=world.device)
    dist.broadcast(prompt, 0)
    with torch.inference_mode():
        for variant in VARIANTS:
            nccl = loaded(world, "nccl", variant)
            exact_model = loaded(world, "nccl", variant, torch.float32)
            exact_model.load_state_dict(nccl.state_dict())
            exact = {tokens: logits(exact_model, prompt[:, :tokens])[0] for tokens in TOKENS}
            del exact_model
            for name in sys.argv[1:]:
                model = nccl if name == "nccl" else loaded(world, name, variant)
                for tokens in TOKENS:
                    got, fused = logits(model, prompt[:, :tokens])
                    error = ((got - exact[tokens]).square().mean() / exact[tokens].square().mean()).sqrt().item()
                    found = {"comm": name, "variant": variant, "tokens": tokens, "error": error, "fused": fused}
                    if world.rank == 0:
                        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
