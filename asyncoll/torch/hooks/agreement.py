"""The check that all ranks train with the same options, in the first step."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from asyncoll.blocking import BlockingCommunicator
from asyncoll.errors import UsageError


def check_same(comm: BlockingCommunicator, round_: int, options: dict[str, Any]) -> None:
    """Raise UsageError, at all ranks, unless all have the same round and the same options. Collective."""
    own = torch.tensor([round_, *map(_digest, options.values())])
    rounds, *digests = comm.allgather(own).wait().T.tolist()
    if len(set(rounds)) > 1:
        raise UsageError(f"the ranks have loaded the rounds {rounds}: load the state of one round at every rank")
    differing = [name for name, each in zip(options, digests, strict=True) if len(set(each)) > 1]
    if differing:
        raise UsageError(
            f"the ranks have different values of {', '.join(differing)}: give every rank the same. Rank {comm.rank} "
            f"has {', '.join(f'{name} = {options[name]!r}' for name in differing)}"
        )


def _digest(value: Any) -> int:
    """A hash of the text of `value`, for a tensor of int64."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)
