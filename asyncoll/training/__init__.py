"""Data-parallel training in the program's own loop: each algorithm is an object with one awaited verb, `step`.

    from asyncoll.training import EagerSGD

    sgd = EagerSGD(comm, model, optimizer)
    await sgd.start()
    for batch in batches:
        loss(model, batch).backward()
        await sgd.step()
    await sgd.finish()

`Trainer` states what all algorithms have in common. Each file of an algorithm follows its paper's pseudocode.
"""

from asyncoll.training.adpsgd import ADPSGD
from asyncoll.training.allreduce_sgd import AllreduceSGD
from asyncoll.training.checkpoints import Checkpoints
from asyncoll.training.dc_asgd import DCASGD
from asyncoll.training.dc_s3gd import DCS3GD
from asyncoll.training.dpsgd import DPSGD
from asyncoll.training.eager_sgd import EagerSGD
from asyncoll.training.elastic_batches import ElasticBatches
from asyncoll.training.local_sgd import LocalSGD
from asyncoll.training.oktopk_sgd import OkTopkSGD
from asyncoll.training.overlapped_sgd import OverlappedSGD
from asyncoll.training.parameter_server import ParameterServerSGD
from asyncoll.training.sgp import SGP
from asyncoll.training.step import Step
from asyncoll.training.trainer import Trainer
from asyncoll.training.wagma_sgd import WagmaSGD

__all__ = [
    "ADPSGD",
    "DCASGD",
    "DCS3GD",
    "DPSGD",
    "SGP",
    "AllreduceSGD",
    "Checkpoints",
    "EagerSGD",
    "ElasticBatches",
    "LocalSGD",
    "OkTopkSGD",
    "OverlappedSGD",
    "ParameterServerSGD",
    "Step",
    "Trainer",
    "WagmaSGD",
]
