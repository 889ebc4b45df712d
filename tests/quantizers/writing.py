"""What the scripts that write checkpoints share. They run in the environments of their tools, so nothing of Rung is here.

Their arguments: the folder into which each writes a folder for each format, and the folder of a tokenizer.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

OUT, TOKENIZER = map(Path, sys.argv[1:])
BASE = OUT / ".base"  # the model in 16 bits
SHAPE = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "bos_token_id": 0, "eos_token_id": 1}
ROWS, LENGTH = 16, 128  # of calibration
Format = TypeVar("Format")


def tokens(rows: int, length: int, seed: int) -> Tensor:
    """(rows, length) random int64."""
    return torch.randint(2, SHAPE["vocab_size"], (rows, length), generator=torch.Generator().manual_seed(seed))


TOKENS, CALIBRATION = tokens(2, 24, 0), tokens(ROWS, LENGTH, 1)


def write_base() -> None:
    """A random Llama in bf16, whose layers keep the size of their inputs."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS))
    for tensor in model.parameters():
        tensor.data = torch.randn_like(tensor) * tensor.shape[1] ** -0.5 if tensor.ndim == 2 else torch.rand_like(tensor) + 0.5
    model.bfloat16().save_pretrained(BASE)
    for file in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(TOKENIZER / file, BASE)


Write = Callable[[Format, Path, bool], dict[str, Tensor]]


def write_all(read: Mapping[str, Format], refused: Mapping[str, Format], write: Write[Format]) -> None:
    """Write the formats that are not there. `write(format, folder, whether Rung reads it)` returns the tool's logits of TOKENS in
    fp32: `dense` of the dequantized weights, and `rounded` if the tool can round activations on a CPU. What is refused has none."""
    torch.set_num_threads(1)
    write_base()
    for name, format in {**read, **refused}.items():
        if not (OUT / name).exists():
            unfinished = OUT / ".unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            if logits := write(format, unfinished, name in read):
                save_file({"tokens": TOKENS, **logits}, unfinished / "reference.safetensors")
            unfinished.rename(OUT / name)
    os._exit(0)  # some tools leave threads that never end
