"""A rank that trains small models through the communication hooks: runs the cases of its arguments one after another.

A late rank waits for messages that others send after a round, and never for an amount of time.
"""

import copy
import gc
import io
import os
import signal
import sys
import time
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from asyncoll.errors import NonFiniteError, PeerLostError, UsageError
from asyncoll.extending import register_policy
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.torch import hooks
from asyncoll.training.dc_s3gd import compensate
from tests.support.damage import damaged
from tests.support.raising import caught

with warnings.catch_warnings(action="ignore"):  # torch's own, about torch.jit.script
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper


class Model(nn.Module):
    """A convolution in channels-last order, two layers and a tied one: several buckets of a kilobyte."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.wide = nn.Linear(4 * 16, 40)
        self.tied = nn.Linear(40, 40)
        self.frozen = nn.Linear(40, 40).requires_grad_(False)
        self.out = nn.Linear(40, 3)

    def forward(self, x):
        x = self.norm(self.convolution(x)).relu().flatten(1)
        x = self.tied(self.wide(x)).relu()
        return self.out(self.frozen(self.tied(x)))


class Partly(nn.Module):
    """A model that does not use all of its parameters."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(32, 3)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.out(x.flatten(1))


def model():
    torch.manual_seed(7)
    return Model()


def wrap(module, **more):
    return DistributedDataParallel(module, **{"forward_sync_buffers": False, "bucket_cap_mb": 0.004} | more)


def batches(seed, count, rank=None):
    """`count` batches of a rank; of this one by default."""
    generator = torch.Generator().manual_seed(1000 * seed + (dist.get_rank() if rank is None else rank))
    return [torch.randn(5, 2, 4, 4, generator=generator) for _ in range(count)]


def backward(ddp, batch):
    ddp(batch).square().mean().backward()


def step(ddp, optimizer, batch, *, set_to_none=True):
    backward(ddp, batch)
    optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)


def bits(module):
    """All parameters, as bytes."""
    return torch.cat([p.detach().contiguous().view(-1).view(torch.uint8) for p in module.parameters()])


def assert_one_model(module, *, buffers=True):
    """All ranks have the same parameters and buffers, to the bit."""
    mine = bits(module)
    if buffers:
        mine = torch.cat([mine, *(b.reshape(-1).view(torch.uint8) for b in module.buffers())])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    assert all(torch.equal(mine, other) for other in everyones)


def optimizer_of(module, kind=torch.optim.SGD):
    if kind is torch.optim.SGD:
        return kind(module.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    return kind(module.parameters(), lr=0.01)


MAKERS = {
    hooks.allreduce: lambda ddp, optimizer: hooks.AllreduceState(ddp),
    hooks.eager_sgd: lambda ddp, optimizer, **more: hooks.EagerSGDState(
        ddp, optimizer, **{"sync_every": 1, "name": f"eager {next(names)}"} | more
    ),
    hooks.oktopk: lambda ddp, optimizer, **more: hooks.OkTopkState(
        ddp, **{"density": 0.1, "name": f"sparse {next(names)}"} | more
    ),
    hooks.dc_s3gd: lambda ddp, optimizer, **more: hooks.DCS3GDState(ddp, optimizer, **more),
}
names = iter(range(1000))
made = []  # the states of a case, of which some have not ended


def new(hook, module=None, options=(), make_optimizer=optimizer_of, **more):
    """A state of the hook, the wrapped model where it is registered, and the optimizer."""
    module = module or model()
    ddp, optimizer = wrap(module, **{"gradient_as_bucket_view": True} | more), make_optimizer(module)
    state = MAKERS[hook](ddp, optimizer, **dict(options))
    ddp.register_comm_hook(state, hook)
    made.append(state)
    return state, ddp, optimizer


def refused(text, act, *arguments, **more):
    """The call raises UsageError with this text."""
    error = caught(UsageError, lambda: act(*arguments, **more))
    assert text in str(error), error


# -- allreduce ------------------------------------------------------------------------------------


def plain_and_hooked(**more):
    """Trains two equal models, one of them with the hook. Returns both and the state."""
    modules, state = [], None
    for is_hooked in (False, True):
        module = copy.deepcopy(model())
        ddp = wrap(module, gradient_as_bucket_view=True, forward_sync_buffers=True, **more)
        optimizer = optimizer_of(module)
        if is_hooked:
            state = hooks.AllreduceState(ddp)
            ddp.register_comm_hook(state, hooks.allreduce)
        for index, batch in enumerate(batches(1, 8)):
            adds_up = dist.get_world_size() != 3  # where 1 / size is exact, DDP rounds in one way only
            if index == 4 and adds_up:
                with ddp.no_sync():
                    backward(ddp, batch)
            step(ddp, optimizer, batch, set_to_none=index % 3 > 0 or not adds_up)
        modules.append((ddp, optimizer))
    return *modules, state


def trained(module):
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def address(x):
    """The address of the storage of `x` in registered memory; None if it is elsewhere."""
    arena = dist.group.WORLD._comm._core.memory._arena
    return arena.locate(torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy())


def allreduce():
    for more in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        (plain, _), (hooked, _), state = plain_and_hooked(**more)
        assert state.round == 8
        assert torch.equal(bits(plain.module), bits(hooked.module)), more
        assert_one_model(hooked.module, buffers=False)
        backward(hooked, batches(2, 1)[0])
        addresses = {address(p.grad) for p in trained(hooked.module)}
        assert len(addresses) > 1, "several buckets"
        assert None not in addresses
        state.finish()
        del plain, hooked, state, _
        # Threads of autograd let go of their references a moment later. The next call frees what is unused.
        while not addresses <= set(dist.group.WORLD._comm._core.memory.unused):
            gc.collect()
            time.sleep(0.001)
    _, (hooked, _), state = plain_and_hooked()
    state.finish()
    state.finish()
    assert "has ended" in str(caught(UsageError, backward, hooked, batches(2, 1)[0]))
    assert "gradient_as_bucket_view" in str(caught(UsageError, hooks.AllreduceState, wrap(model())))


def ended():
    """Parameters whose gradients are registered, and outlive the process group."""
    _, (ddp, _), _ = plain_and_hooked()
    backward(ddp, batches(2, 1)[0])
    return trained(ddp.module)


# -- eager-SGD ------------------------------------------------------------------------------------

ROUNDS = 34
STEPS = 3


class WithoutReplay(hooks.EagerSGDState):
    """Takes no step for a result that this rank has missed."""

    def _apply(self, result):
        self._skip_to(self.round + 1)


class Delays:
    """Keeps each rank in turn from its next step, from the round `trigger` until another rank is `gap` rounds ahead."""

    def __init__(self, gap):
        size = dist.get_world_size()
        generator = torch.Generator().manual_seed(5)  # the same at all ranks
        self.left = []  # (trigger, gap, late rank, rank that goes on)
        for index in range(3):
            trigger = 3 + 10 * index + int(torch.randint(2, (1,), generator=generator))
            self.left.append((trigger, gap, index % size, (index + 1) % size))

    def pass_on(self, round_, *, steps=0, ends=False):
        """Wait, or tell a rank that waits to go on, where it is time to. Returns how far this rank is behind then.

        A rank waits only after `STEPS` steps of its own: in one of them all ranks make DDP's buckets anew together. A
        rank that `ends` tells all that still wait for it, or will.
        """
        behind = 0
        for trigger, gap, late, other in list(self.left):
            if dist.get_rank() == late and (ends or (round_ >= trigger and steps >= STEPS)):
                dist.recv(theirs := torch.empty(1), src=other)
                behind = int(theirs) - round_
            elif dist.get_rank() == other and (ends or round_ >= trigger + gap):
                dist.send(torch.tensor([float(round_)]), dst=late)
            elif dist.get_rank() in (late, other):
                continue
            self.left.remove((trigger, gap, late, other))
        return behind


def train_eagerly(kind, ddp, optimizer, delays, rounds=ROUNDS, **options):
    """Trains until `rounds`. Returns the state, this rank's models by round, and how many results it has missed."""
    state = kind(ddp, optimizer, **options)
    ddp.register_comm_hook(state, hooks.eager_sgd)
    models, missed = {}, 0
    for index, batch in enumerate(batches(3, 10 * rounds)):
        if state.round >= rounds:
            break
        behind = delays.pass_on(state.round, steps=index)
        if index == 2:
            with ddp.no_sync():
                backward(ddp, batch)
        step(ddp, optimizer, batch, set_to_none=index % 2 > 0)
        assert state.round == state.reduction.round
        models[state.round] = bits(ddp.module)
        if state._is_eager and (every := options.get("sync_every")):
            assert state.reduction.synchronous == (state.round % every == 0)
        missed += len(state.reduction.missed)
        assert behind < 2 or len(state.reduction.missed) + state.reduction.skipped >= behind - 1
    delays.pass_on(state.round, ends=True)
    state.finish()
    return state, models, missed


def assert_equal_by_round(models):
    """Ranks that have applied the same round have the same bits. All have the three synchronous rounds."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, {round_: each.numpy().tobytes() for round_, each in models.items()})
    common = set.intersection(*map(set, everyones))
    assert len(common) >= 3
    for round_ in set.union(*map(set, everyones)):
        assert len({mine[round_] for mine in everyones if round_ in mine}) == 1, round_


def scheduler_of(optimizer, variant):
    schedulers = torch.optim.lr_scheduler
    if not variant:
        return None
    if variant == 2:
        return schedulers.OneCycleLR(optimizer, 0.1, total_steps=ROUNDS)  # it raises in a step after its last one
    each = schedulers.ExponentialLR(optimizer, 0.95)
    return schedulers.ChainedScheduler([each, schedulers.ConstantLR(optimizer, 0.5, 40)])


def learning_rate(variant, kind, rounds):
    """The learning rate after this number of rounds."""
    optimizer = optimizer_of(nn.Linear(1, 1), kind)
    scheduler = scheduler_of(optimizer, variant)
    for _ in range(rounds if variant else 0):
        optimizer.step()
        scheduler.step()
    return optimizer.param_groups[0]["lr"]


def eager():
    size = dist.get_world_size()
    register_policy("drawn", lambda view: any(map(view.has, view.drawn)))
    for variant, (more, kind, options) in enumerate(
        [
            ({}, torch.optim.SGD, {"partial": "solo", "sync_every": 10}),
            (
                {"gradient_as_bucket_view": True},
                torch.optim.AdamW,
                {"partial": "majority", "candidates": 2, "clip_norm": 0.1, "op": ReduceOp.AVG_ACTIVE},
            ),
            (
                {"static_graph": True},
                torch.optim.SGD,
                {"partial": "quorum", "quorum": max(1, size - 1), "sync_every": 10},
            ),
            ({}, torch.optim.SGD, {"partial": "drawn", "candidates": min(2, size)}),
        ]
    ):
        module = model()
        optimizer = optimizer_of(module, kind)
        scheduler = scheduler_of(optimizer, variant)
        state, models, missed = train_eagerly(
            hooks.EagerSGDState,
            wrap(module, **more),
            optimizer,
            Delays(4),
            scheduler=scheduler,
            name=f"{variant}",
            **options,
        )
        totals = torch.tensor([float(missed), state.round, -state.round])
        dist.all_reduce(totals, dist.ReduceOp.MAX)
        assert totals[0] > 2
        assert totals[1] == -totals[2]
        assert optimizer.param_groups[0]["lr"] == learning_rate(variant, kind, ROUNDS)  # finish() makes one round more
        if "sync_every" in options:
            assert_equal_by_round(models)
        assert_one_model(module)


def eager_goes_on():
    """Synchronous rounds are multiples of `sync_every`, also after a checkpoint."""
    for begin in (0, 7):
        state, ddp, optimizer = new(hooks.eager_sgd, options={"sync_every": 5})
        state.load_state_dict({**state.state_dict(), "round": begin})
        together = []
        while state.round < 21:
            step(ddp, optimizer, batches(6, 1)[0])
            if state._is_eager and state.reduction.synchronous:
                together.append(state.round)
        state.finish()
        assert together == [round_ for round_ in (5, 10, 15, 20) if round_ > begin]


def eager_loses():
    """A rank that is later than the history loses results; a synchronous round makes all models equal again."""
    module = model()
    optimizer = optimizer_of(module, torch.optim.AdamW)
    train_eagerly(hooks.EagerSGDState, wrap(module), optimizer, Delays(5), history=2, sync_every=10, name="loses")
    assert_one_model(module)


def logs():
    """Metrics of each hook, with keys of single ranks and steps; those of `eager_sgd` in and after its first steps."""
    size, rank = dist.get_world_size(), dist.get_rank()
    for hook in MAKERS:
        state, ddp, optimizer = new(hook)
        for index, batch in enumerate(batches(8, 7)):
            if index % 3 == 0:
                state.log(loss=torch.tensor(float(rank + index)))
            elif index == 1 and rank == 0:
                state.log(alone=0.1)
            step(ddp, optimizer, batch)
            mean = (size - 1) / 2 + index
            assert state.metrics == ({"loss": mean} if index % 3 == 0 else {"alone": 0.1} if index == 1 else {}), index
            assert hook is not hooks.eager_sgd or state.reduction.metrics == state.metrics
        refused("give one real number", state.log, loss=torch.ones(2))
        state.finish()
        state, ddp, optimizer = new(hook)
        step(ddp, optimizer, batches(8, 1)[0])
        assert state.metrics == {}
        refused("call state.log(loss=...) before each backward()", lambda read: read["loss"], state.metrics)
        refused("has begun without metrics: call `log` before", state.log, loss=1)
        if size > 1:
            state, ddp, optimizer = new(hook)
            if rank == 0:
                state.log()
            refused("the ranks have different values of log", step, ddp, optimizer, batches(8, 1)[0])


def eager_recovers():
    """Ranks that are later than the history take the state of the one that is not, which is in its steps or ends."""
    for ends in (False, True):
        module = model()
        optimizer = optimizer_of(module, torch.optim.AdamW)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4000)
        ddp = wrap(module)
        state = hooks.EagerSGDState(ddp, optimizer, history=6, scheduler=scheduler, name=f"late {ends}")
        ddp.register_comm_hook(state, hooks.eager_sgd)
        for batch in batches(1, 3):  # the first steps of all ranks, in one of which DDP makes its buckets anew
            dist.barrier()  # so that a rank misses six rounds at most
            step(ddp, optimizer, batch)
        dist.barrier()
        others = [rank for rank in range(dist.get_world_size()) if rank != 1]
        if dist.get_rank() == 1:
            while state.round < 20:
                step(ddp, optimizer, batches(1, 1)[0])
                assert not state.reduction.recovered
            for rank in others:
                dist.send(torch.ones(1), dst=rank)
            recovered = [torch.zeros(1) for _ in others]
            calls = [dist.irecv(each, src=rank) for each, rank in zip(recovered, others, strict=True)]
            while not ends and not all(call.is_completed() for call in calls):
                step(ddp, optimizer, batches(1, 1)[0])  # it gives its state in a step
        else:
            dist.recv(torch.empty(1), src=1)
            step(ddp, optimizer, batches(1, 1)[0])
            assert state.reduction.recovered
            assert state.round == state.reduction.round >= 20
            dist.send(torch.ones(1), dst=1)
            step(ddp, optimizer, batches(1, 1)[0])
        state.finish()
        assert_one_model(module)
        saved = copy.deepcopy(optimizer.state_dict())
        everyones = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, str(saved))
        assert len(set(everyones)) == 1


def sabotage():
    """The checks above notice a hook that does not replay, and one that does not reduce."""
    module = model()
    ddp = wrap(module)
    _, models, _ = train_eagerly(WithoutReplay, ddp, optimizer_of(module), Delays(4), sync_every=10, name="sabotaged")
    caught(AssertionError, assert_equal_by_round, models)
    caught(AssertionError, assert_one_model, module)
    ddp = wrap(model())
    ddp.register_comm_hook(None, keep)
    step(ddp, optimizer_of(ddp), batches(1, 1)[0])
    caught(AssertionError, assert_one_model, ddp.module)


def keep(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# -- Ok-Topk --------------------------------------------------------------------------------------


def total_of(x):
    total = x.clone()
    dist.all_reduce(total)
    return total


def gradient_of(module, batch, layout):
    """This rank's gradient, as a flat tensor."""
    module = copy.deepcopy(module)
    module(batch).square().mean().backward()
    flat = torch.empty(layout.count, dtype=layout.dtype)
    for part, parameter in zip(layout.parts(flat), trained(module), strict=True):
        part.copy_(parameter.grad)
    return flat


def interrupt(*_, **__):
    raise KeyboardInterrupt


def sparse():
    """What is sent and what stays is what was there; all ranks step with the same bits."""
    for algorithm in ("oktopk", "topka", "topkdsa", "gtopk", "gaussiank", "dense"):
        module = model().double()
        ddp = wrap(module, gradient_as_bucket_view=algorithm == "oktopk", forward_sync_buffers=True)
        optimizer = optimizer_of(module)
        state = hooks.OkTopkState(ddp, algorithm=algorithm, density=0.1, warm_up=1, name=algorithm)
        ddp.register_comm_hook(state, hooks.oktopk)
        layout = state._buckets.layout
        for index, batch in enumerate(batches(4, 4)):
            batch = batch.double()
            before = total_of(state._residual + gradient_of(module, batch, layout))
            backward(ddp, batch)
            mean = torch.empty_like(before)
            layout.read_gradients(mean)
            assert algorithm == "gtopk" or torch.allclose(
                before, dist.get_world_size() * mean + total_of(state._residual)
            )
            share = mean.count_nonzero() / layout.count
            assert (
                (share > 0.5)
                if index == 0 or algorithm == "dense"
                else (0.01 < share < 0.1 + 0.1 * dist.get_world_size())
            ), (algorithm, share)
            optimizer.step()
            optimizer.zero_grad()
        state.finish()
        assert state.round == 4
        assert_one_model(module)
    module = model()
    ddp = wrap(module)
    state = hooks.OkTopkState(ddp, name="nan")
    ddp.register_comm_hook(state, hooks.oktopk)
    batch = batches(1, 1)[0]
    if dist.get_rank() == dist.get_world_size() - 1:
        batch[0] = float("nan")
    assert "NaN" in str(caught(NonFiniteError, backward, ddp, batch))
    refused("no state to save", state.state_dict)
    refused("no state to save", state.finish)
    # Ctrl-C in the call leaves the gradient in the residual.
    state, ddp, optimizer = new(hooks.oktopk)
    step(ddp, optimizer, batches(1, 1)[0])
    comm, state._comm = state._comm, SimpleNamespace(sparse_allreduce=interrupt)
    caught(KeyboardInterrupt, backward, ddp, batches(1, 1)[0])
    state._comm = comm
    refused("no state to save", state.state_dict)
    # Ctrl-C in finish(), or in a resynchronisation, leaves calls unmade.
    state, ddp, optimizer = new(hooks.oktopk)
    step(ddp, optimizer, batches(1, 1)[0])
    state._finish = interrupt
    caught(KeyboardInterrupt, state.finish)
    refused("has failed", state.finish)
    state, ddp, optimizer = new(hooks.eager_sgd)
    backward(ddp, batches(1, 1)[0])
    state._resynchronise = interrupt
    caught(KeyboardInterrupt, optimizer.step)
    refused("has failed", state.finish)
    refused("has ended", backward, ddp, batches(1, 1)[0])


# -- DC-S3GD --------------------------------------------------------------------------------------


def delayed_by_hand(steps):
    """The mean model after `steps` steps of algorithm 1, for all ranks in one process."""
    size = dist.get_world_size()
    modules = [model().double() for _ in range(size)]
    data = [[batch.double() for batch in batches(5, steps, rank)] for rank in range(size)]
    optimizers = [optimizer_of(module) for module in modules]
    for index in range(steps):
        models = [torch.cat([p.detach().flatten() for p in trained(module)]) for module in modules]
        mean = torch.stack(models).mean(0)
        for module, optimizer, w, own in zip(modules, optimizers, models, data, strict=True):
            optimizer.zero_grad()
            module(own[index]).square().mean().backward()
            if index:
                gradient = torch.cat([p.grad.flatten() for p in trained(module)])
                compensate(gradient, mean - w, 0.2)
                torch.nn.utils.vector_to_parameters(mean.clone(), trained(module))
                for p, g in zip(trained(module), gradient.split([p.numel() for p in trained(module)]), strict=True):
                    p.grad.copy_(g.view(p.shape))
            optimizer.step()
    return torch.stack([torch.cat([p.detach().flatten() for p in trained(module)]) for module in modules]).mean(0)


def delayed():
    module = model().double()
    ddp, optimizer = wrap(module), optimizer_of(module)
    state = hooks.DCS3GDState(ddp, optimizer)
    ddp.register_comm_hook(state, hooks.dc_s3gd)
    for index, batch in enumerate(batches(5, 6)):
        if index == 3:  # Ctrl-C in the step, which is made again
            backward(ddp, batch.double())
            averaged, state._averaged = state._averaged, SimpleNamespace(wait=interrupt)
            caught(KeyboardInterrupt, optimizer.step)
            assert state._averaged is not None
            state._averaged = averaged
            optimizer.step()
            optimizer.zero_grad()
        else:
            step(ddp, optimizer, batch.double())
    caught(AssertionError, assert_one_model, module)  # until the end each rank has its own
    state.finish()
    assert_one_model(module)
    mine = torch.cat([p.detach().flatten() for p in trained(module)])
    assert torch.allclose(mine, delayed_by_hand(6))
    assert "has ended" in str(caught(UsageError, backward, ddp, batches(5, 1)[0].double()))
    # A parameter that is not used gets no gradient, and so no weight decay.
    module = Partly()
    ddp, optimizer = wrap(module, find_unused_parameters=True), optimizer_of(module)
    state = hooks.DCS3GDState(ddp, optimizer)
    ddp.register_comm_hook(state, hooks.dc_s3gd)
    for batch in batches(5, 3):
        step(ddp, optimizer, batch)
    state.finish()
    assert torch.equal(module.unused, torch.ones(5))


# -- checkpoints ----------------------------------------------------------------------------------


def of_rank(rank, value):
    """The value of this rank."""
    everyones = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, value)
    return everyones[rank]


def scheduled(hook, **more):
    """What a checkpoint has, the state last, and the wrapped model; with a scheduler where the state takes one."""
    module = model()
    optimizer = optimizer_of(module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    options = {"scheduler": scheduler} if hook is hooks.eager_sgd else {}
    state, ddp, _ = new(hook, module, options, lambda _: optimizer, **more)
    return (module, optimizer, state), ddp


def checkpoints():
    """A training that goes on from a checkpoint, also of round 0, ends with the same bits as one without a break.

    It goes on in the same process group, under another name.
    """
    states = []
    for hook in MAKERS:
        data, saved, end, group = batches(6, 6), {}, None, dist.new_group()
        is_of_all = hook in (hooks.allreduce, hooks.eager_sgd)
        for begin in (None, 0, 3):
            parts, ddp = scheduled(hook, process_group=group)
            module, optimizer, state = parts
            content = copy.deepcopy(saved.get(begin, ()))
            if is_of_all:
                content = of_rank(-1, content)
            for each, part in zip(parts, content, strict=False):
                each.load_state_dict(part)
            assert state.round == (begin or 0)
            for index in range(begin or 0, len(data)):
                if begin is None:
                    saved[index] = copy.deepcopy([each.state_dict() for each in parts])
                step(ddp, optimizer, data[index])
            state.finish()
            assert state.round == 6
            end = bits(module) if end is None else end
            assert torch.equal(end, bits(module)), (hook, begin)
            refused("before the first", state.load_state_dict, saved[3][2])
        states.append((ddp, saved[3][2]))
        load_elsewhere(hook, saved[3], is_of_all)
    saved = saved[3]
    # A checkpoint of DC-S3GD, after which no step is made, ends with the average that was under way.
    module = model()
    ddp, optimizer = wrap(module, process_group=dist.new_group()), optimizer_of(module)
    state = hooks.DCS3GDState(ddp, optimizer)
    module.load_state_dict(saved[0])
    state.load_state_dict(saved[2])
    if dist.get_world_size() > 1:
        caught(AssertionError, assert_one_model, module)
    state.finish()
    assert_one_model(module)
    ddp, _ = states[0]
    for _, other in states[1:]:
        assert "was saved has hook" in str(caught(UsageError, hooks.AllreduceState(ddp).load_state_dict, other))
    _, saved = states[list(MAKERS).index(hooks.oktopk)]
    other = hooks.OkTopkState(ddp, algorithm="topka", density=0.1, name="of another algorithm")
    refused("of the algorithm 'oktopk'", other.load_state_dict, saved)


def copies():
    """A wrapped model with a hook can be copied and saved. The copy has no hook, as with torch's, and may get one."""
    for hook in MAKERS:
        state, ddp, optimizer = new(hook)
        for batch in batches(1, 3):
            state.log(loss=2.0)
            step(ddp, optimizer, batch)
        copied = copy.deepcopy(ddp)
        assert torch.equal(bits(copied), bits(ddp)), hook
        torch.save(ddp, io.BytesIO())
        ((_, other),) = copied._comm_hooks
        for act in (
            other.state_dict,
            other.finish,
            other.discard,
            other.log,
            lambda other=other: other.load_state_dict({}),
        ):
            refused("make a state for the copy", act)
        assert other.metrics == state.metrics == {"loss": 2.0}, hook
        if hook is hooks.eager_sgd:
            refused("make a state for the copy", lambda other=other: other.reduction)
        step(copied, optimizer_of(copied), batch)
        copied.register_comm_hook(other, hook)
        refused("make a state for the copy", backward, copied, batch)

        copied = copy.deepcopy(ddp)
        optimizer_of_copy = optimizer_of(copied)
        optimizer_of_copy.load_state_dict(optimizer.state_dict())
        state_of_copy = MAKERS[hook](copied, optimizer_of_copy)
        state_of_copy.load_state_dict(state.state_dict())
        copied.register_comm_hook(state_of_copy, hook)
        for batch in batches(2, 3):
            step(copied, optimizer_of_copy, batch)
        state_of_copy.finish()
        step(ddp, optimizer, batch)
        state.finish()
        assert state_of_copy.round == state.round + 2, hook
        for each in (copied, ddp):
            assert_one_model(each, buffers=hook is not hooks.allreduce)


def damaged_checkpoints():
    """A checkpoint in which a value is missing, or cannot be, is refused, and changes no round."""
    for hook in MAKERS:
        (_, optimizer, state), ddp = scheduled(hook)
        for batch in batches(6, 4):
            step(ddp, optimizer, batch)
        saved = state.state_dict()
        state.finish()
        (_, _, state), _ = scheduled(hook)
        taken = []
        for what, each in [*damaged(saved), ("a list", []), ("None", None)]:
            try:
                state.load_state_dict(each)
            except UsageError:
                assert state.round == 0
            else:
                taken.append(what)
                state.round = 0
        state.load_state_dict(saved)
        assert state.round == 4
        assert [what for what in taken if not is_harmless(what)] == [], hook


def is_harmless(what):
    """Whether a checkpoint with this damage may be taken.

    A scheduler of another version of torch has other entries, and its numbers may be any. A sparse allreduce without a
    state begins anew.
    """
    if what.startswith("('own', 'scheduler', "):
        is_number = what.endswith(("is a float", "is a int", "is negative", "is huge"))
        return "last_epoch" not in what and (what.endswith("is missing") or is_number)
    return what.startswith("('own', 'operations', ") and what.count(",") == 2 and what.endswith("is a NoneType")


def load_elsewhere(hook, saved, is_of_all):
    """Each rank alone goes on from what the last one has saved, unless each rank's checkpoint is its own."""
    size = dist.get_world_size()
    saved, alone = of_rank(-1, saved), [dist.new_group([rank]) for rank in range(size)][dist.get_rank()]
    parts, ddp = scheduled(hook, process_group=alone)
    *_, optimizer, state = parts
    if not is_of_all:
        if size > 1:
            refused(f"has ranks {size}, and not 1", state.load_state_dict, saved[2])
        return
    for each, part in zip(parts, saved, strict=True):
        each.load_state_dict(part)
    for batch in batches(6, 3):
        step(ddp, optimizer, batch)
    state.finish()
    assert state.round == 6


# -- a death --------------------------------------------------------------------------------------


def dies():
    """Rank 1 dies in a backward pass, and all others name it in theirs, or in the step of the optimizer."""
    makers = {
        # Solo rounds wait for no rank: the others go on to the next model before a late rank has made its last step.
        hooks.eager_sgd: lambda ddp, optimizer: hooks.EagerSGDState(ddp, optimizer, partial="solo"),
        hooks.oktopk: lambda ddp, optimizer: hooks.OkTopkState(ddp),
        hooks.dc_s3gd: lambda ddp, optimizer: hooks.DCS3GDState(ddp, optimizer),
    }
    (batch,) = batches(1, 1)
    trainings = []
    for hook, make in makers.items():
        module = model()
        ddp, optimizer = wrap(module, process_group=dist.new_group()), optimizer_of(module)
        state = make(ddp, optimizer)
        ddp.register_comm_hook(state, hook)
        for _ in range(STEPS):
            step(ddp, optimizer, batch)
        trainings.append((hook, ddp, optimizer, state))
    if dist.get_rank() == 1:
        trainings[0][1].module.wide.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))

    def train(ddp, optimizer):
        while True:
            step(ddp, optimizer, batch)

    for hook, ddp, optimizer, _ in trainings:
        error = caught(dist.DistBackendError, train, ddp, optimizer)
        assert isinstance(error, PeerLostError), error
        print(hook.__name__, "lost", error.rank)
    sys.exit()


# -- refusals -------------------------------------------------------------------------------------


def agreement():
    """In the first backward pass all ranks learn that they have not begun alike."""
    (batch,) = batches(1, 1)
    first = dist.get_rank() == 0
    groups = f"equal at the ranks [0], {[*range(1, dist.get_world_size())]}"
    # Options.
    for hook, option in (
        (hooks.eager_sgd, {"clip_norm": 1.0 + first}),
        (hooks.eager_sgd, {"history": 64 + first}),
        (hooks.eager_sgd, {"partial": "solo" if first else "quorum"}),
        (hooks.oktopk, {"density": 0.5 if first else 0.1}),
        (hooks.oktopk, {"warm_up": int(first)}),
        (hooks.dc_s3gd, {"lambda0": 0.5 * first}),
    ):
        _, ddp, _ = new(hook, options=option)
        refused(f"different values of {next(iter(option))}", backward, ddp, batch)
    _, ddp, _ = new(hooks.eager_sgd, options={"partial": "quorum", "seed": int(first)})
    refused("different values of seed:", backward, ddp, batch)
    default = dist.get_world_size() // 2 + 1
    _, ddp, _ = new(hooks.eager_sgd, options={"partial": "quorum", "quorum": default if first else None})
    backward(ddp, batch)
    _, ddp, optimizer = new(hooks.eager_sgd)
    optimizer.param_groups[0]["lr"] = 0.1 + first
    refused("different values of options of the optimizer", backward, ddp, batch)
    # Rounds: one rank alone loads a checkpoint.
    for hook in MAKERS:
        state, ddp, _ = new(hook)
        if first:
            state.load_state_dict(state.state_dict() | {"round": 3})
        refused("have loaded the rounds [3, 0", backward, ddp, batch)
    # Parameters.
    for hook in (hooks.eager_sgd, hooks.oktopk, hooks.dc_s3gd):
        _, ddp, _ = new(hook)
        if first:
            with torch.no_grad():
                ddp.module.convolution.weight[0, 0, 0, 0] += 1
        refused(f"the parameters of the model ({groups})", backward, ddp, batch)
    for name in ("out", "frozen"):  # with DC-S3GD models are each rank's own after the first round
        state, ddp, _ = new(hooks.dc_s3gd)
        state.load_state_dict(state.state_dict() | {"round": 3})
        with torch.no_grad():
            getattr(ddp.module, name).bias += first
        if name == "frozen":
            refused("the parameters of the model", backward, ddp, batch)
        else:
            backward(ddp, batch)
    # The optimizer, and the scheduler.
    _, ddp, optimizer = new(hooks.eager_sgd)
    if first:
        for parameter in trained(ddp.module):
            optimizer.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    refused(f"the state of the optimizer ({groups})", backward, ddp, batch)
    _, ddp, optimizer = new(hooks.eager_sgd, make_optimizer=lambda module: in_groups(module, first))
    refused(f"the groups of the optimizer ({groups})", backward, ddp, batch)
    module = model()
    optimizer = optimizer_of(module)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    scheduler.last_epoch += first  # of 100, so the learning rate is the same
    _, ddp, _ = new(hooks.eager_sgd, module, {"scheduler": scheduler}, lambda _: optimizer)
    refused(f"the state of the scheduler ({groups})", backward, ddp, batch)


def in_groups(module, is_reversed):
    """An optimizer with two groups of parameters, with equal options."""
    halves = [[*module.parameters()][:3], [*module.parameters()][3:]]
    return torch.optim.SGD([{"params": each} for each in (halves[::-1] if is_reversed else halves)], lr=0.1)


def eager_state(optimizer=None, module=None, options=(), **more):
    module = module or model()
    ddp = wrap(module, **more)
    wrapped.append(ddp)  # the state does not hold it
    return hooks.EagerSGDState(ddp, optimizer or optimizer_of(module), **dict(options))


wrapped = []


def refused_when_made():
    """Options, optimizers and models that the constructor refuses."""
    with warnings.catch_warnings(action="ignore"):  # as above
        # It takes a fifth of a second, and the other cases do without it.
        from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

    refused("backend asyncoll", eager_state, process_group=dist.new_group(backend="gloo"))
    refused("find_unused_parameters", eager_state, find_unused_parameters=True)
    refused("skip_all_reduce_unused_params", eager_state, skip_all_reduce_unused_params=True)
    skipping = wrap(model(), gradient_as_bucket_view=True, skip_all_reduce_unused_params=True)
    refused("skip_all_reduce_unused_params", hooks.AllreduceState, skipping)
    refused("find_unused_parameters", hooks.OkTopkState, wrap(model(), find_unused_parameters=True))
    hooks.OkTopkState(wrap(model(), static_graph=True), name="static")
    refused("forward_sync_buffers=False", eager_state, forward_sync_buffers=True)
    eager_state(module=nn.Linear(2, 2), forward_sync_buffers=True, options={"name": "no buffers"})
    refused("dtypes", eager_state, module=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()))
    module = model()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["out.weight"])
    refused("ignores out.weight", eager_state, module=module)
    module = model()
    _apply_optimizer_in_backward(torch.optim.SGD, module.out.parameters(), {"lr": 0.1})
    refused("steps in backward()", eager_state, module=module)
    module = model()
    refused(
        "sends messages", eager_state, ZeroRedundancyOptimizer(module.parameters(), torch.optim.SGD, lr=0.1), module
    )
    refused("does not train", eager_state, torch.optim.SGD(module.out.parameters(), lr=0.1), module)
    beside = [*module.parameters(), nn.Parameter(torch.zeros(1))]
    refused("outside of the model", eager_state, torch.optim.SGD(beside, lr=0.1), module)
    refused("history", eager_state, options={"history": 0})
    refused("partial is", eager_state, options={"partial": "group"})
    refused('quorum=1 belongs to partial="quorum"', eager_state, options={"quorum": 1})
    refused('candidates=2 belongs to partial="majority"', eager_state, options={"candidates": 2})
    for option in ({"partial": "quorum", "quorum": 99}, {"partial": "majority", "candidates": 0}, {"sync_every": -1}):
        refused([*option][-1], eager_state, options=option)
    for option in ({"algorithm": "none"}, {"thresholds_every": 0}, {"regions_every": 0}, {"feedback": 1}):
        refused(next(iter(option)), hooks.OkTopkState, wrap(model()), warm_up=9, **option)
    refused("wrap the model", hooks.OkTopkState, model())
    refused("optimizer that trains the model", hooks.DCS3GDState, wrap(model()), None)
    refused("op is", eager_state, options={"op": ReduceOp.SUM})
    refused("clip_norm is", eager_state, options={"clip_norm": 0.0})
    other = torch.optim.lr_scheduler.StepLR(optimizer_of(model()), 1)
    refused("another optimizer", eager_state, options={"scheduler": other})
    ddp = wrap(model())
    ddp.mixed_precision = object()
    refused("torch.autocast", hooks.OkTopkState, ddp)
    refused("density", hooks.OkTopkState, wrap(model()), density=0.0)
    refused("lambda0", hooks.DCS3GDState, wrap(model()), None, lambda0=-1.0)
    module = model()
    delayed_parameters = [("out.weight", module.out.weight)]
    ddp = wrap(module, delay_all_reduce_named_params=delayed_parameters, param_to_hook_all_reduce=module.wide.weight)
    refused("delay_all_reduce", hooks.OkTopkState, ddp)

    module = nn.Linear(2, 2, dtype=torch.complex64)
    refused("complex", hooks.DCS3GDState, wrap(module), optimizer_of(module))
    refused("complex", hooks.OkTopkState, wrap(module))
    refused("complex", eager_state, module=module)
    # The second state of a name, or of an optimizer.
    refused("a training named 'static' has used", hooks.OkTopkState, wrap(model()), name="static")
    refused("a training named 'no buffers' has used", eager_state, options={"name": "no buffers"})
    module = model()
    optimizer = optimizer_of(module)
    first = hooks.DCS3GDState(ddp := wrap(module), optimizer)
    refused("state of another hook", hooks.DCS3GDState, ddp, optimizer)
    first.finish()
    hooks.DCS3GDState(ddp, optimizer)


def refused_buckets():
    """What the first buckets show."""
    (batch,) = batches(1, 1)
    ddp = wrap(model())
    state = hooks.EagerSGDState(ddp, optimizer_of(ddp), name="compressed")
    ddp.register_comm_hook(state, fp16_compress_wrapper(hooks.eager_sgd))
    refused("bucket is in torch.float16", backward, ddp, batch)
    ddp, other = wrap(model()), wrap(model())
    ddp.register_comm_hook(hooks.OkTopkState(other, name="of another model"), hooks.oktopk)
    refused("made for another model", backward, ddp, batch)
    module = model()
    ddp, other = wrap(module), wrap(module)
    ddp.register_comm_hook(hooks.OkTopkState(other, name="of another wrapper"), hooks.oktopk)
    refused("another DistributedDataParallel", backward, ddp, batch)
    for changes_before in (True, False):
        module = model()
        ddp = wrap(module)
        module.frozen.requires_grad_(changes_before)
        state = hooks.OkTopkState(ddp, name=f"changes {changes_before}")
        module.frozen.requires_grad_()
        ddp.register_comm_hook(state, hooks.oktopk)
        refused("requires_grad", backward, ddp, batch)
    _, ddp, _ = new(hooks.eager_sgd)
    with ddp.join():
        assert "join()" in str(caught(UsageError, backward, ddp, batch))
    _, ddp, _ = new(hooks.allreduce)
    with ddp.join(divide_by_initial_world_size=False):
        refused("divide_by_initial_world_size", backward, ddp, batch)
    ddp = wrap(model())
    ddp.register_comm_hook(hooks.OkTopkState(ddp, name="other"), hooks.eager_sgd)
    refused("class EagerSGDState", backward, ddp, batch)
    sparse_module = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    ddp = DistributedDataParallel(sparse_module)
    ddp.register_comm_hook(hooks.OkTopkState(ddp, name="embedding"), hooks.oktopk)
    assert "sparse" in str(caught(UsageError, lambda: ddp(torch.tensor([0, 1])).sum().backward()))
    state, ddp, _ = new(hooks.eager_sgd)
    assert "holds NaN" in str(caught(NonFiniteError, backward, ddp, batch * float("inf")))
    refused("has failed", state.finish)


def refused_steps():
    """What steps of the optimizer show: gradients that have changed, and steps that do not follow a backward pass."""
    (batch,) = batches(1, 1)
    for change in (
        lambda ddp: nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3),
        lambda ddp: ddp.module.out.weight.grad.mul_(2),
        zero_one_element,
    ):
        _, ddp, optimizer = new(hooks.eager_sgd, options=LATE)
        backward(ddp, batch)
        change(ddp)
        refused("have changed", optimizer.step)
    _, ddp, optimizer = new(hooks.eager_sgd, options=LATE)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ddp(batch).square().mean()).backward()
    refused("have changed", scaler.step, optimizer)
    module = model()
    fused = torch.optim.SGD(module.parameters(), lr=0.1, fused=True)
    state = eager_state(fused, module, options={"name": "fused"})
    state._model().register_comm_hook(state, hooks.eager_sgd)
    scaler.scale(state._model()(batch).square().mean()).backward()
    refused("have changed", scaler.step, fused)
    state, ddp, optimizer = new(hooks.eager_sgd, options=LATE)
    refused("register_comm_hook(state, hooks.eager_sgd)", optimizer.step)
    refused("in its first steps", state.finish)
    backward(ddp, batch)
    refused("closure", optimizer.step, lambda: 0.0)
    refused("had no step", state.finish)
    refused("had no step", state.state_dict)
    assert "two backward passes" in str(caught(UsageError, backward, ddp, batch))
    state, ddp, optimizer = new(hooks.eager_sgd, options=LATE)
    step(ddp, optimizer, batch)
    refused("without a backward pass", optimizer.step)
    _, ddp, optimizer = new(hooks.eager_sgd, options=LATE)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    backward(ddp, batch)
    refused("scheduler", optimizer.step)
    _, ddp, optimizer = new(hooks.eager_sgd, Partly(), LATE, static_graph=True)
    backward(ddp, batch)
    refused("has no gradient", optimizer.step)
    for change in (
        lambda optimizer: optimizer.param_groups[0].update(lr=0.1),
        lambda optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}),
    ):
        for sync_every in (1, 0):
            _, ddp, optimizer = new(hooks.eager_sgd, options={"sync_every": sync_every})
            for _ in range(2):  # the first one is synchronous
                step(ddp, optimizer, batch)
            change(optimizer)
            backward(ddp, batch)
            if sync_every:  # no rank has results to catch up with
                optimizer.step()
            else:
                refused("changed the learning rate", optimizer.step)


def zero_one_element(ddp):
    ddp.module.wide.weight.grad.data[3, 1] = 0


LATE = {"sync_every": 0}


def refused_parameters():
    """Parameters that the program changes after a step."""
    (batch,) = batches(1, 1)
    for sync_every in (1, 0):
        state, ddp, optimizer = new(hooks.eager_sgd, options={"sync_every": sync_every})
        for _ in range(3):
            step(ddp, optimizer, batch)
        with torch.no_grad():
            ddp.module.out.weight.clamp_(-0.1, 0.1)
        if sync_every:
            state.state_dict()
            step(ddp, optimizer, batch)
        else:
            refused("gradients that are staged", state.state_dict)
            refused("changed parameters", step, ddp, optimizer, batch)
    ddp = wrap(model())
    optimizer = optimizer_of(ddp)
    state = hooks.DCS3GDState(ddp, optimizer)
    ddp.register_comm_hook(state, hooks.dc_s3gd)
    made.append(state)
    step(ddp, optimizer, batch)
    ddp.load_state_dict(ddp.state_dict())
    refused("changed parameters", state.finish)
    state, ddp, optimizer = new(hooks.dc_s3gd)
    step(ddp, optimizer, batch)
    other = wrap(ddp.module)
    other.register_comm_hook(state, hooks.dc_s3gd)
    backward(other, batch)
    refused("another DistributedDataParallel around the model", optimizer.step)


CASES = {name: value for name, value in list(globals().items()) if callable(value)}

if __name__ == "__main__":
    dist.init_process_group("asyncoll")
    for case in sys.argv[1:]:
        CASES[case]()
        while made:
            made.pop().discard()
    last = ended()
    dist.destroy_process_group()
    assert all(p.grad.isfinite().all() for p in last)
    print("passed")
