import os

from commands import attempt
from features import MODEL, URL


def measure(api: str, feature: str, path: str, stream: bool) -> None:
    backend = f"kind=openai_http,target={URL},model={MODEL},request_format={path},stream={str(stream).lower()}"
    command = ["venv/bin/guidellm", "run", "--backend", backend, "--profile", "kind=synchronous", "--disable-progress"]
    command += ["--constraint", "kind=max_requests,count=3", "--constraint", "kind=max_errors,count=1"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={os.environ['MODEL_DIR']}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1", "COLUMNS": "400"}
    attempt(api, feature, command, {}, "successful=3 errored=0", **offline)


measure("chat", "answer", "/v1/chat/completions", False)
measure("chat", "stream", "/v1/chat/completions", True)
measure("completions", "stream", "/v1/completions", True)
