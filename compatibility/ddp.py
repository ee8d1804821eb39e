"""DDP with a hook on the backend asyncoll: after `finish()` all ranks have the same model, to the bit.

Run `asyncoll launch -n 3 compatibility/ddp.py` or `torchrun --nproc-per-node 3 compatibility/ddp.py`.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from asyncoll.torch import hooks

ROUNDS = 20

dist.init_process_group("asyncoll")
rank = dist.get_rank()
torch.manual_seed(rank)
ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.02, momentum=0.9)
state = hooks.EagerSGDState(ddp, optimizer)
ddp.register_comm_hook(state, hooks.eager_sgd)
while state.round < ROUNDS:
    x = torch.randn(16, 8)
    torch.nn.functional.mse_loss(ddp(x), x.sum(dim=1, keepdim=True)).backward()
    optimizer.step()
    optimizer.zero_grad()
state.finish()

weights = torch.cat([parameter.detach().flatten() for parameter in ddp.parameters()])
everywhere = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(everywhere, weights)
assert all(weights.equal(others) for others in everywhere), "the models differ"
if rank == 0:
    print(f"{len(everywhere)} ranks have one model")
dist.destroy_process_group()
