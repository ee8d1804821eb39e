"""Classification of sequences of very different length, as of videos, by an LSTM."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from trainers.workloads.base import Data, EpochWorkload, Rows, bucketed, evaluating, refuse_data, seeded

# The number of frames of UCF101's videos (Li et al., PPoPP 2020, section 2.1). A log-normal distribution, clipped, with
# this median and deviation has a mean of 188.
FRAMES_LEAST, FRAMES_MEDIAN, FRAMES_DEVIATION, FRAMES_MOST = 29, 167, 97, 1776
_LOG_DEVIATION = 0.486  # fitted to the deviation

_HELD_OUT = 128  # videos that the score uses


@dataclass(frozen=True, slots=True)
class VideoShape:
    """The size of the videos and of the network."""

    videos: int  # for training
    classes: int
    every: int  # one frame of so many is used
    features: int  # of a frame
    hidden: int  # of the LSTM
    dense: int


class LSTMClassifier(nn.Module):
    """An LSTM over the frames; two linear layers after its last output."""

    def __init__(self, shape: VideoShape) -> None:
        super().__init__()
        self.lstm = nn.LSTM(shape.features, shape.hidden, batch_first=True)
        with torch.no_grad():  # the forget gates start open, so that cells keep their contents over long sequences
            self.lstm.get_parameter("bias_hh_l0")[shape.hidden : 2 * shape.hidden] = 1.0
        self.head = nn.Sequential(
            nn.Linear(shape.hidden, shape.dense), nn.ReLU(), nn.Linear(shape.dense, shape.classes)
        )

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        """Logits (batch, classes) of videos (batch, longest, features), padded at their ends."""
        outputs, _ = self.lstm(frames)
        logits: Tensor = self.head(outputs[torch.arange(len(lengths), device=lengths.device), lengths - 1])
        return logits


class Video(EpochWorkload):
    """An LSTM on generated features of videos, with the lengths of UCF101 (Li et al., PPoPP 2020, sections 2.1, 6.3).

    The features of a frame are noise and a signal. A class is an ordered pair of signals: the first is in the first
    half of the video, the second in the other. So the mean over all frames does not tell the classes "A, B" and "B, A"
    apart. Video i is drawn from (seed, i) alone. A batch has videos of nearly equal length; the time of a step follows
    it.

    Every second frame is used, with 32 features; the LSTM has 64 cells. The full size takes every frame, with the 2,048
    features of Inception-v3, 101 classes, and the paper's network of 34,663,525 parameters: 34,671,717 here, because
    torch's LSTM has two biases.
    """

    name: ClassVar[str] = "video"
    summary: ClassVar[str] = "An LSTM on generated video features of 29 to 1,776 frames."
    paper: ClassVar[str] = "Li et al., eager-SGD, PPoPP 2020, section 6.3 (UCF101)"
    metric: ClassVar[str] = "accuracy on held-out videos"
    defaults: ClassVar[dict[str, Any]] = {
        "rounds": 200, "batch": 16, "learning_rate": 1e-2, "momentum": 0.9, "target": 0.9,
    }  # fmt: skip
    SMALL: ClassVar[VideoShape] = VideoShape(4096, classes=12, every=2, features=32, hidden=64, dense=64)
    FULL: ClassVar[VideoShape] = VideoShape(9537, classes=101, every=1, features=2048, hidden=2048, dense=512)
    is_synthetic = True

    def __init__(
        self, rank: int, size: int, batch: int, seed: int, *, full: bool = False, data: Path | None = None
    ) -> None:
        refuse_data(self.name, data)
        self._shape = self.FULL if full else self.SMALL
        self._signals = _signals(self._shape, seed)
        with seeded(seed):
            self.model: nn.Module = LSTMClassifier(self._shape)
        frames = video_frames(self._shape.videos + _HELD_OUT, seed)
        self._lengths = np.maximum(2, frames // self._shape.every)
        order = bucketed(self._lengths[: self._shape.videos], batch, rank, size, seed)
        super().__init__(rank, batch, order, size=size, seed=seed, full=full)

    def _loss(self, rows: Rows, generator: np.random.Generator) -> Tensor:
        self.weight = float(len(rows))
        videos, labels = self._moved(self._videos(rows))
        return nn.functional.cross_entropy(self.model(videos, self._lengths_of(rows)), labels)

    def score(self) -> float:
        """Accuracy on 128 held-out videos."""
        held_out = np.arange(self._shape.videos, self._shape.videos + _HELD_OUT)
        by_length = held_out[np.argsort(self._lengths[held_out], kind="stable")]
        right = 0
        with evaluating(self.model):
            for rows in np.array_split(by_length, 4):
                videos, labels = self._moved(self._videos(rows))
                logits = self.model(videos, self._lengths_of(rows))
                right += int((logits.argmax(dim=1) == labels).sum())
        return right / len(held_out)

    def optimizer(self, learning_rate: float, momentum: float) -> torch.optim.Optimizer:
        """Adam, as SGD takes too long over long sequences."""
        return torch.optim.Adam(self.model.parameters(), lr=learning_rate, betas=(momentum, 0.999))

    def _lengths_of(self, rows: Rows) -> Tensor:
        return torch.from_numpy(self._lengths[rows]).to(self._device)

    def _videos(self, rows: Rows) -> Data:
        lengths, classes = self._lengths[rows], rows % self._shape.classes
        videos = np.zeros((len(rows), lengths.max(), self._shape.features), np.float32)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            noise = np.random.default_rng((self._seed, 2, int(row)))
            videos[place, :length] = noise.standard_normal((length, self._shape.features), np.float32)
            first, second = self._signals[classes[place]]
            videos[place, : length // 2] += first
            videos[place, length // 2 : length] += second
        return torch.from_numpy(videos), torch.from_numpy(classes)


def video_frames(count: int, seed: int) -> Rows:
    """The numbers of frames of videos 0 to count - 1, with UCF101's least, median, deviation and greatest."""
    normal = np.random.default_rng((seed, 0)).standard_normal(count)
    frames: Rows = np.rint(FRAMES_MEDIAN * np.exp(_LOG_DEVIATION * normal)).astype(np.int64)
    return frames.clip(FRAMES_LEAST, FRAMES_MOST)


def _signals(shape: VideoShape, seed: int) -> NDArray[np.float32]:
    """The two signals of each class: (classes, 2, features)."""
    count = math.isqrt(shape.classes) + 1  # so many signals have at least as many ordered pairs as there are classes
    signals = 0.5 * np.random.default_rng((seed, 1)).standard_normal((count, shape.features), np.float32)
    pairs = list(itertools.permutations(range(count), 2))[: shape.classes]
    chosen: NDArray[np.float32] = signals[np.array(pairs)].astype(np.float32)
    return chosen
