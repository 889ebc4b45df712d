"""Score prompts with vLLM or transformers. `python -m scripts.quality.vllm_reads` starts it with the Python of their environment, and
reads its stdout.

    PYTHON scripts/quality/vllm_scores.py JOB

JOB is the path of a JSON object: `program`, vLLM or transformers, `model`, the folder of a checkpoint, `dtype`, and `prompts`, lists of
token ids. Prints one line that begins with MARK: a JSON object with `version`, the program's, and `logprobs`, for each prompt the natural
log-probabilities of all its tokens but the first. This file imports nothing of this repository, so that vLLM's environment does not need Rung's dependencies.
"""

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

MARK = "@scores "
MEMORY = 0.5  # share of a GPU's memory that vLLM may use; the models are small


def transformers_scores(model: str, dtype: str, prompts: list[list[int]]) -> list[list[float]]:
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device)
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        with torch.no_grad():
            logprobs = network(ids).logits[0, :-1].float().log_softmax(-1)
        found.append(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found


def vllm_scores(model: str, dtype: str, prompts: list[list[int]]) -> list[list[float]]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # installed in another environment

    llm = LLM(
        model=model,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,  # capturing graphs would take longer than all prompts
        enable_prefix_caching=False,
        disable_log_stats=True,
        max_model_len=max(map(len, prompts)) + 1,
        gpu_memory_utilization=MEMORY,
        generation_config="vllm",
    )
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False, ignore_eos=True)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [
        [entry[token].logprob for entry, token in zip(answer.prompt_logprobs[1:], ids[1:], strict=True)]
        for answer, ids in zip(answers, prompts, strict=True)
    ]


def main() -> None:
    job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    scores = vllm_scores if job["program"] == "vLLM" else transformers_scores
    found = scores(job["model"], job["dtype"], job["prompts"])
    version = import_module(job["program"].lower()).__version__
    print(MARK + json.dumps({"version": version, "logprobs": found}), flush=True)
    os._exit(0)  # vLLM's threads may abort a process that ends as usual


if __name__ == "__main__":
    main()
