"""A Transformer, for the workloads with text (Vaswani et al., "Attention is all you need", NeurIPS 2017).

Layers are normalised before attention and before the two linear layers, which needs no warm-up (Xiong et al., "On layer
normalization in the Transformer architecture", ICML 2020). There is no dropout, so a step is a function of its batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a Transformer and of its vocabulary."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    longest: int  # tokens of a sequence


class Block(nn.Module):
    """One layer: self-attention, and two linear layers of four times the width."""

    def __init__(self, shape: Shape, *, causal: bool, bias: bool) -> None:
        super().__init__()
        width = shape.width
        self.heads, self.causal = shape.heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inward, self.outward = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        activation = nn.ReLU() if causal else nn.GELU()  # as in Vaswani et al., and in BERT
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), activation, nn.Linear(4 * width, width))

    def forward(self, x: Tensor, is_token: Tensor | None) -> Tensor:
        """`x` is (batch, length, width); `is_token` is (batch, 1, 1, length), or None if all are to be attended."""
        x = x + self._attend(self.norm_1(x), is_token)
        out: Tensor = x + self.feed_forward(self.norm_2(x))
        return out

    def _attend(self, x: Tensor, is_token: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        parts = self.inward(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=is_token, is_causal=self.causal)
        out: Tensor = self.outward(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


class LanguageModel(nn.Module):
    """The next token of each prefix. Embeddings and output share one matrix; positions are sines."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=shape.width**-0.5)
        self.blocks = nn.ModuleList(Block(shape, causal=True, bias=False) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, vocabulary) of the token behind each of `tokens` (batch, length)."""
        width = self.embedding.embedding_dim
        x = self.embedding(tokens) * math.sqrt(width) + _sines(tokens.shape[1], width, tokens.device)
        for block in self.blocks:
            x = block(x, None)  # padding lies behind all tokens, which do not look there
        logits: Tensor = self.norm(x) @ self.embedding.weight.T
        return logits


class MaskedModel(nn.Module):
    """BERT's encoder and masked-language head: the tokens at chosen positions, from both sides."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.longest, shape.width)
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=shape.width**-0.5)
        self.blocks = nn.ModuleList(Block(shape, causal=False, bias=True) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Sequential(
            nn.Linear(shape.width, shape.width),
            nn.GELU(),
            nn.LayerNorm(shape.width),
            nn.Linear(shape.width, shape.vocabulary),
        )

    def forward(self, tokens: Tensor, is_token: Tensor, chosen: Tensor) -> Tensor:
        """Logits (number of chosen, vocabulary). `tokens`, `is_token` and `chosen` are (batch, length)."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, is_token[:, None, None, :])
        logits: Tensor = self.head(self.norm(x[chosen]))
        return logits


def _sines(length: int, width: int, device: torch.device) -> Tensor:
    """Positions as in section 3.5 of Vaswani et al.: (length, width)."""
    rates = torch.exp(torch.arange(0, width, 2, device=device) * (-math.log(10_000) / width))
    angles = torch.arange(length, device=device)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
