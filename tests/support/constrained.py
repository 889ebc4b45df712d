"""Text that random logits write under a grammar."""

import re
from functools import cache

import torch

from engine.grammars import Grammars
from tests.support.masks import allowed
from tests.support.server_thread import EOS, TOKENIZER

VOCAB = 1024


@cache
def grammars() -> Grammars:
    return Grammars(TOKENIZER, VOCAB)


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar accepts the whole text. Special tokens that it spells are those tokens."""
    matcher = grammars().compile(grammar)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def ends_with(text: str, end: str) -> bool:
    """Whether the text ends with this, and outside of a JSON string: it has an even number of quotes."""
    return text.endswith(end) and len(re.findall(r'(?<!\\)(?:\\\\)*"', text)) % 2 == 0


def write(grammar: str, limit: int = 4000, begin: str = "", until: str = "", likelier: str = '"') -> str:
    """What random logits write behind `begin`, to the end of the grammar, or until the text ends with `until` outside of a JSON
    string.

    The last token of the text `likelier` gets a higher logit, so that JSON strings end.
    """
    matcher = grammars().compile(grammar)
    ids = TOKENIZER.encode(begin, add_special_tokens=False)
    assert matcher.consume_tokens(ids)
    more = TOKENIZER.encode(likelier, add_special_tokens=False)[-1]
    while not matcher.is_stopped() and not (until and ends_with(TOKENIZER.decode(ids, False), until)):
        logits = torch.randn(VOCAB)
        logits[more] += 3
        ids.append(int(logits.masked_fill(~allowed(matcher, VOCAB), -torch.inf).argmax()))
        assert matcher.consume_token(ids[-1]) and len(ids) < limit
    assert not matcher.is_error(), matcher.get_error()
    return TOKENIZER.decode([one for one in ids if one != EOS], False)
