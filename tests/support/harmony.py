"""A tiny gpt-oss: its tokenizer has the special tokens of the family, and its chat template the family's format."""

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.support.models import save_random
from tests.test_sparse import gpt_oss

SPECIAL = ["<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>"]
EOS = ["<|return|>", "<|endoftext|>", "<|call|>"]
# What the family's template does: one call a message, of which it writes no text; results have the name of the last call; reasoning is
# written only before calls that no answer follows.
TEMPLATE = """
{%- macro turn(header, content, end="<|end|>") %}<|start|>{{ header }}<|message|>{{ content }}{{ end }}{% endmacro -%}
{{- turn("system", "Reasoning: " + (reasoning_effort or "medium") + "\\n\\n# Valid channels: analysis, commentary, final.") }}
{%- set others = messages[1:] if messages[0].role in ("system", "developer") else messages %}
{%- if others|length < messages|length or tools %}
{{- turn("developer", (messages[0].content if others|length < messages|length else "") + (tools|tojson if tools else "")) }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for m in others %}
{%- if m.role == "assistant" and m.tool_calls %}
{%- if m.content and m.thinking %}{{ raise_exception("Cannot pass both content and thinking") }}{% endif %}
{%- set later = namespace(found=false) %}
{%- for one in others[loop.index:] %}{% if one.role == "assistant" and not one.tool_calls %}{% set later.found = true %}{% endif %}{% endfor %}
{%- if (m.content or m.thinking) and not later.found %}
{{- turn("assistant<|channel|>analysis", m.content or m.thinking) }}
{%- endif %}
{%- set last.name = m.tool_calls[0].function.name %}
{{- turn("assistant to=" + "functions." + last.name + "<|channel|>commentary json", m.tool_calls[0].function.arguments|tojson, "<|call|>") }}
{%- elif m.role == "assistant" %}
{{- turn("assistant<|channel|>final", m.content) }}
{%- elif m.role == "tool" %}
{%- if last.name is none %}{{ raise_exception("no previous call") }}{% endif %}
{{- turn("functions." + last.name + " to=assistant<|channel|>commentary", m.content|tojson) }}
{%- elif m.role == "user" %}
{{- turn("user", m.content) }}
{%- endif %}
{%- endfor %}
{#- how the model reasons, and calls: <|channel|>analysis<|message|> <|start|>assistant to= #}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""


def save_tokenizer(folder: Path) -> int:
    """Write the tokenizer's files. Each byte is a token. Returns the vocabulary's size."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokenizer.token_to_id(one) for one in EOS]}))
    return tokenizer.get_vocab_size()


def save_tiny(folder: Path) -> Path:
    """Write a checkpoint with random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_random(gpt_oss(vocab_size=save_tokenizer(folder), max_seq_len=2048), folder)
    return folder
