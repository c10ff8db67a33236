"""The networks of the sample models in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from batchtune.sample_models import IMAGE_CLASSES, IMDB, SEQUENCE, TEXT_CLASSES


class SequenceTransformer(nn.Module):  # type: ignore[misc]
    """A text classifier for sequences of at most 256 words: maps `tokens` [batch, length], word indices as int64, 0 for
    padding, to `scores` [batch, 2].

    Padding is masked: a sequence has the same scores however far it is padded with zeros.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(IMDB.vocabulary, SEQUENCE.embedding)
        self.positions = nn.Embedding(SEQUENCE.length, SEQUENCE.embedding)
        self.blocks = nn.ModuleList(_Block() for _ in range(SEQUENCE.blocks))
        self.scores = nn.Sequential(nn.Linear(SEQUENCE.embedding, 2), nn.Softmax(dim=1))

    def forward(self, tokens: Any) -> Any:
        # A GPU that looks up a word it does not have is lost to its process, so strangers become the last word.
        words = tokens.clamp(0, IMDB.vocabulary - 1)
        hidden = self.words(words) + self.positions.weight[: words.shape[1]]
        kept = (words > 0).to(hidden.dtype)
        # Added to the attention to padding: e to this is 0, and a sequence of padding alone still has a score.
        masked = -1e4
        mask = ((1.0 - kept) * masked).unsqueeze(1).unsqueeze(2)
        for block in self.blocks:
            hidden = block(hidden, mask)
        summed = (hidden * kept.unsqueeze(2)).sum(dim=1)
        return self.scores(summed / kept.sum(dim=1, keepdim=True).clamp(min=1.0))


class _Block(nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.projected = nn.Linear(SEQUENCE.embedding, 3 * SEQUENCE.embedding)
        self.joined = nn.Linear(SEQUENCE.embedding, SEQUENCE.embedding)
        self.after_attention = nn.LayerNorm(SEQUENCE.embedding)
        self.forwarded = nn.Sequential(
            nn.Linear(SEQUENCE.embedding, SEQUENCE.feed_forward),
            nn.ReLU(),
            nn.Linear(SEQUENCE.feed_forward, SEQUENCE.embedding),
        )
        self.after_forward = nn.LayerNorm(SEQUENCE.embedding)

    def forward(self, hidden: Any, mask: Any) -> Any:
        heads = (
            part.unflatten(2, (SEQUENCE.heads, SEQUENCE.embedding // SEQUENCE.heads)).transpose(1, 2)
            for part in self.projected(hidden).chunk(3, dim=2)
        )
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        hidden = self.after_attention(hidden + self.joined(mixed.transpose(1, 2).flatten(2)))
        return self.after_forward(hidden + self.forwarded(hidden))


# A cheap model before a dear one: how relevant a review is, by the weights of its words alone.
#
# `tokens` [batch, 200], word indices as float32, to `relevance` [batch, 1], from 0 to 1.


class WordRelevance(nn.Module):  # type: ignore[misc]
    """Maps `tokens` [batch, 200] to `relevance` [batch, 1]: the sum of the words' weights through a sigmoid. For random
    words the sum is normal with a variance of one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(IMDB.vocabulary, 1)
        nn.init.normal_(self.words.weight, std=1.0 / math.sqrt(IMDB.length))
        with torch.no_grad():
            self.words.weight -= self.words.weight.mean()

    def forward(self, tokens: Any) -> Any:
        words = tokens.long().clamp(0, IMDB.vocabulary - 1)
        return torch.sigmoid(self.words(words).sum(dim=1))


class ImdbTransformer(nn.Module):  # type: ignore[misc]
    """The text classifier of the Keras examples, layer for layer: maps `tokens` [batch, 200], word indices as float32,
    to `scores` [batch, 2].

    One transformer block over 200 words; each head is as wide as the embedding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(IMDB.vocabulary, IMDB.embedding)
        self.positions = nn.Embedding(IMDB.length, IMDB.embedding)
        self.query = nn.Linear(IMDB.embedding, IMDB.heads * IMDB.embedding)
        self.key = nn.Linear(IMDB.embedding, IMDB.heads * IMDB.embedding)
        self.value = nn.Linear(IMDB.embedding, IMDB.heads * IMDB.embedding)
        self.joined = nn.Linear(IMDB.heads * IMDB.embedding, IMDB.embedding)
        self.after_attention = nn.LayerNorm(IMDB.embedding, eps=1e-6)
        self.forwarded = nn.Sequential(
            nn.Linear(IMDB.embedding, IMDB.feed_forward),
            nn.ReLU(),
            nn.Linear(IMDB.feed_forward, IMDB.embedding),
        )
        self.after_forward = nn.LayerNorm(IMDB.embedding, eps=1e-6)
        self.scores = nn.Sequential(
            nn.Linear(IMDB.embedding, 20), nn.ReLU(), nn.Linear(20, 2), nn.Softmax(dim=1)
        )

    def forward(self, tokens: Any) -> Any:
        # A GPU that looks up a word it does not have is lost to its process, so strangers become the last word.
        words = tokens.long().clamp(0, IMDB.vocabulary - 1)
        return self.classified(self.words(words) + self.positions.weight)

    def classified(self, hidden: Any) -> Any:
        """Compute the class scores [batch, 2] of embedded words [batch, 200, width]."""
        hidden = self.after_attention(hidden + self._attended(hidden))
        hidden = self.after_forward(hidden + self.forwarded(hidden))
        return self.scores(hidden.mean(dim=1))

    def _attended(self, hidden: Any) -> Any:
        query, key, value = (_by_head(layer(hidden)) for layer in (self.query, self.key, self.value))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return self.joined(mixed.transpose(1, 2).flatten(2))


def imdb_transformer() -> Any:
    """Make an `ImdbTransformer` with embeddings as small as Keras draws them: with torch's own, of unit variance, the
    softmax of two classes saturates."""
    model = ImdbTransformer()
    nn.init.uniform_(model.words.weight, -0.05, 0.05)
    nn.init.uniform_(model.positions.weight, -0.05, 0.05)
    return model


def _by_head(projected: Any) -> Any:
    """Reshape [batch, places, heads × width] to [batch, heads, places, width]."""
    return projected.unflatten(2, (IMDB.heads, IMDB.embedding)).transpose(1, 2)


class Residual(nn.Module):  # type: ignore[misc]
    """A residual block, relu(branch(x) + shortcut(x)); the branch ends in a batch normalisation."""

    def __init__(self, branch: Any, shortcut: Any) -> None:
        super().__init__()
        # Weight of a residual branch at the start: small, so that an untrained network of many blocks stays in
        # range.
        branch_gain = 0.25
        nn.init.constant_(branch[-1].weight, branch_gain)
        self.branch = branch
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, given: Any) -> Any:
        return self.relu(self.branch(given) + self.shortcut(given))


def convolution(
    given: int,
    gives: int,
    size: int = 3,
    *,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | None = None,
    relu: bool = True,
) -> list[Any]:
    """Make the layers of a convolution from `given` to `gives` channels, batch normalisation and, with `relu`, ReLU.

    `padding` None keeps the size of the image at stride 1 where `size` is odd.
    """
    around = size // 2 if padding is None else padding
    layer = nn.Conv2d(given, gives, size, stride=stride, padding=around, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return [layer, nn.BatchNorm2d(gives), *([nn.ReLU()] if relu else [])]


def shortcut(given: int, gives: int, *, stride: int = 1) -> Any:
    """Make the way around a branch: the identity where the shape stays, else a convolution of size 1."""
    if given == gives and stride == 1:
        return nn.Identity()
    return nn.Sequential(*convolution(given, gives, 1, stride=stride, relu=False))


# The text recogniser None-ResNet-None-CTC in PyTorch: no rectification, ResNet features, no sequence model, CTC.
#
# The features are the 29-layer residual network of the Focusing Attention Network (Cheng et al., 2017) with 512
# channels at its end, as Baek et al. (2019) describe it: pooling halves the height four times but the width only
# twice, so that a line of 32 × 100 becomes 26 places of 512 features. Each place is classified by itself into 36
# characters and CTC's blank (Shi et al., 2015, without its recurrent layers).


class TextRecognition(nn.Module):  # type: ignore[misc]
    """Maps `image` [batch, 1, 32, 100] to `logits` [batch, 26, 37]."""

    def __init__(self, channels: int = 512) -> None:
        super().__init__()
        narrow, middle = channels // 4, channels // 2
        start, stem = channels // 16, channels // 8
        # Halves the height and keeps the width, but for the one column that the padding adds.
        flat: dict[str, Any] = {"stride": (2, 1), "padding": (0, 1)}
        self.features = nn.Sequential(
            *convolution(1, start),
            *convolution(start, stem),
            nn.MaxPool2d(2),
            *_blocks(stem, narrow, 1),
            *convolution(narrow, narrow),
            nn.MaxPool2d(2),
            *_blocks(narrow, middle, 2),
            *convolution(middle, middle),
            nn.MaxPool2d(2, **flat),
            *_blocks(middle, channels, 5),
            *convolution(channels, channels),
            *_blocks(channels, channels, 3),
            *convolution(channels, channels, 2, **flat),
            *convolution(channels, channels, 2, padding=0),
        )
        self.classes = nn.Linear(channels, TEXT_CLASSES)

    def forward(self, image: Any) -> Any:
        features = self.features(image)
        return self.classes(features.mean(dim=2).transpose(1, 2))


def _blocks(given: int, gives: int, count: int) -> list[Any]:
    """Make `count` residual blocks of two convolutions; the first block changes the number of channels."""
    blocks = []
    for _ in range(count):
        branch = nn.Sequential(*convolution(given, gives), *convolution(gives, gives, relu=False))
        blocks.append(Residual(branch, shortcut(given, gives)))
        given = gives
    return blocks


# ResNet-50 in PyTorch (He et al., 2015), with the stride in the middle convolution of a block ("v1.5").
#
# `image` [batch, 3, 224, 224] to `scores` [batch, 1000], which are probabilities.

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""(inner channels, blocks) of each stage; each after the first halves the image."""

WIDENING = 4
"""A block has this many times its inner channels at its end."""


def resnet50(stages: tuple[tuple[int, int], ...] = STAGES) -> Any:
    """Make a ResNet-50: `image` [batch, 3, 224, 224] -> `scores` [batch, 1000]; `stages`: fewer or narrower ones make a
    smaller network."""
    layers: list[Any] = [*convolution(3, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)]
    given = 64
    for stage, (inner, count) in enumerate(stages):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            layers.append(_bottleneck(given, inner, stride=stride))
            given = WIDENING * inner
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, IMAGE_CLASSES), nn.Softmax(dim=1)]
    return nn.Sequential(*layers, *head)


def _bottleneck(given: int, inner: int, *, stride: int) -> Any:
    gives = WIDENING * inner
    branch = nn.Sequential(
        *convolution(given, inner, 1),
        *convolution(inner, inner, stride=stride),
        *convolution(inner, gives, 1, relu=False),
    )
    return Residual(branch, shortcut(given, gives, stride=stride))
