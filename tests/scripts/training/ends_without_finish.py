"""A rank whose training ends in one way: `ends_without_finish.py FACADE END`.

Facades are `run`, `connect`, `init`, and the hooks `eager_sgd` and `dc_s3gd`. Ends are `finish`, `discard`, `none`,
`raise` (an exception of the program), `exit` (`sys.exit`), `stay` (the program never leaves its world), `forked` (a
child of the rank ends with the interpreter, and the rank by `finish`) and `apart` (by `discard`; all but rank 0 make
their last steps when rank 0 has called it).
"""

import asyncio
import os
import sys

import torch

import asyncoll
from asyncoll.training import DPSGD, EagerSGD

FACADE, END = sys.argv[1:]
STEPS = 6


def end_otherwise():
    if END == "raise":
        raise ValueError("of the program")
    if END == "exit":
        sys.exit(0)


async def main(comm):
    model = torch.nn.Linear(3, 2)
    kind = DPSGD if FACADE == "init" else EagerSGD  # which calls functions of other ranks
    sgd = kind(comm, model, torch.optim.SGD(model.parameters(), lr=0.1))
    await sgd.start()
    for _ in range(STEPS):
        model(torch.ones(4, 3)).square().mean().backward()
        await sgd.step()
    await comm.barrier()  # no rank is gone as long as another one makes steps
    if END == "finish":
        await sgd.finish()
    if END == "discard":
        sgd.discard()
    end_otherwise()


async def connected():
    if END == "stay":
        KEPT.append(asyncoll.connect())
        await main(await KEPT[0].__aenter__())
        return
    async with asyncoll.connect() as comm:
        await main(comm)


def initialized():
    KEPT.append(asyncoll.init())
    asyncio.run(main(KEPT[0]))
    if END != "stay":
        KEPT[0].close()


def hooked():
    import torch.distributed as dist

    from asyncoll.torch import hooks

    dist.init_process_group("asyncoll")
    model = torch.nn.Linear(3, 2)
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = {"eager_sgd": hooks.EagerSGDState, "dc_s3gd": hooks.DCS3GDState}[FACADE]
    state = make(ddp, optimizer)
    ddp.register_comm_hook(state, getattr(hooks, FACADE))
    store = dist.distributed_c10d._get_default_store()
    for number in range(STEPS):
        if END == "apart" and number == STEPS // 2 and dist.get_rank():
            store.wait(["discarded"])
        ddp(torch.ones(4, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if END != "apart":
        dist.barrier()
    if END == "forked":
        if not os.fork():
            sys.exit(0)
        os.wait()
    if END in ("finish", "forked"):
        state.finish()
    if END in ("discard", "apart"):
        state.discard()
        store.set("discarded", "")
    end_otherwise()
    if END == "stay":
        return
    try:
        dist.destroy_process_group()
    except asyncoll.UsageError:
        dist.destroy_process_group()  # the rank has left
        raise


KEPT = []
if FACADE == "run":
    asyncoll.run(main)
elif FACADE == "connect":
    asyncio.run(connected())
elif FACADE == "init":
    initialized()
else:
    hooked()
print("ended", flush=True)
