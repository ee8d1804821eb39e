"""The agreement of all ranks at the first bucket: they train one model, in one way, from one round on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from asyncoll.blocking import BlockingCommunicator
from asyncoll.errors import UsageError
from asyncoll.torch.hooks.fingerprints import fingerprint


def check_same(comm: BlockingCommunicator, round_: int, options: dict[str, Any], contents: dict[str, Any]) -> None:
    """Raise UsageError, at all ranks, unless all have the same round, options and contents. Collective.

    Options are compared by their text, which the error shows. Contents may be long: their bits are compared.
    """
    texts = {name: repr(value) for name, value in options.items()}
    own = torch.tensor([round_, *map(fingerprint, texts.values()), *map(fingerprint, contents.values())])
    rounds, *others = comm.allgather(own).wait().T.tolist()
    if len(set(rounds)) > 1:
        raise UsageError(f"the ranks have loaded the rounds {rounds}: load the state of one round at every rank")
    differing = {
        name: _equal_ranks(each) for name, each in zip([*options, *contents], others, strict=True) if len(set(each)) > 1
    }
    if names := [name for name in differing if name in options]:
        raise UsageError(
            f"the ranks have different values of {', '.join(names)}: give every rank the same. Rank {comm.rank} has "
            f"{', '.join(f'{name} = {texts[name]}' for name in names)}"
        )
    if differing:
        which = "; ".join(f"{name} (equal at the ranks {ranks})" for name, ranks in differing.items())
        raise UsageError(
            f"the ranks begin with different contents of {which}: make the same model and the same optimizer at every "
            "rank, and load a checkpoint at every rank, after the model was wrapped"
        )


def contents_of_model(ddp: DistributedDataParallel, *, without: Iterable[Tensor] = ()) -> dict[str, Any]:
    """The parameters that DDP shares, by name, but those of `without`."""
    left = set(without)
    shared = [
        [name, parameter.requires_grad, parameter.detach()]
        for name, parameter in ddp.module.named_parameters()
        if name not in ddp.parameters_to_ignore and parameter not in left
    ]
    return {"the parameters of the model": shared}


def contents_of_optimizer(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Which parameters are in which group, and the state of the optimizer, with names instead of parameters."""
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    state = {names.get(key, key): value for key, value in optimizer.state.items()}
    return {"the groups of the optimizer": groups, "the state of the optimizer": state}


def _equal_ranks(values: list[int]) -> str:
    """The ranks that have each value, such as "[0], [1, 2]"."""
    ranks: dict[int, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ", ".join(map(str, ranks.values()))
