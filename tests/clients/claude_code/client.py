from commands import attempt
from features import HELLO, MODEL, URL

command = ["node_modules/.bin/claude", "-p", HELLO, "--model", MODEL, "--output-format", "json", "--max-turns", "1"]
attempt(
    "messages", "one turn", command, {}, '"is_error":false',
    ANTHROPIC_BASE_URL=URL, ANTHROPIC_API_KEY="none", ANTHROPIC_SMALL_FAST_MODEL=MODEL, ANTHROPIC_DEFAULT_HAIKU_MODEL=MODEL,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", DISABLE_TELEMETRY="1", DISABLE_ERROR_REPORTING="1", DISABLE_AUTOUPDATER="1",
    CLAUDE_CODE_MAX_OUTPUT_TOKENS="256", CLAUDE_CODE_MAX_RETRIES="0", API_TIMEOUT_MS="480000",
)  # fmt: skip
