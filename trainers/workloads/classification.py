"""Classification of images by residual networks, at the sizes of CIFAR-10 and of ImageNet."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import Tensor, nn

import asyncoll
from trainers.workloads.base import EpochWorkload, Rows, evaluating, seeded, shuffled
from trainers.workloads.images import CifarImages, FolderImages, GeneratedImages, ImageSet
from trainers.workloads.resnet import basic_resnet, bottleneck_resnet

_SCORED_SMALL, _SCORED_FULL = 256, 10_000  # held-out images that the score uses at most
_SCORED_AT_ONCE = 64


class ImageWorkload(EpochWorkload):
    """Base: images from files or generated, and the share of held-out ones that the model classifies rightly."""

    metric: ClassVar[str] = "accuracy on held-out images"

    def __init__(
        self, rank: int, size: int, batch: int, seed: int, *, full: bool = False, data: Path | None = None
    ) -> None:
        self.is_synthetic = data is None
        self._train, self._test = self.images(seed, data, full)
        with seeded(seed):
            self.model: nn.Module = self.network(full, self._train.classes)
        self._scored = _SCORED_FULL if full else _SCORED_SMALL
        order, count = shuffled(self._train.count, rank, size, seed), self._train.count
        super().__init__(rank, batch, order, size=size, seed=seed, full=full, images=count)

    @staticmethod
    @abstractmethod
    def images(seed: int, data: Path | None, full: bool) -> tuple[ImageSet, ImageSet]:
        """The images for training, and the held-out ones."""

    @staticmethod
    @abstractmethod
    def network(full: bool, classes: int) -> nn.Module:
        """The model of that size."""

    def _loss(self, rows: Rows, generator: np.random.Generator) -> Tensor:
        images, labels = self._moved(self._train.read(rows, generator))
        self.weight = float(len(rows))
        return nn.functional.cross_entropy(self.model(images), labels)

    def score(self) -> float:
        """Accuracy on held-out images: at most 256 of them, or 10,000 (all of CIFAR-10's) at the full size."""
        chosen = np.random.default_rng(0).permutation(self._test.count)[: self._scored]
        right = 0
        with evaluating(self.model):
            for rows in np.array_split(chosen, -(-len(chosen) // _SCORED_AT_ONCE)):
                images, labels = self._moved(self._test.read(rows, None))
                right += int((self.model(images).argmax(dim=1) == labels).sum())
        return right / len(chosen)


class Cifar(ImageWorkload):
    """CIFAR-10 by a residual network: ResNet-32 with 467,194 parameters at the full size, on images of 32x32.

    The small size is ResNet-8 with half the width, 20,034 parameters, on images of 16x16. `data` has the files of
    CIFAR-10's binary version; without it, generated images of the same number and size stand in.
    """

    name: ClassVar[str] = "cifar"
    summary: ClassVar[str] = "A residual network on CIFAR-10's binary files, or on generated images of that size."
    paper: ClassVar[str] = "Li et al., eager-SGD, PPoPP 2020, section 6.2.3 (ResNet-32, CIFAR-10)"
    defaults: ClassVar[dict[str, Any]] = {
        "rounds": 200, "batch": 32, "learning_rate": 0.1, "momentum": 0.9, "target": 0.8,
    }  # fmt: skip

    @staticmethod
    def images(seed: int, data: Path | None, full: bool) -> tuple[ImageSet, ImageSet]:
        """50,000 images for training, and 10,000 held out."""
        side = 32 if full else 16
        if data is not None:
            return CifarImages(data, train=True, side=side), CifarImages(data, train=False, side=side)
        numbers = range(60_000)
        return GeneratedImages(seed, numbers[:50_000], 10, side), GeneratedImages(seed, numbers[50_000:], 10, side)

    @staticmethod
    def network(full: bool, classes: int) -> nn.Module:
        """The model of that size."""
        return basic_resnet(5 if full else 1, 16 if full else 8, classes)


class ImageNet(ImageWorkload):
    """A folder of images by a residual network with bottlenecks: ResNet-50 at the full size, on images of 224x224.

    The full size has 1,001 classes, one unused, and 25,559,081 parameters, as in the eager-SGD paper. The small size
    has 14 layers, an eighth of the width and 130,962 parameters, on images of 64x64. `data` has folders `train` and
    `val`, with a folder for each class. Without it, generated images of 1,000 classes (small: 10) stand in.
    """

    name: ClassVar[str] = "imagenet"
    summary: ClassVar[str] = "A residual network with bottlenecks on a folder of images, or on generated ones."
    paper: ClassVar[str] = "Li et al., eager-SGD, PPoPP 2020, section 6.2.2 (ResNet-50, ImageNet)"
    defaults: ClassVar[dict[str, Any]] = {
        "rounds": 200, "batch": 16, "learning_rate": 0.1, "momentum": 0.9, "target": 0.8,
    }  # fmt: skip
    OUTPUTS: ClassVar[int] = 1001

    @classmethod
    def images(cls, seed: int, data: Path | None, full: bool) -> tuple[ImageSet, ImageSet]:
        """The folder's images, or 1,281,167 for training and 50,000 held out (small: 50,000 and 10,000)."""
        side, classes = (224, 1000) if full else (64, 10)
        if data is not None:
            train = FolderImages(data, train=True, side=side)
            if full and train.classes > cls.OUTPUTS:
                raise asyncoll.UsageError(f"{data} has {train.classes} classes, and the full size {cls.OUTPUTS}")
            return train, FolderImages(data, train=False, side=side)
        count = 1_281_167 if full else 50_000
        numbers = range(count + (50_000 if full else 10_000))
        train_set = GeneratedImages(seed, numbers[:count], classes, side)
        return train_set, GeneratedImages(seed, numbers[count:], classes, side)

    @classmethod
    def network(cls, full: bool, classes: int) -> nn.Module:
        """The model of that size."""
        if full:
            return bottleneck_resnet((3, 4, 6, 3), 64, cls.OUTPUTS)
        return bottleneck_resnet((1, 1, 1, 1), 8, classes)
