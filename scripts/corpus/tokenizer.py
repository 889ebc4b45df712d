"""The tokenizer of the synthetic corpus: a byte-level BPE trained on its documents, and the chat template."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from errors import UserError
from scripts.corpus.documents import BEGIN, END, SPECIAL_TOKENS, documents

MAX_LENGTH = 1024  # tokens

CHAT_TEMPLATE = (
    "{{- '<|begin|>' -}}"
    "{%- if tools -%}{{- '<|system|>You may call these tools: ' -}}{{- tools | tojson -}}{{- '<|end|>' -}}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] in ['assistant', 'system'] -%}{{- '<|' + message['role'] + '|>' -}}"
    "{%- elif message['role'] == 'developer' -%}{{- '<|system|>' -}}"
    "{%- else -%}{{- '<|user|>' -}}{%- endif -%}"
    "{%- set content = message['content'] -%}"
    "{%- if content is string -%}{{- content -}}"
    "{%- elif content -%}{%- for part in content -%}"
    "{%- if part is string -%}{{- part -}}{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    "{{- '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def train_tokenizer(path: Path, vocab_size: int = 1024, seed: int = 0, sample: int = 20000) -> None:
    """Train a byte-level BPE on `sample` training documents and write a Hugging Face tokenizer to the folder `path`.

    `vocab_size` includes the special tokens and all 256 bytes. Raises UserError if it cannot be reached exactly.
    """
    least = len(SPECIAL_TOKENS) + 256
    if vocab_size < least:
        raise UserError(f"vocabulary size is {vocab_size}; the special tokens and the bytes alone need {least}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_texts(seed, sample), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(f"{sample} documents give only {tokenizer.get_vocab_size()} of {vocab_size} tokens; raise --sample")
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B:1", special_tokens=[(BEGIN, 0)]
    )
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    _write_json(path / "tokenizer_config.json", _tokenizer_config())
    _write_json(path / "special_tokens_map.json", {"bos_token": BEGIN, "eos_token": END})


def _plain_texts(seed: int, sample: int) -> Iterator[str]:
    """The texts from which merges are learned, without special tokens."""
    for document in documents(seed, sample):
        yield from [document.text] if document.text else [message["content"] for message in document.messages]


def _tokenizer_config() -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {str(i): {"content": token, **flags} for i, token in enumerate(SPECIAL_TOKENS)},
        "bos_token": BEGIN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "model_max_length": MAX_LENGTH,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in a folder or in a `tokenizer.json` file. Raises UserError if there is none."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(f"no tokenizer at {file}; make one with: python -m scripts.corpus --tokenizer {path}")
    return Tokenizer.from_file(str(file))
