"""Which pieces do the two convolutional sample models share?"""

from __future__ import annotations

from typing import Any

from torch import nn

BRANCH_GAIN = 0.25
"""Weight of a residual branch at the start: small, so that an untrained network of many blocks stays in range."""


class Residual(nn.Module):  # type: ignore[misc]
    """relu(branch(x) + shortcut(x)); the branch ends in a batch normalisation."""

    def __init__(self, branch: Any, shortcut: Any) -> None:
        super().__init__()
        nn.init.constant_(branch[-1].weight, BRANCH_GAIN)
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
    """Convolution, batch normalisation, ReLU; `padding` None keeps the size at stride 1 where `size` is odd."""
    around = size // 2 if padding is None else padding
    layer = nn.Conv2d(given, gives, size, stride=stride, padding=around, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return [layer, nn.BatchNorm2d(gives), *([nn.ReLU()] if relu else [])]


def shortcut(given: int, gives: int, *, stride: int = 1) -> Any:
    """The way around a branch: nothing where the shape stays, else a convolution of size 1."""
    if given == gives and stride == 1:
        return nn.Identity()
    return nn.Sequential(*convolution(given, gives, 1, stride=stride, relu=False))
