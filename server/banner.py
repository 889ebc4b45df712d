"""What the server prints when it is ready: its model, and curl commands to try it."""

import json
import shlex
from typing import Any

from engine.protocol import Ready
from server.service import Service


def banner(service: Service, ready: Ready, address: str) -> str:
    name = service.model_name
    kv_tokens = ready.kv_blocks * ready.block_size
    noise = "\n  random weights: the text is noise" if service.settings.random_weights else ""
    own = service.examples or {"chat": [], "completion": []}  # prompts that this model can answer
    prompt, question = (*own["completion"], "Once upon a time")[0], (*own["chat"], "Tell me a story about a fox.")[0]
    requests: list[tuple[str, dict[str, Any]]] = [("completions", {"prompt": prompt, "max_tokens": 40})]
    if not ready.causal:
        requests = [("embeddings", {"input": prompt})]
    elif service.chat_template is not None or "default" in service.tokenizer.chat_templates:
        requests.append(("chat/completions", {"messages": [{"role": "user", "content": question}], "max_tokens": 40}))
    curls = "\n\n".join(
        curl(f"{address}/v1/{path}", {"model": name, **body}, bool(service.settings.api_key)) for path, body in requests
    )
    return f"""
Serving {name}: {ready.variant}, {ready.world_size} rank{"s" * (ready.world_size > 1)} on {ready.device}, {ready.communicator}, {ready.dtype}
  context {ready.max_model_len} tokens, KV cache {kv_tokens} tokens{noise}

Try it:

{curls}

The page: {address}/   the API: {address}/docs
"""


def curl(url: str, body: dict[str, Any], with_key: bool) -> str:
    """A curl command to copy into a shell."""
    headers = ["Authorization: Bearer YOUR_KEY"] * with_key + ["Content-Type: application/json"]
    parts = [f"curl {url}", *(f"-H '{header}'" for header in headers), f"-d {shlex.quote(json.dumps(body))}"]
    return "  " + " \\\n    ".join(parts)
