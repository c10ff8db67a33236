"""A cheap model before a dear one: how relevant a review is, by the weights of its words alone.

`tokens` [batch, 200], word indices as float32, to `relevance` [batch, 1], from 0 to 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from batchtune.sample_models.sizes import LENGTH, VOCABULARY


class WordRelevance(nn.Module):  # type: ignore[misc]
    """The sum of the words' weights, which of random words is normal with a variance of one, as a probability."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, 1)
        nn.init.normal_(self.words.weight, std=1.0 / math.sqrt(LENGTH))
        with torch.no_grad():
            self.words.weight -= self.words.weight.mean()

    def forward(self, tokens: Any) -> Any:
        words = tokens.long().clamp(0, VOCABULARY - 1)
        return torch.sigmoid(self.words(words).sum(dim=1))
