"""ResNet-50 in PyTorch (He et al., 2015), with the stride in the middle convolution of a block ("v1.5").

`image` [batch, 3, 224, 224] to `scores` [batch, 1000], which are probabilities.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from batchtune.sample_models.sizes import CLASSES
from batchtune.sample_models.torch_layers import Residual, convolution, shortcut

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Inner channels and blocks of each stage; each after the first halves the image."""

WIDENING = 4
"""A block gives four times its inner channels."""


def resnet50(stages: tuple[tuple[int, int], ...] = STAGES) -> Any:
    layers: list[Any] = [*convolution(3, 64, 7, stride=2), nn.MaxPool2d(3, stride=2, padding=1)]
    given = 64
    for stage, (inner, count) in enumerate(stages):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            layers.append(_bottleneck(given, inner, stride=stride))
            given = WIDENING * inner
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(given, CLASSES), nn.Softmax(dim=1)]
    return nn.Sequential(*layers, *head)


def _bottleneck(given: int, inner: int, *, stride: int) -> Any:
    gives = WIDENING * inner
    branch = nn.Sequential(
        *convolution(given, inner, 1),
        *convolution(inner, inner, stride=stride),
        *convolution(inner, gives, 1, relu=False),
    )
    return Residual(branch, shortcut(given, gives, stride=stride))
