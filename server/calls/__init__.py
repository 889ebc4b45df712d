"""Reasoning and tool calls of requests: which parser and which grammar an answer has."""
