"""Sets of labelled images: generated ones, CIFAR-10's files, and a folder with a folder for each class.

No file is unpickled. A set gives float32 images (number, 3, side, side), about normalised, and int64 labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

import asyncoll
from trainers.workloads.base import Data, Rows

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[np.float32]

_TILES = 4  # squares of a generated pattern, in each direction; they divide the side


class ImageSet(Protocol):
    """Images, by number."""

    count: int
    classes: int

    def read(self, rows: Rows, generator: np.random.Generator | None) -> Data:
        """The images of these numbers, with their labels; changed at random by a `generator`, as suits training."""


class GeneratedImages:
    """Images with as many patterns as classes, at random places, below noise. Image i is drawn from (seed, i) alone.

    A pattern is 4x4 squares of random colours; it continues at the opposite edge, so that it can be anywhere.
    """

    def __init__(self, seed: int, numbers: range, classes: int, side: int) -> None:
        self.count, self.classes = len(numbers), classes
        self._seed, self._numbers, self._side = seed, numbers, side
        self._patterns = np.random.default_rng((seed, 0)).standard_normal((classes, 3, _TILES, _TILES), np.float32)

    def read(self, rows: Rows, generator: np.random.Generator | None) -> Data:
        """Images and labels; the same with and without `generator`."""
        images = np.empty((len(rows), 3, self._side, self._side), np.float32)
        labels, each = rows % self.classes, self._side // _TILES
        for place, row in enumerate(rows):
            own = np.random.default_rng((self._seed, 1 + self._numbers[int(row)]))
            shift = own.integers(self._side, size=2)
            noise = own.standard_normal((3, self._side, self._side), np.float32)
            pattern = self._patterns[labels[place]].repeat(each, axis=1).repeat(each, axis=2)
            images[place] = np.roll(pattern, shift, axis=(1, 2)) + noise
        return torch.from_numpy(images), torch.from_numpy(labels)


# -- CIFAR-10 ------------------------------------------------------------------------------------

_CIFAR_SIDE = 32
_CIFAR_RECORD = 1 + 3 * _CIFAR_SIDE**2  # a byte for the label, and one for each channel of each pixel
_CIFAR_MEAN = np.array([0.4914, 0.4822, 0.4465], np.float32)[:, None, None]
_CIFAR_DEVIATION = np.array([0.2470, 0.2435, 0.2616], np.float32)[:, None, None]


class CifarImages:
    """CIFAR-10 from the files of its binary version; `side` is 32, or a divisor of it to which images are averaged."""

    classes = 10

    def __init__(self, data: Path, *, train: bool, side: int) -> None:
        """Raises UsageError if the files are not in `data`, or not in a folder `cifar-10-batches-bin` of it."""
        names = tuple(f"data_batch_{number}.bin" for number in range(1, 6)) if train else ("test_batch.bin",)
        self._records = _cifar_records(data, names)
        self.count, self._side = len(self._records), side

    def read(self, rows: Rows, generator: np.random.Generator | None) -> Data:
        """Images and labels; a `generator` moves images by up to four pixels of 32 and mirrors half of them."""
        records = self._records[rows]
        images = records[:, 1:].reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE) / np.float32(255)
        images = (images - _CIFAR_MEAN) / _CIFAR_DEVIATION
        if generator is not None:
            images = np.stack([_moved(image, generator) for image in images])
        each = _CIFAR_SIDE // self._side
        images = images.reshape(-1, 3, self._side, each, self._side, each).mean(axis=(3, 5))
        return torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(records[:, 0].astype(np.int64))


@cache  # shared by ranks of one process
def _cifar_records(data: Path, names: tuple[str, ...]) -> NDArray[np.uint8]:
    folder = next((folder for folder in (data, data / "cifar-10-batches-bin") if (folder / names[0]).exists()), None)
    if folder is None or not all((folder / name).exists() for name in names):
        raise asyncoll.UsageError(
            f"{data} does not have {', '.join(names)}: unpack cifar-10-binary.tar.gz (the binary version of CIFAR-10, "
            "not the Python version) there, or leave out --data to train on generated images"
        )
    files = [np.fromfile(folder / name, np.uint8) for name in names]
    for name, content in zip(names, files, strict=True):
        if len(content) % _CIFAR_RECORD or not len(content) or content[::_CIFAR_RECORD].max() > 9:
            raise asyncoll.UsageError(f"{folder / name} is not a file of CIFAR-10's binary version")
    return np.concatenate(files).reshape(-1, _CIFAR_RECORD)


def _moved(image: Pixels, generator: np.random.Generator) -> Pixels:
    down, right = generator.integers(9, size=2)
    moved = np.pad(image, ((0, 0), (4, 4), (4, 4)))[:, down : down + _CIFAR_SIDE, right : right + _CIFAR_SIDE]
    return moved[:, :, ::-1] if generator.random() < 0.5 else moved


# -- a folder of images --------------------------------------------------------------------------

_SUFFIXES = {".jpeg", ".jpg", ".png"}
_IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], np.float32)
_IMAGENET_DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)


@dataclass(frozen=True, slots=True)
class _Files:
    classes: tuple[str, ...]
    paths: tuple[Path, ...]
    labels: Rows


class FolderImages:
    """The images of `data/train` or `data/val`, which have a folder for each class: JPEG or PNG, read with Pillow."""

    def __init__(self, data: Path, *, train: bool, side: int) -> None:
        """Raises UsageError if there are no such folders or images, or no Pillow."""
        _pillow()
        self._files, self._side = _image_files(data, "train" if train else "val"), side
        self.count, self.classes = len(self._files.paths), len(self._files.classes)

    def read(self, rows: Rows, generator: np.random.Generator | None) -> Data:
        """Images and labels: the centre, or with a `generator` a random square, half of them mirrored."""
        images = np.stack([self._read(self._files.paths[int(row)], generator) for row in rows])
        normalised = ((images / np.float32(255) - _IMAGENET_MEAN) / _IMAGENET_DEVIATION).transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(normalised)), torch.from_numpy(self._files.labels[rows])

    def _read(self, path: Path, generator: np.random.Generator | None) -> NDArray[np.uint8]:
        try:
            with _pillow().open(path) as file:
                image = file.convert("RGB")
        except OSError as error:
            raise asyncoll.UsageError(f"{path} is not an image that Pillow reads: {error}") from error
        if generator is None:
            return _square(image, self._side, 0.5, 0.5)
        square = _square(image, self._side, generator.random(), generator.random())
        return square[:, ::-1] if generator.random() < 0.5 else square


def _square(image: Image, side: int, right: float, down: float) -> NDArray[np.uint8]:
    """A square of 7/8 of the shorter side, scaled to `side`: at the left and upper edge for 0, at the others for 1."""
    edge = min(image.size) * 7 / 8
    left, upper = (image.width - edge) * right, (image.height - edge) * down
    return np.asarray(image.resize((side, side), box=(left, upper, left + edge, upper + edge)))


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise asyncoll.UsageError("a folder of images needs Pillow: pip install pillow") from error
    return Image


@cache
def _image_files(data: Path, part: str) -> _Files:
    # The classes of both parts are those of the training images.
    classes = tuple(sorted(path.name for path in _folders(data / "train")))
    found = [(path, label) for label, name in enumerate(classes) for path in _images(data / part / name)]
    if not found:
        raise asyncoll.UsageError(
            f"{data / part} has no images: put each class's images (JPEG or PNG) into a folder of its own, such as "
            f"{data / part / 'n01440764'}, or leave out --data to train on generated images"
        )
    return _Files(classes, tuple(path for path, _ in found), np.array([label for _, label in found]))


def _folders(folder: Path) -> Iterator[Path]:
    return (path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else iter(())


def _images(folder: Path) -> list[Path]:
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if path.suffix.lower() in _SUFFIXES)
