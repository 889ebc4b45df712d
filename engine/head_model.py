"""A draft head with what a runner takes from a model."""

import torch
from torch import Tensor

from checkpoints.eagle import EagleHead
from comms import Local
from engine.step_inputs import ROUND
from model import Transformer


class HeadModel:
    """A head with what a runner takes from a model. features: (T, D), of the rows of the next step, at a fixed address. D:
    hidden size of the head."""

    attention_slots = 1

    def __init__(self, head: EagleHead, target: Transformer, rows: int) -> None:
        """rows: most of a step."""
        self.draft_head, self.target, self.config = head, target, head.config.layer
        self.comm = Local()  # every rank has all logits, also those of a head that is split
        self.norm, self.n_kv_heads, self.vocab = head.norm, head.n_kv_heads, range(self.config.vocab_size)
        self.features = torch.zeros(
            -(-rows // ROUND) * ROUND, self.config.hidden_size, dtype=head.norm.weight.dtype, device=head.norm.weight.device
        )
        self._all_ids = head.config.draft_vocab_size == self.config.vocab_size

    def hidden_and_streams(
        self, tokens: Tensor, context: object, layers: object, rows: Tensor | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """As `Transformer.hidden_and_streams`, but from `features`, too, and without streams."""
        embedded = self.draft_head.embed(tokens, self.target)
        hidden = self.draft_head(embedded, self.features[None, : tokens.shape[1]], context)
        return (hidden if rows is None else hidden[:, rows]), []

    def head(self, normed: Tensor) -> Tensor:
        """(T, D) to (T, vocab_size) fp32; -inf for the ids that the head does not know."""
        logits = self.draft_head.lm_head(normed).float()
        if self._all_ids:
            return logits
        return logits.new_full((len(logits), len(self.vocab)), -torch.inf).index_copy_(1, self.draft_head.targets, logits)

    def logits(self, hidden: Tensor) -> Tensor:
        """(T, D) to (T, vocab_size) fp32."""
        return self.head(self.norm(hidden))
