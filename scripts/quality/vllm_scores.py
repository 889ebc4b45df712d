"""Score prompts with vLLM. `python -m scripts.quality.vllm_reads` starts it with the Python of vLLM's environment, and reads its
stdout.

    PYTHON scripts/quality/vllm_scores.py JOB

JOB is the path of a JSON object: `model`, the folder of a checkpoint, `dtype`, and `prompts`, lists of token ids. Prints one line that
begins with MARK: a JSON object with `vllm`, its version, and `logprobs`, for each prompt the natural log-probabilities of all its
tokens but the first. This file imports nothing of this repository, so that vLLM's environment does not need Rung's dependencies.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

MARK = "@scores "
MEMORY = 0.5  # share of a GPU's memory that vLLM may use; the models are small


def scores(model: str, dtype: str, prompts: list[list[int]]) -> list[list[float]]:
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
    found = scores(job["model"], job["dtype"], job["prompts"])
    import vllm

    print(MARK + json.dumps({"vllm": vllm.__version__, "logprobs": found}), flush=True)
    os._exit(0)  # vLLM's threads may abort a process that ends as usual


if __name__ == "__main__":
    main()
