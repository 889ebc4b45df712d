from commands import attempt
from features import HELLO, MODEL, URL

CONFIG = f"""
model = "{MODEL}"
model_provider = "rung"
check_for_update_on_startup = false
web_search = "disabled"
[analytics]
enabled = false
[feedback]
enabled = false
[otel]
exporter = "none"
metrics_exporter = "none"
[model_providers.rung]
name = "Rung"
base_url = "{URL}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = 480000
"""
command = ["node_modules/.bin/codex", "exec", "--skip-git-repo-check", "--sandbox", "read-only", "--json", HELLO]
attempt("responses", "one turn", command, {".codex/config.toml": CONFIG}, "turn.completed")
