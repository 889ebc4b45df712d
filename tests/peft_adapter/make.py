"""Save an adapter with PEFT, and the logits that PEFT computes with it: the files in this folder, for tests/test_lora.py.

pip install peft transformers torch && python tests/peft_adapter/make.py    # made with PEFT 0.21.2 and transformers 5.23.0
cd ~/.cache/rung/real-models && python …/make.py coder coder-lora 8    # of all layers, trained for 8 steps, for tests/test_real_models.py
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(__file__).parent
BASE, OUT, STEPS = (
    (*map(Path, sys.argv[1:3]), int(sys.argv[3])) if sys.argv[1:] else (HERE.parents[1] / "models/tiny-standard", HERE, 0)
)
TOKENS = [0, 17, 300, 512, 999, 41, 7]

torch.manual_seed(1)
base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
layers = dict(target_modules=["q_proj", "v_proj", "down_proj"], layers_to_transform=None if STEPS else [0, 5])
patterns = dict(rank_pattern={"layers.5.mlp.down_proj": 3}, alpha_pattern={"layers.0.self_attn.v_proj": 9})
init = bool(STEPS)  # else neither factor is 0
config = LoraConfig(r=2, lora_alpha=6, **layers, **patterns, use_rslora=True, init_lora_weights=init, task_type="CAUSAL_LM")
model = get_peft_model(base, config).eval()
weights = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
optimizer = torch.optim.AdamW(weights, lr=1e-3)
read = torch.tensor([AutoTokenizer.from_pretrained(BASE)(Path(__file__).read_text()).input_ids[:64]])
for _ in range(STEPS):
    model(read, labels=read).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
with torch.no_grad():
    for parameter in () if STEPS else weights:
        parameter.normal_(std=0.2)
    logits = model(torch.tensor([TOKENS])).logits[0]
model.peft_config["default"].base_model_name_or_path = "models/tiny-standard"
model.save_pretrained(OUT, save_embedding_layers=False)
(OUT / "README.md").unlink()  # PEFT's model card, which is empty
save_file({"tokens": torch.tensor(TOKENS), "logits": logits}, OUT / "logits.safetensors")
