"""Grammars for what requests demand of their answers: JSON schemas, tool calls and other constraints."""
