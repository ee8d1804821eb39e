"""A rank of torch.distributed: runs the case of its first argument, and prints a line once it has passed."""

import datetime
import os
import random
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import asyncoll
import asyncoll.torch
from asyncoll.launch.rank_environment import reserve_port
from tests.support.raising import caught

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
FOLDER = os.environ["FOLDER"]
LOST = "is gone: it has left"


def init(**place):
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("asyncoll", **({"timeout": limit} | place))


def total(group=None):
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    return int(x[0])


def error_of(act, *arguments):
    """The text of the exception that `act` raises."""
    return str(caught(Exception, act, *arguments))


def at_file(name):
    """A place where the ranks of this test meet."""
    return {"rank": RANK, "world_size": SIZE, "init_method": f"file://{FOLDER}/{name}"}


def monitored(alone):
    """Rank 0 passes a monitored barrier with the others only, also if an earlier world has had one in its store."""
    barrier = dist.group.WORLD.monitored_barrier
    if not alone:
        barrier(datetime.timedelta(seconds=60))
    elif RANK == 0:
        assert "Rank 1 failed to pass" in error_of(barrier, datetime.timedelta(seconds=0.05))


def stores():
    """Worlds meet in every store of torch, one after another, also twice in the same one and after an error."""
    shared = dist.FileStore(f"{FOLDER}/shared", SIZE)
    outside = dist.FileStore(f"{FOLDER}/outside", SIZE)
    reserved = [reserve_port() for _ in range(2)] if RANK == 0 else []
    if RANK == 0:
        outside.set("ports", " ".join(str(each.getsockname()[1]) for each in reserved))
    of_store, of_place = map(int, outside.get("ports").split())
    served = dist.TCPStore("127.0.0.1", of_store, SIZE, RANK == 0)
    given = {"rank": RANK, "world_size": SIZE}
    places = [
        {},
        at_file("file"),
        {"store": shared, **given},
        {"store": shared, **given},
        {"store": dist.PrefixStore("inside", served), **given},
        {"store": served, **given},
        {"init_method": f"tcp://127.0.0.1:{of_place}", **given},
    ]
    for turn, place in enumerate(places):
        init(**place)
        assert total() == SIZE
        monitored(alone=turn % 2 == 1)
        assert total(dist.new_group()) == SIZE
        dist.barrier()
        dist.destroy_process_group()
    if RANK:
        short = {"store": served, "timeout": datetime.timedelta(seconds=0.5)}
        assert "missing: rank 0 (not in the store yet)" in error_of(lambda: init(**given | short))
        served.set(f"late {RANK}", "")
    else:
        served.wait([f"late {rank}" for rank in range(1, SIZE)])
    init(store=served, **given)
    assert total() == SIZE
    dist.destroy_process_group()
    init(store=dist.HashStore(), rank=0, world_size=1)
    assert total() == 1
    dist.destroy_process_group()
    for each in reserved:
        each.close()


def cycles():
    """Worlds of one place, one after another, of groups and of `asyncoll.run`: ranks leave them early and late.

    A rank that leaves early comes to the store of rank 0 for the next world before rank 0 has left the last one.
    """
    drawn = random.Random(int(os.environ["SEED"]))
    kinds = [drawn.choice(("group", "group", "asyncio")) for _ in range(8)]
    late = [{rank for rank in range(SIZE) if drawn.random() < 0.5} for _ in kinds]
    kinds[0], kinds[-2:], late[-2] = "group", ["group", "group"], {0}
    outside = dist.FileStore(f"{FOLDER}/outside", SIZE)
    for turn, kind in enumerate(kinds):
        if kind == "asyncio":
            assert asyncoll.run(size) == SIZE
            continue
        place = {}
        if RANK:  # as torch does it, but rank 0 hears of it
            opened = next(dist.rendezvous("env://", RANK, SIZE))[0]
            place = {"rank": RANK, "world_size": SIZE, "store": dist.PrefixStore("default_pg", opened)}
            outside.set(f"{RANK} has come to {turn}", "")
        init(**place)
        assert total() == SIZE
        early = set(range(SIZE)) - late[turn]
        if RANK == 0 and 0 in late[turn] and kinds[turn + 1 : turn + 2] == ["group"]:
            outside.wait([f"{rank} has come to {turn + 1}" for rank in range(1, SIZE)])
        elif RANK in late[turn] and early:
            outside.wait([f"{rank} has left {turn}" for rank in early])
        dist.destroy_process_group()
        outside.set(f"{RANK} has left {turn}", "")


def leaves():
    """A rank leaves while the others go on: its calls end, and only groups with it fail."""
    outside = dist.FileStore(f"{FOLDER}/outside", SIZE)
    init()
    rest = dist.new_group(list(range(1, SIZE)))
    pairs = [dist.new_group([0, rank]) for rank in range(1, SIZE)]
    whole = dist.new_group()
    own = [group for group in pairs if group is not dist.GroupMember.NON_GROUP_MEMBER]
    assert [total(group) for group in own] == [2] * len(own)
    assert total(whole) == SIZE
    if RANK == 0:
        for rank in range(1, SIZE):
            dist.send(torch.full((2,), 7.0), rank)
        forgotten = dist.all_reduce(torch.ones(1 << 16), async_op=True)
        dist.barrier()
        dist.destroy_process_group()
        assert forgotten.is_completed()
        outside.set("rank 0 has left", "")
        return
    dist.all_reduce(torch.ones(1 << 16))
    dist.barrier()
    outside.wait(["rank 0 has left"])
    x = torch.zeros(2)
    dist.recv(x, 0)
    assert x.tolist() == [7, 7]
    for _ in range(3):
        assert total(rest) == SIZE - 1
    for group in (None, whole, own[0]):
        for _ in range(2):
            said = error_of(total, group)
            assert "rank 0 (host " in said, said
            assert LOST in said, said
    assert total(rest) == SIZE - 1
    late = dist.new_group(list(range(SIZE)))
    assert LOST in error_of(total, late)
    another = dist.new_group(list(range(1, SIZE)), use_local_synchronization=True)
    assert total(another) == SIZE - 1
    dist.destroy_process_group()


def groups():
    """Groups are destroyed in any order, by any of their ranks, and their names may come again."""
    init()
    made = [dist.new_group() for _ in range(4)]
    for group in made:
        assert total(group) == SIZE
    order = made if RANK % 2 else made[::-1]
    for group in order[:2]:
        dist.destroy_process_group(group)
    dist.barrier()
    if RANK == 0:
        assert LOST in error_of(total, made[0])  # rank 1 has destroyed it
    dist.barrier()
    for _ in range(3):
        again = dist.new_group(list(range(SIZE)), use_local_synchronization=True)
        assert total(again) == SIZE
        dist.destroy_process_group(again)
    assert total() == SIZE
    dist.destroy_process_group()


async def size(comm):
    return comm.size


def misuse():
    """Clear errors, and a world that still works after them."""
    assert "initialize the default process group" in error_of(lambda: lone_group())
    init()
    for act in (lambda: asyncoll.run(size), asyncoll.init):
        assert "this process is in a world already" in error_of(act)
    world = dist.group.WORLD
    assert total() == SIZE
    dist.destroy_process_group()
    assert "closed" in error_of(world.allreduce, [torch.ones(1)])
    world.shutdown()
    init(**at_file("again"))
    waiting = dist.irecv(torch.ones(1), (RANK + 1) % SIZE)
    if RANK == 0:
        thread = threading.Thread(target=dist.distributed_c10d._abort_process_group)
        thread.start()
    assert "aborted" in error_of(waiting.wait) or RANK == 0
    if RANK == 0:
        thread.join()
    else:
        assert "aborted" in error_of(total)
        dist.destroy_process_group()
    init(**at_file("after the abort"))
    assert total() == SIZE
    dist.destroy_process_group()


def lone_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.new_group([0], backend="asyncoll")
    finally:
        dist.destroy_process_group()


def forks():
    """Neither a forked child nor the workers of a DataLoader harm the world, and a child may have one of its own."""
    init()
    assert total() == SIZE
    world, held, let_go = dist.group.WORLD, threading.Event(), threading.Event()

    def hold():
        with world._comm._order:  # as a thread that makes a call when another one forks
            held.set()
            let_go.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    if os.fork() == 0:
        signal.alarm(60)
        said = error_of(total)
        assert "forked child" in error_of(world.monitored_barrier)
        dist.destroy_process_group()
        init(store=dist.HashStore(), rank=0, world_size=1)
        assert total() == 1
        os._exit(7 if "forked child" in said else 1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    let_go.set()
    holder.join()
    rows = torch.utils.data.DataLoader(torch.arange(8), batch_size=2, num_workers=2)
    assert torch.cat(list(rows)).tolist() == list(range(8))
    assert total() == SIZE
    dist.destroy_process_group()


def fails():
    """Rank 0 ends with an exception, in the middle of a call, and with it the world."""
    init()
    rest = dist.new_group(list(range(1, SIZE)))
    dist.barrier()
    if RANK == 0:
        dist.irecv(torch.ones(1), 1)
        print("passed", flush=True)
        raise ValueError("enough of this")
    for group in (None, rest):
        said = error_of(total, group)
        assert "rank 0 aborted: ValueError: enough of this" in said, said


def ends():
    """Rank 0 ends without leaving, in the middle of a call; the others hear it, and go on without it."""
    init()
    rest = dist.new_group(list(range(1, SIZE)))
    dist.barrier()
    if RANK == 0:
        dist.irecv(torch.ones(1), 1)
        return
    said = error_of(total)
    assert "rank 0 (host " in said, said
    assert "its program has ended without destroy_process_group" in said, said
    assert total(rest) == SIZE - 1
    # and these end without leaving


def dies():
    """Rank 1 is killed in the backward pass of DDP; prints the milliseconds until this rank raises."""
    init()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256) for _ in range(8)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.25)
    x = torch.ones(4, 256)
    for _ in range(3):
        model(x).sum().backward()
    dist.barrier()
    if RANK == 1:

        def strike(_):
            with open(f"{FOLDER}/killed", "w") as file:
                file.write(str(time.monotonic()))
            os.rename(file.name, f"{FOLDER}/at")
            os.kill(os.getpid(), signal.SIGKILL)

        layers[3].weight.register_hook(strike)
    said = error_of(lambda: model(x).sum().backward())
    now = time.monotonic()
    with open(f"{FOLDER}/at") as file:
        print(f"{1000 * (now - float(file.read())):.0f} ms", file=sys.stderr)
    assert "rank 1 (host " in said, said
    assert "is gone" in said, said
    said = error_of(dist.barrier)
    assert "rank 1 (host " in said, said
    dist.destroy_process_group()


def mixed():
    """One rank has chosen Gloo: an error at every rank, within the time limit."""
    backend = "gloo" if RANK == 1 else "asyncoll"
    limit = datetime.timedelta(seconds=1.5)
    said = error_of(lambda: dist.init_process_group(backend, timeout=limit))
    assert RANK == 1 or "rank 1 has initialized this process group with the backend gloo" in said, said


def keyed():
    """With the same key on all ranks a world forms, and with another one on rank 1 none does."""
    init()
    assert total() == SIZE
    dist.barrier()
    dist.destroy_process_group()
    if RANK == 1:
        os.environ["ASYNCOLL_KEY_FILE"] += ".other"
    said = ""
    try:
        init(**at_file("again"), timeout=datetime.timedelta(seconds=3))
    except dist.DistBackendError as error:  # of joining, too
        said = str(error)
    assert "key of this job" in said, said


def alone():
    """A world of one."""
    init()
    assert total() == 1
    assert total(dist.new_group([0])) == 1
    dist.barrier()
    dist.destroy_process_group()
    update = dist.distributed_c10d._update_default_pg

    def interrupt(*_):
        dist.distributed_c10d._update_default_pg = update
        raise ValueError("interrupted")

    dist.distributed_c10d._update_default_pg = interrupt  # torch calls it once this rank has joined
    assert "interrupted" in error_of(init)
    init(store=dist.HashStore(), rank=0, world_size=1)
    assert total() == 1
    dist.destroy_process_group()
    init()


CASES = (stores, cycles, leaves, groups, misuse, forks, fails, ends, dies, mixed, keyed, alone)
next(case for case in CASES if case.__name__ == sys.argv[1])()
print("passed", flush=True)
