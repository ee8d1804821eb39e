"""The workloads with text: a causal language model, and a masked one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from trainers.workloads.base import EpochWorkload, Rows, bucketed, evaluating, seeded
from trainers.workloads.text import BEGIN, MARKS, MASK, PAD, Sequences, sequences
from trainers.workloads.transformer import LanguageModel, MaskedModel, Shape

_HELD_OUT = 32  # sequences that the score uses


class TextWorkload(EpochWorkload):
    """Base: sequences of text in batches of nearly equal length, and the entropy that the model saves.

    The score is 1 - loss / ln(vocabulary): 0 for a uniform guess, 1 for certainty. The loss is (1 - score)
    ln(vocabulary) nats per token. It uses 32 held-out sequences, the same for all seeds.
    """

    metric: ClassVar[str] = "entropy saved on held-out text"
    is_weighted: ClassVar[bool] = True
    is_synthetic = False
    SMALL: ClassVar[Shape]
    FULL: ClassVar[Shape]

    def __init__(
        self, rank: int, size: int, batch: int, seed: int, *, full: bool = False, data: Path | None = None
    ) -> None:
        self._shape = self.FULL if full else self.SMALL
        self._train, self._test = sequences(data, self._shape.vocabulary, self._shape.longest)
        with seeded(seed):
            self.model: nn.Module = self.network(self._shape)
        order = bucketed(self._train.lengths, batch, rank, size, seed)
        text = len(self._train.starts)  # a digest of the text: another one has hardly the same number of sequences
        super().__init__(rank, batch, order, size=size, seed=seed, full=full, sequences=text)

    @staticmethod
    @abstractmethod
    def network(shape: Shape) -> nn.Module:
        """The model of that size."""

    @abstractmethod
    def _losses(self, data: Sequences, rows: Rows, generator: np.random.Generator) -> Tensor:
        """The loss of each predicted token in these sequences, one axis."""

    def _loss(self, rows: Rows, generator: np.random.Generator) -> Tensor:
        losses = self._losses(self._train, rows, generator)
        self.weight = float(len(losses))
        return losses.mean()

    def score(self) -> float:
        """The share of the entropy of a uniform guess that the model saves."""
        generator = np.random.default_rng(0)
        with evaluating(self.model):
            losses = torch.cat([self._losses(self._test, rows, generator) for rows in self._held_out()])
        return 1.0 - float(losses.mean()) / math.log(self._shape.vocabulary)

    def _held_out(self) -> Iterator[Rows]:
        chosen = np.random.default_rng(0).permutation(len(self._test.lengths))[:_HELD_OUT]
        by_length = chosen[np.argsort(self._test.lengths[chosen], kind="stable")]
        yield from np.array_split(by_length, max(1, len(by_length) // 8))

    def optimizer(self, learning_rate: float, momentum: float) -> torch.optim.Optimizer:
        """AdamW; the weight decay is torch's default, 0.01."""
        return torch.optim.AdamW(self.model.parameters(), lr=learning_rate, betas=(momentum, 0.99))


class Language(TextWorkload):
    """Next-byte prediction by a Transformer of 215,616 parameters, on the sources of the Python standard library.

    The full size predicts words from a vocabulary of 33,708, with 61,364,224 parameters. The Transformer of the WAGMA
    paper has 61,362,176 and translates: 6 layers of an encoder and 6 of a decoder, where this one has a stack of 14
    layers of the same width.
    """

    name: ClassVar[str] = "language"
    summary: ClassVar[str] = "A Transformer predicts the next byte of Python's sources; sequences differ in length."
    paper: ClassVar[str] = "Li et al., WAGMA-SGD, TPDS 2021, section V (61 M parameters, translation)"
    defaults: ClassVar[dict[str, Any]] = {
        "rounds": 200, "batch": 8, "learning_rate": 3e-3, "momentum": 0.9, "target": 0.55,
    }  # fmt: skip
    SMALL: ClassVar[Shape] = Shape(vocabulary=MARKS, width=64, layers=4, heads=4, longest=512)
    FULL: ClassVar[Shape] = Shape(vocabulary=33_708, width=512, layers=14, heads=8, longest=512)

    @staticmethod
    def network(shape: Shape) -> nn.Module:
        """The model of that size."""
        return LanguageModel(shape)

    def _losses(self, data: Sequences, rows: Rows, generator: np.random.Generator) -> Tensor:
        targets = data.padded(rows).to(self._device)
        begin = torch.full((len(rows), 1), BEGIN, device=self._device)
        logits = self.model(torch.cat([begin, targets[:, :-1]], dim=1))
        is_token = targets != PAD
        return nn.functional.cross_entropy(logits[is_token], targets[is_token], reduction="none")


class Bert(TextWorkload):
    """A masked language model over the same text (Devlin et al., "BERT", NAACL 2019, section 3.1, task 1).

    15 % of the tokens of each sequence are predicted, at least one: 80 % of them are replaced by a mask, 10 % by a
    random token, and 10 % are kept. The full size has 132,953,658 parameters. The network of the Ok-Topk paper has
    133,547,324, with the pooler, the segments and the classifier of BERT's second task, which this workload has not.
    """

    name: ClassVar[str] = "bert"
    summary: ClassVar[str] = "A Transformer restores masked bytes of Python's sources."
    paper: ClassVar[str] = "Li, Hoefler, Ok-Topk, PPoPP 2022, section 5 (BERT, 133 M parameters)"
    defaults: ClassVar[dict[str, Any]] = {
        "rounds": 400, "batch": 8, "learning_rate": 3e-3, "momentum": 0.9, "target": 0.45,
    }  # fmt: skip
    SMALL: ClassVar[Shape] = Shape(vocabulary=MARKS, width=64, layers=4, heads=4, longest=512)
    FULL: ClassVar[Shape] = Shape(vocabulary=30_522, width=768, layers=12, heads=12, longest=512)

    @staticmethod
    def network(shape: Shape) -> nn.Module:
        """The model of that size."""
        return MaskedModel(shape)

    def _losses(self, data: Sequences, rows: Rows, generator: np.random.Generator) -> Tensor:
        tokens = data.padded(rows)
        is_token = tokens != PAD
        chosen = _choose(is_token, generator)
        corrupt = _corrupt(tokens, chosen, self._shape.vocabulary, generator)
        tokens, is_token, chosen, corrupt = (x.to(self._device) for x in (tokens, is_token, chosen, corrupt))
        logits = self.model(corrupt, is_token, chosen)
        return nn.functional.cross_entropy(logits, tokens[chosen], reduction="none")


def _choose(is_token: Tensor, generator: np.random.Generator) -> Tensor:
    """15 % of the tokens of each row, rounded, at least one; a mask of the same shape."""
    drawn = torch.from_numpy(generator.random(is_token.shape)).masked_fill(~is_token, 2.0)
    places = drawn.argsort(dim=1).argsort(dim=1)
    counts = (0.15 * is_token.sum(dim=1, keepdim=True)).round().clamp(min=1)
    return places < counts


def _corrupt(tokens: Tensor, chosen: Tensor, vocabulary: int, generator: np.random.Generator) -> Tensor:
    fate = torch.from_numpy(generator.random(tokens.shape))
    drawn = torch.from_numpy(generator.integers(vocabulary, size=tokens.shape))
    masked = tokens.masked_fill(chosen & (fate < 0.8), MASK)
    return torch.where(chosen & (fate >= 0.9), drawn, masked)
