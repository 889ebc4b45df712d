import json

from commands import attempt
from features import HELLO, MODEL, URL

CONFIG = {
    "$schema": "https://opencode.ai/config.json",
    "autoupdate": False,
    "share": "disabled",
    "model": f"rung/{MODEL}",
    "small_model": f"rung/{MODEL}",
    "provider": {
        "rung": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Rung",
            "options": {"baseURL": f"{URL}/v1", "apiKey": "none"},
            "models": {MODEL: {"name": MODEL, "limit": {"context": 131072, "output": 256}}},
        }
    },
}
attempt(
    "chat", "one turn", ["node_modules/.bin/opencode", "run", HELLO], {".config/opencode/opencode.json": json.dumps(CONFIG)},
    OPENCODE_DISABLE_AUTOUPDATE="true", OPENCODE_DISABLE_MODELS_FETCH="true", OPENCODE_DISABLE_LSP_DOWNLOAD="true",
)  # fmt: skip
