"""POST /v1/messages and /v1/messages/count_tokens, for Anthropic's clients.

A body becomes a `ChatBody` (bodies.py), so that templates, grammars, limits, fairness and the journal are those of chat
completions. Only the layout of answers, streams and errors is its own.
"""
