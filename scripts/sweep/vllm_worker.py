"""Measure vLLM for a sweep. `python -m scripts.sweep` starts it with the Python of vLLM's environment, and reads its stdout.

    PYTHON scripts/sweep/vllm_worker.py SETTINGS FOLDER MEMORY

SETTINGS is the path of a JSON list of settings with the same model, ranks and seed. FOLDER contains the model's config.json. MEMORY
is the share of a GPU's memory that vLLM may use. One engine with random weights measures all settings and prints the same
lines as `worker.py`. This file imports nothing of this repository, so that vLLM's environment does not need Rung's
dependencies.

A run makes two calls, each with new random prompts: one that generates a single token, which measures the prefill, and one that
generates all tokens. vLLM does not report single steps, so every step of a run is recorded with the mean time.
"""

import json
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

MARK = "@sweep "  # as in worker.py


def say(**content: Any) -> None:
    print(MARK + json.dumps(content), flush=True)


def graph_sizes(batches: list[int]) -> list[int]:
    """The batch sizes for which vLLM captures CUDA graphs: those of the sweep, and powers of two up to the largest.

    Capturing these takes less time than capturing vLLM's default list.
    """
    return sorted({*batches, *(1 << n for n in range(max(batches).bit_length()))})


def start(settings: list[dict[str, Any]], folder: str, memory: float) -> Any:
    """A vLLM engine that can run all of the settings. memory: the share of a GPU's that it may use."""
    from vllm import LLM  # type: ignore[import-not-found]  # installed in another environment

    first, batches = settings[0], [s["batch"] for s in settings]
    return LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=first["dtype"],
        kv_cache_dtype=first["kv_dtype"],
        quantization="fp8" if first["quantize"] == "fp8" else None,  # others are in the config
        tensor_parallel_size=first["tp"],
        max_model_len=max(s["prompt_length"] + s["new_tokens"] for s in settings),
        max_num_seqs=max(batches),
        enable_prefix_caching=False,
        disable_log_stats=True,
        gpu_memory_utilization=memory,
        generation_config="vllm",
        seed=first["seed"],
        compilation_config={"cudagraph_capture_sizes": graph_sizes(batches)},
    )


def seconds(llm: Any, s: dict[str, Any], tokens: int, vocabulary: int, rng: random.Random) -> float:
    """Seconds to generate `tokens` tokens for each sequence of a batch of new random prompts, greedy."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": [rng.randrange(vocabulary) for _ in range(s["prompt_length"])]} for _ in range(s["batch"])]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    answers = llm.generate(prompts, params, use_tqdm=False)
    took = time.perf_counter() - began
    assert all(len(answer.outputs[0].token_ids) == tokens for answer in answers)
    return took


def sample(prefill: float, step: float | None, s: dict[str, Any]) -> dict[str, Any]:
    """One run in the form that `worker.one_run` returns. prefill, step: ms; step is None without decode steps."""
    return {
        "prefill_ms": round(prefill, 3),
        "decode_ms_per_token": step and round(step, 4),
        "tokens_per_second": step and round(s["batch"] / step * 1e3, 2),
        "weight_gb_per_second": None,
        "peak_memory_gb": None,
        "step_ms": [round(step, 4)] * (s["new_tokens"] - 1) if step else [],
        "exposed_ms": None,
        "link_ms": None,
    }


def measure(llm: Any, s: dict[str, Any], vocabulary: int) -> list[dict[str, Any]]:
    """The samples of one setting, after one warm-up run."""
    rng, steps = random.Random(s["seed"]), s["new_tokens"] - 1
    ms = [[seconds(llm, s, tokens, vocabulary, rng) * 1e3 for tokens in (1, s["new_tokens"])] for _ in range(1 + s["runs"])][1:]
    prefill = median(first for first, _ in ms)  # the median, because the noise of single prefills would add to that of totals
    return [sample(first, (total - prefill) / steps if steps else None, s) for first, total in ms]


def main() -> None:
    settings, folder, memory = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2], float(sys.argv[3])
    vocabulary = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    say(begin=settings[0])
    llm = start(settings, folder, memory)
    import vllm

    for s in settings:
        say(begin=s)
        say(done=s, samples=measure(llm, s, vocabulary), split=None, variant=f"vLLM {vllm.__version__}", communicator="vLLM")


if __name__ == "__main__":
    main()
