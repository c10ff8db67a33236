"""The text recogniser None-ResNet-None-CTC in PyTorch: no rectification, ResNet features, no sequence model, CTC.

The features are the 29-layer residual network of the Focusing Attention Network (Cheng et al., 2017) with 512
channels at its end, as Baek et al. (2019) describe it: pooling halves the height four times but the width only
twice, so that a line of 32 × 100 becomes 26 places of 512 features. Each place is classified by itself into 36
characters and CTC's blank (Shi et al., 2015, without its recurrent layers).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from batchtune.sample_models.sizes import TEXT_CHANNELS, TEXT_CLASSES
from batchtune.sample_models.torch_layers import Residual, convolution, shortcut


class TextRecognition(nn.Module):  # type: ignore[misc]
    """`image` [batch, 1, 32, 100] to `logits` [batch, 26, 37]."""

    def __init__(self, channels: int = TEXT_CHANNELS, classes: int = TEXT_CLASSES) -> None:
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
        self.classes = nn.Linear(channels, classes)

    def forward(self, image: Any) -> Any:
        features = self.features(image)
        return self.classes(features.mean(dim=2).transpose(1, 2))


def text_recognition() -> Any:
    return TextRecognition()


def _blocks(given: int, gives: int, count: int) -> list[Any]:
    """Residual blocks of two convolutions; the first of them changes the number of channels."""
    blocks = []
    for _ in range(count):
        branch = nn.Sequential(*convolution(given, gives), *convolution(gives, gives, relu=False))
        blocks.append(Residual(branch, shortcut(given, gives)))
        given = gives
    return blocks
