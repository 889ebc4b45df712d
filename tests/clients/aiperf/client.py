import os

from commands import attempt
from features import MODEL, URL


def measure(api: str, feature: str, kind: str, *more: str) -> None:
    command = ["venv/bin/aiperf", "profile", "--model", MODEL, "--url", URL, "--endpoint-type", kind]
    command += ["--tokenizer", os.environ["MODEL_DIR"], "--synthetic-input-tokens-mean", "32", "--output-tokens-mean", "8"]
    command += ["--concurrency", "1", "--request-count", "3", "--ui", "none", "--no-gpu-telemetry", *more]
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "DO_NOT_TRACK": "1"}  # its offline mode takes no folder as a tokenizer
    attempt(api, feature, command, {}, "Request Throughput", **quiet)


measure("chat", "answer", "chat")
measure("chat", "stream", "chat", "--streaming")
measure("completions", "stream", "completions", "--streaming")
measure("embeddings", "answer", "embeddings")
