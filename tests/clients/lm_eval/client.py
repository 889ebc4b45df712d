import json
import os
from pathlib import Path

from commands import attempt
from features import MODEL, URL

ROWS = [
    {"prompt": "What is 17 plus 25?", "choices": [" 42", " 43"], "gold": 0},
    {"prompt": "2 + 2 =", "choices": [" 4", " 5"], "gold": 0},
]
TASKS = {
    "rung_choice": {"output_type": "multiple_choice", "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}]},
    "rung_text": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def task(name: str) -> str:
    data = {"data_files": {"test": str(Path.cwd() / "rows.jsonl")}}
    shared = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", "doc_to_text": "prompt"}
    return json.dumps({**shared, "doc_to_target": "gold", **TASKS[name]})  # JSON is valid YAML


def evaluate(api: str, feature: str, kind: str, path: str, tasks: str, *more: str, **settings: object) -> None:
    settings = {"model": MODEL, "base_url": URL + path, "max_retries": 1, "max_length": 1024, "timeout": 60, **settings}
    arguments = ",".join(f"{name}={value}" for name, value in settings.items())
    command = ["venv/bin/lm_eval", "run", "--model", kind, "--model_args", arguments, "--tasks", tasks]
    command += ["--include_path", str(Path("tasks").absolute()), *more]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LMEVAL_DISABLE_VERSION_CHECK": "1"}
    attempt(api, feature, command, {}, "|rung_", **offline)


Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
Path("tasks").mkdir(exist_ok=True)
for name in TASKS:
    Path(f"tasks/{name}.yaml").write_text(task(name))
both = ",".join(TASKS)
huggingface = {"tokenizer_backend": "huggingface", "tokenizer": os.environ["MODEL_DIR"]}
evaluate("local-completions", "answer", "local-completions", "/v1/completions", both, **huggingface)
# the server's tokenizer
evaluate("local-completions", "tokens", "local-completions", "/v1/completions", both, tokenizer_backend="remote")
evaluate(
    "local-chat-completions", "answer", "local-chat-completions", "/v1/chat/completions", "rung_text", "--apply_chat_template"
)
