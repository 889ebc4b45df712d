"""Reasoning and tool calls in answers: how families of models write them, and the parser that finds them."""
