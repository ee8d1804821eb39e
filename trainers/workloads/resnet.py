"""Residual networks (He et al., "Deep residual learning for image recognition", CVPR 2016)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def basic_resnet(blocks: int, width: int, classes: int) -> nn.Module:
    """The network for small images of section 4.2, of 6 * `blocks` + 2 layers; the paper's width is 16.

    The first block of each of the three stages has a projection as its shortcut, as in TensorFlow's models; the paper
    pads instead. With 5 blocks, a width of 16 and 10 classes it has 467,194 parameters.
    """
    layers: list[nn.Module] = [_convolution(3, width, 3), nn.ReLU()]
    inputs = width
    for stage in range(3):
        outputs = width << stage
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            inside = nn.Sequential(
                _convolution(inputs, outputs, 3, stride), nn.ReLU(), _convolution(outputs, outputs, 3)
            )
            layers.append(_Residual(inside, _convolution(inputs, outputs, 1, stride) if block == 0 else nn.Identity()))
            inputs = outputs
    return nn.Sequential(*layers, *_head(inputs, classes))


def bottleneck_resnet(blocks: Sequence[int], width: int, classes: int) -> nn.Module:
    """The network for large images of section 4.1, with bottlenecks; `blocks` has their number in each stage.

    The stride is in the 3x3 convolution. With blocks (3, 4, 6, 3) and a width of 64 it is ResNet-50: 25,557,032
    parameters with 1,000 classes.
    """
    layers: list[nn.Module] = [_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    inputs = width
    for stage, count in enumerate(blocks):
        narrow = width << stage
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            inside = nn.Sequential(
                _convolution(inputs, narrow, 1),
                nn.ReLU(),
                _convolution(narrow, narrow, 3, stride),
                nn.ReLU(),
                _convolution(narrow, 4 * narrow, 1),
            )
            shortcut = _convolution(inputs, 4 * narrow, 1, stride) if block == 0 else nn.Identity()
            layers.append(_Residual(inside, shortcut))
            inputs = 4 * narrow
    return nn.Sequential(*layers, *_head(inputs, classes))


class _Residual(nn.Module):
    def __init__(self, inside: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.inside, self.shortcut = inside, shortcut

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.inside(x) + self.shortcut(x))


def _convolution(inputs: int, outputs: int, side: int, stride: int = 1) -> nn.Module:
    """A convolution and its batch normalisation."""
    convolution = nn.Conv2d(inputs, outputs, side, stride, padding=side // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs))


def _head(inputs: int, classes: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
