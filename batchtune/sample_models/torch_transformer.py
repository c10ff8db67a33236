"""The text classifier of the Keras examples in PyTorch: one transformer block over 200 words, two classes.

`tokens` [batch, 200], word indices as float32, to `scores` [batch, 2]. Layer for layer the Keras one; each head is
as wide as the embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from batchtune.sample_models.sizes import EMBEDDING, FEED_FORWARD, HEADS, LENGTH, VOCABULARY


class ImdbTransformer(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, EMBEDDING)
        self.positions = nn.Embedding(LENGTH, EMBEDDING)
        self.query = nn.Linear(EMBEDDING, HEADS * EMBEDDING)
        self.key = nn.Linear(EMBEDDING, HEADS * EMBEDDING)
        self.value = nn.Linear(EMBEDDING, HEADS * EMBEDDING)
        self.joined = nn.Linear(HEADS * EMBEDDING, EMBEDDING)
        self.after_attention = nn.LayerNorm(EMBEDDING, eps=1e-6)
        self.forwarded = nn.Sequential(
            nn.Linear(EMBEDDING, FEED_FORWARD), nn.ReLU(), nn.Linear(FEED_FORWARD, EMBEDDING)
        )
        self.after_forward = nn.LayerNorm(EMBEDDING, eps=1e-6)
        self.scores = nn.Sequential(nn.Linear(EMBEDDING, 20), nn.ReLU(), nn.Linear(20, 2), nn.Softmax(dim=1))

    def forward(self, tokens: Any) -> Any:
        # A GPU that looks up a word it does not have is lost to its process, so strangers become the last word.
        words = tokens.long().clamp(0, VOCABULARY - 1)
        return self.classified(self.words(words) + self.positions.weight)

    def classified(self, hidden: Any) -> Any:
        """The scores of embedded words."""
        hidden = self.after_attention(hidden + self._attended(hidden))
        hidden = self.after_forward(hidden + self.forwarded(hidden))
        return self.scores(hidden.mean(dim=1))

    def _attended(self, hidden: Any) -> Any:
        query, key, value = (_by_head(layer(hidden)) for layer in (self.query, self.key, self.value))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return self.joined(mixed.transpose(1, 2).flatten(2))


def imdb_transformer() -> Any:
    """With embeddings as small as Keras draws them: with torch's own unit variance, two classes saturate."""
    model = ImdbTransformer()
    nn.init.uniform_(model.words.weight, -0.05, 0.05)
    nn.init.uniform_(model.positions.weight, -0.05, 0.05)
    return model


def _by_head(projected: Any) -> Any:
    """[batch, places, heads × width] to [batch, heads, places, width]."""
    return projected.unflatten(2, (HEADS, EMBEDDING)).transpose(1, 2)
