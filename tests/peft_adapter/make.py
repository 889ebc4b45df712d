"""Save an adapter with PEFT, and the logits that PEFT computes with it: the files in this folder, for tests/test_lora.py.

pip install peft transformers torch && python tests/peft_adapter/make.py    # made with PEFT 0.21.2 and transformers 5.23.0
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
BASE = HERE.parents[1] / "models" / "tiny-standard"
TOKENS = [0, 17, 300, 512, 999, 41, 7]

torch.manual_seed(1)
base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
config = LoraConfig(
    r=2,
    lora_alpha=6,
    target_modules=["q_proj", "v_proj", "down_proj"],
    layers_to_transform=[0, 5],
    rank_pattern={"layers.5.mlp.down_proj": 3},
    alpha_pattern={"layers.0.self_attn.v_proj": 9},
    use_rslora=True,
    init_lora_weights=False,  # neither factor is 0
    task_type="CAUSAL_LM",
)
model = get_peft_model(base, config).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.normal_(std=0.2)
    logits = model(torch.tensor([TOKENS])).logits[0]
model.peft_config["default"].base_model_name_or_path = "models/tiny-standard"
model.save_pretrained(HERE, save_embedding_layers=False)
(HERE / "README.md").unlink()  # PEFT's model card, which is empty
save_file({"tokens": torch.tensor(TOKENS), "logits": logits}, HERE / "logits.safetensors")
