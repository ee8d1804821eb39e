"""Work on the elements of tensors that are on a device, in operations of torch. `Stager.queue` carries it out.

None of it waits for the device: what it makes goes into tensors whose sizes are known before. Its bits are those of
numpy in memory of the host. `asyncoll/algorithms/sparse/selection.py` explains the terms of selection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def divide(x: torch.Tensor, copy: torch.Tensor, parts: int) -> None:
    """Divide `x`, of a float or complex dtype, by `parts`, in place, and copy the result to `copy`."""
    import torch

    if x.is_complex():
        # As numpy, which divides by the complex number `parts` + 0i: its imaginary part decides about signs of zeros.
        real, imaginary = torch.view_as_real(x).unbind(-1)
        share = torch.full((), parts, dtype=real.dtype, device=x.device).reciprocal()
        quotient = (real + imaginary * 0) * share, (imaginary - real * 0) * share
        real.copy_(quotient[0])
        imaginary.copy_(quotient[1])
    else:
        wide = x.float() if x.itemsize < 4 else x
        # Not a number: some devices multiply by the reciprocal of a number.
        x.copy_(wide.div(torch.full((), parts, dtype=wide.dtype, device=x.device)))
    copy.copy_(x)


def top_k(indices: torch.Tensor, values: torch.Tensor, threshold: torch.Tensor, x: torch.Tensor) -> None:
    """Select the `len(indices)` elements of `x` of the largest magnitudes, as `selection.top_k`.

    Where there are fewer, the last indices are -1. `threshold` has one element.
    """
    import torch

    elements, magnitudes = _magnitudes(x, values.dtype)
    count, k = elements.numel(), indices.numel()
    kth = magnitudes.topk(k, sorted=False).values.min()
    above = _found(magnitudes > kth, k)
    level = _found((magnitudes == kth) & (kth > 0), k)
    missing = k - (above < count).sum()
    level = torch.where(torch.arange(k, device=x.device) < missing, level, count)
    found = torch.cat([above, level]).sort().values[:k]
    indices.copy_(torch.where(found < count, found, -1))
    values.copy_(elements[found.clamp(max=count - 1)])
    threshold.copy_(kth.view(values.dtype))


def count(total: torch.Tensor, x: torch.Tensor, dtype: str, least: int) -> None:
    """Put the number of elements of `x`, in `dtype`, whose magnitude is at least `least` into `total`."""
    import torch

    total.copy_((_magnitudes(x, getattr(torch, dtype))[1] >= least).sum())


def select(indices: torch.Tensor, values: torch.Tensor, x: torch.Tensor, least: int) -> None:
    """Select the elements of `x` whose magnitude is at least `least`, of which there are `len(indices)`."""
    elements, magnitudes = _magnitudes(x, values.dtype)
    found = _found(magnitudes >= least, indices.numel())
    indices.copy_(found)
    values.copy_(elements[found])


def clear(x: torch.Tensor, indices: torch.Tensor) -> None:
    """Put 0 into `x` at the indices."""
    flat = x.reshape(-1).index_fill_(0, indices.long(), 0)
    if flat.data_ptr() != x.data_ptr():  # a copy, because of the layout
        x.copy_(flat.view(x.shape))


def scatter(whole: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> None:
    """Put `values` into the contiguous tensor `whole` at the indices, and 0 elsewhere."""
    whole.zero_().view(-1).index_copy_(0, indices.long(), values)


def _magnitudes(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements of `x` in `dtype`, float32 or float64, flat, and their magnitudes."""
    import torch

    elements = x.reshape(-1).to(dtype).contiguous()
    bits = torch.int32 if dtype.itemsize == 4 else torch.int64
    return elements, elements.view(bits) & torch.iinfo(bits).max


def _found(is_hit: torch.Tensor, size: int) -> torch.Tensor:
    """The first `size` indices of hits, ascending; where there are fewer, the number of elements."""
    return is_hit.nonzero_static(size=size, fill_value=is_hit.numel()).view(-1)
