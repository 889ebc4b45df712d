"""Grammars of answers: JSON schemas, regular expressions and other formats."""
