"""Adds to a trained or converted checkpoint what other programs need to load it."""

import json
import shutil
from pathlib import Path

from config import ModelConfig

MODELING = Path(__file__).with_name("modeling_rung.py")
CLASSES = {"llama": "LlamaLadder", "mistral": "MistralLadder", "qwen2": "Qwen2Ladder", "qwen3": "Qwen3Ladder"}  # in MODELING


def add_modeling(directory: Path, config: ModelConfig) -> None:
    """Add to a checkpoint with ladder layers the code with which transformers loads it.

    After that, `AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)` works. The code of the model is
    copied, and config.json names it (`auto_map`). Does nothing for other variants: a standard model needs no code, and
    parallel and desync models run in Rung only.
    """
    if config.variant != "ladder":
        return
    path, name = directory / "config.json", f"modeling_rung.{CLASSES[config.family]}"
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["auto_map"] = {"AutoConfig": f"{name}Config", "AutoModelForCausalLM": f"{name}ForCausalLM"}
    shutil.copyfile(MODELING, directory / MODELING.name)
    path.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
