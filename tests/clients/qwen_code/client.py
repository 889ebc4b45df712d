import json

from commands import attempt
from features import HELLO, MODEL, URL

SETTINGS = {
    "telemetry": {"enabled": False},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"disableAutoUpdate": True, "enableAutoUpdate": False},
    "model": {"name": MODEL, "generationConfig": {"maxRetries": 0, "timeout": 480000, "samplingParams": {"max_tokens": 256}}},
    "security": {"auth": {"selectedType": "openai"}},
}
command = ["node_modules/.bin/qwen", HELLO, "--auth-type", "openai", "--output-format", "json", "--max-session-turns", "2"]
attempt(
    "chat", "one turn", command, {".qwen/settings.json": json.dumps(SETTINGS)}, '"is_error":false',
    OPENAI_BASE_URL=f"{URL}/v1", OPENAI_API_KEY="none", OPENAI_MODEL=MODEL,
)  # fmt: skip
