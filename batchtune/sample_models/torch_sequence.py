"""A text classifier that takes sequences of any length: transformer blocks over at most 256 words, two classes.

`tokens` [batch, length], word indices as int64, 0 for padding, to `scores` [batch, 2]. Padding is masked: a sequence
has the same scores however far it is padded with zeros.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchtune.sample_models.sizes import (
    SEQUENCE_BLOCKS,
    SEQUENCE_EMBEDDING,
    SEQUENCE_FEED_FORWARD,
    SEQUENCE_HEADS,
    SEQUENCE_MAX,
    VOCABULARY,
)

_MASKED = -1e4
"""Added to the attention to padding: e to this is 0, and a sequence of padding alone still has a score."""


class SequenceTransformer(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, SEQUENCE_EMBEDDING)
        self.positions = nn.Embedding(SEQUENCE_MAX, SEQUENCE_EMBEDDING)
        self.blocks = nn.ModuleList(_Block() for _ in range(SEQUENCE_BLOCKS))
        self.scores = nn.Sequential(nn.Linear(SEQUENCE_EMBEDDING, 2), nn.Softmax(dim=1))

    def forward(self, tokens: Any) -> Any:
        # A GPU that looks up a word it does not have is lost to its process, so strangers become the last word.
        words = tokens.clamp(0, VOCABULARY - 1)
        hidden = self.words(words) + self.positions.weight[: words.shape[1]]
        kept = (words > 0).to(hidden.dtype)
        mask = ((1.0 - kept) * _MASKED).unsqueeze(1).unsqueeze(2)
        for block in self.blocks:
            hidden = block(hidden, mask)
        summed = (hidden * kept.unsqueeze(2)).sum(dim=1)
        return self.scores(summed / kept.sum(dim=1, keepdim=True).clamp(min=1.0))


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.projected = nn.Linear(SEQUENCE_EMBEDDING, 3 * SEQUENCE_EMBEDDING)
        self.joined = nn.Linear(SEQUENCE_EMBEDDING, SEQUENCE_EMBEDDING)
        self.after_attention = nn.LayerNorm(SEQUENCE_EMBEDDING)
        self.forwarded = nn.Sequential(
            nn.Linear(SEQUENCE_EMBEDDING, SEQUENCE_FEED_FORWARD),
            nn.ReLU(),
            nn.Linear(SEQUENCE_FEED_FORWARD, SEQUENCE_EMBEDDING),
        )
        self.after_forward = nn.LayerNorm(SEQUENCE_EMBEDDING)

    def forward(self, hidden: Any, mask: Any) -> Any:
        heads = (
            part.unflatten(2, (SEQUENCE_HEADS, SEQUENCE_EMBEDDING // SEQUENCE_HEADS)).transpose(1, 2)
            for part in self.projected(hidden).chunk(3, dim=2)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        hidden = self.after_attention(hidden + self.joined(mixed.transpose(1, 2).flatten(2)))
        return self.after_forward(hidden + self.forwarded(hidden))
