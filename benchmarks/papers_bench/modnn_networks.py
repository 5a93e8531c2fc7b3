"""The six networks of moDNN's evaluation (section 7), at any width and size of image.

ReLUs and additions are in place, so that a layer has one output, as in the paper. The paper does not say
where VGG-101 has its convolutions. All that VGG-19 lacks are in the third stage here: that comes to the
1.4 GiB of weights and gradients that the paper's bound has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional

CLASSES, PIXEL_CLASSES = 1000, 21


def _features(stages: Sequence[int], width: int) -> nn.Sequential:
    """Stages of 3 x 3 convolutions, with pooling after each."""
    layers: list[nn.Module] = []
    inside = 3
    for stage, depth in enumerate(stages):
        outside = width * min(1 << stage, 8)
        for _ in range(depth):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(inplace=True)]
            inside = outside
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def vgg(stages: Sequence[int], width: int, side: int) -> nn.Module:
    inside, hidden = 8 * width * (side // 32) ** 2, 64 * width
    head = [
        *(nn.Flatten(), nn.Linear(inside, hidden), nn.ReLU(inplace=True), nn.Dropout()),
        *(nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(hidden, CLASSES)),
    ]
    return nn.Sequential(_features(stages, width), *head)


def fcn(width: int) -> nn.Module:
    """FCN-32s: VGG-16 whose dense layers are convolutions, with a class for each pixel."""
    inside, hidden = 8 * width, 64 * width
    head = [
        *(nn.Conv2d(inside, hidden, 7, padding=3), nn.ReLU(inplace=True), nn.Dropout()),
        *(nn.Conv2d(hidden, hidden, 1), nn.ReLU(inplace=True), nn.Dropout()),
        nn.Conv2d(hidden, PIXEL_CLASSES, 1),
        nn.ConvTranspose2d(PIXEL_CLASSES, PIXEL_CLASSES, 64, stride=32, padding=16, bias=False),
    ]
    return nn.Sequential(_features((2, 2, 3, 3, 3), width), *head)


class _Block(nn.Module):
    """Convolutions, each with batch normalization, and a way around them."""

    def __init__(self, inside: int, shape: Sequence[tuple[int, int]], stride: int) -> None:
        """shape   of each convolution: channels, and side of its kernel"""
        super().__init__()
        layers: list[nn.Module] = []
        outside, strides = inside, stride
        for channels, side in shape:
            step = strides if side == 3 else 1
            strides = 1 if side == 3 else strides
            if layers:
                layers.append(nn.ReLU(inplace=True))
            layers += [nn.Conv2d(outside, channels, side, step, side // 2, bias=False)]
            layers += [nn.BatchNorm2d(channels)]
            outside = channels
        self.layers = nn.Sequential(*layers)
        self.short = nn.Sequential()
        if stride > 1 or inside != outside:
            self.short = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x: Tensor) -> Tensor:
        """x: [batch, channels, height, width]"""
        return functional.relu_(self.layers(x).add_(self.short(x)))


def resnet(depths: Sequence[int], width: int, bottleneck: bool) -> nn.Module:
    layers: list[nn.Module] = [
        *(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        nn.MaxPool2d(3, 2, 1),
    ]
    inside = width
    for stage, depth in enumerate(depths):
        narrow = width << stage
        shape = ((narrow, 1), (narrow, 3), (4 * narrow, 1)) if bottleneck else ((narrow, 3), (narrow, 3))
        for index in range(depth):
            layers.append(_Block(inside, shape, 2 if index == 0 and stage > 0 else 1))
            inside = shape[-1][0]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, CLASSES))


@dataclass(frozen=True)
class Network:
    """One of the six.

    build    (width, side) -> the model; the paper's have 64 channels in the first stage, 224 pixels a side
    batch    the paper's, in samples
    pixels   it says a class for each pixel, not for each image
    """

    build: Callable[[int, int], nn.Module]
    batch: int
    pixels: bool = False


NETWORKS = {
    "VGG-16": Network(lambda width, side: vgg((2, 2, 3, 3, 3), width, side), 256),
    "VGG-19": Network(lambda width, side: vgg((2, 2, 4, 4, 4), width, side), 256),
    "VGG-101": Network(lambda width, side: vgg((2, 2, 86, 4, 4), width, side), 128),
    "ResNet-34": Network(lambda width, side: resnet((3, 4, 6, 3), width, bottleneck=False), 256),
    "ResNet-152": Network(lambda width, side: resnet((3, 8, 36, 3), width, bottleneck=True), 256),
    "FCN": Network(lambda width, side: fcn(width), 128, pixels=True),
}
