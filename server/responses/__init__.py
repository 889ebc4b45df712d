"""OpenAI's Responses API: POST /v1/responses, and what is kept of its answers."""
