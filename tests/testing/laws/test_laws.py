"""The laws of wait-avoiding collectives hold in hundreds of worlds, and the checker finds faults that break them."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from asyncoll import Communicator, Metrics, NonFiniteError, Reduction, UsageError
from asyncoll.algorithms.gossip.pairwise import Gossip
from asyncoll.algorithms.sparse.sparse_operations import ALGORITHMS
from asyncoll.cli import main
from asyncoll.cli_base import Kinds, RankCounts
from asyncoll.errors import EvictedError
from asyncoll.extending import register_policy
from asyncoll.runtime.departures import Departures
from asyncoll.runtime.failures import Failures
from asyncoll.tensors.reductions import DTYPES
from asyncoll.testing import LawBroken, check_laws
from asyncoll.testing.laws import case_runs, dense, ending, gossip, sparse, training
from asyncoll.testing.laws.case_runs import HOSTS, MEMORY, SIMULATED, read_record, tell, write_record
from asyncoll.testing.laws.deaths import EpochsPart, EpochsProgram, forward
from asyncoll.testing.laws.dense_program import OPERATIONS, DenseProgram
from asyncoll.testing.laws.rounds import conservation, laws_of, staleness, synchrony
from asyncoll.testing.laws.sparse import SparseProgram
from asyncoll.testing.laws.story import (
    ALL_KINDS,
    DENSE,
    ENDING,
    EPOCHS,
    GOSSIP,
    KINDS,
    NAP_S,
    SPARSE,
    TRAINING,
    Cancelled,
    MadeCall,
    Story,
    WorldStory,
    draw,
)
from asyncoll.training import EagerSGD
from asyncoll.training.due import Due
from asyncoll.training.recovery import Recovery
from asyncoll.world.write_once import MemoryStore
from tests.support.processes import PATIENCE_S, without_delays

CALLS = draw("solo", 1, 0).calls  # the most calls of a rank

SEEDS = 13  # worlds of each kind: one of each size

# -- they hold -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "seeds", "devices"),
    [
        (SIMULATED, SEEDS, []),
        (MEMORY, 9, []),
        (HOSTS, 9, []),
        (SIMULATED, 6, ["--devices"]),
        (MEMORY, 3, ["--devices"]),
        (HOSTS, 3, ["--devices"]),
    ],
)
def test_all_laws_of_all_kinds_at_all_sizes(transport, seeds, devices, in_this_process):
    command = ["laws", "--seeds", f"0:{seeds}", "--transport", transport, *devices]
    result = CliRunner().invoke(main, [*command, "--jobs", "1"])
    assert_all_hold(result.exit_code, result.stdout, result.stderr, ALL_KINDS, seeds)


@pytest.mark.slow
def test_worlds_are_checked_in_several_processes():
    """As few small worlds as are worth two processes: each of these loads the package first."""
    seeds = 40
    command = ["laws", "--kind", "solo", "--sizes", "2", "--seeds", f"0:{seeds}", "--jobs", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "asyncoll", *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert_all_hold(done.returncode, done.stdout, done.stderr, ["solo"], seeds)


def assert_all_hold(code, out, err, kinds, seeds):
    assert code == 0, out + err
    lines = out.splitlines()
    assert [line.split()[:3] for line in lines] == [[kind, str(seeds), "worlds"] for kind in kinds]
    assert all(line.endswith("all laws hold") for line in lines)


@pytest.mark.parametrize("transport", [SIMULATED, MEMORY, HOSTS])
@pytest.mark.parametrize("kind", KINDS)
def test_a_few_worlds_of_each_kind(kind, transport):
    for size in (1, 2, 5, 9):
        assert check_laws(kind, size, seed=1, transport=transport).rounds == 12


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["zmq", "shm"])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_laws_over_real_sockets(kind, transport):
    check_laws(kind, 5, 2, transport=transport)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "kinds", "sizes", "devices"),
    [
        ("shm-processes", KINDS, (2, 5), False),
        ("zmq-processes", KINDS, (4,), False),
        ("shm-mixed-processes", KINDS, (3,), False),
        ("shm-processes", ("solo", GOSSIP), (3,), True),
    ],
)
def test_laws_over_processes(transport, kinds, sizes, devices, without_launcher, capfd):
    with ThreadPoolExecutor(4) as pool:
        check = partial(check_laws, transport=transport, devices=devices)
        worlds = [(kind, pool.submit(check, kind, size, size)) for kind in kinds for size in sizes]
    assert all(world.result().rounds == 12 or kind == GOSSIP for kind, world in worlds)
    assert without_delays(capfd.readouterr().err) == "", "such as that the ranks share no memory"


def test_laws_in_real_time():
    check_laws("solo", 3, 2, transport="inproc")


@pytest.mark.parametrize("transport", [SIMULATED, MEMORY])
@pytest.mark.parametrize("kind", KINDS)
def test_the_drawn_worlds_contain_late_cancelled_and_overlapping_calls(kind, transport):
    """Worlds in which no rank is late would prove nothing."""
    cases = [draw(kind, 5, seed) for seed in range(20)]
    expected = {"that waits long", "beside another"}
    expected |= {"not included", "later than its aim"} if kind != "full" else set()
    sometimes = {"that missed a round": kind in ("solo", "majority", "quorum", "policy"), "cancelled": kind != "group"}
    expected |= {what for what, is_of_kind in sometimes.items() if is_of_kind}
    found = set()
    for number, case in enumerate(cases, 1):
        found |= what_happens(tell(case, transport))
        if number >= 8 and found >= expected:
            break
    assert found >= expected
    assert found & {*sometimes} == expected & {*sometimes}
    assert {case.buckets for case in cases} == {1, 2}
    assert {case.quitter is None for case in cases} == {case.sleeper is None for case in cases} == {True, False}
    assert any(case.network.faults for case in cases)
    assert len({len(case.on_devices) for case in cases}) > 2


def what_happens(story):
    """The kinds of calls in the story that the laws are about."""
    calls = [call for mine in story.calls for call in mine]
    happens = {
        "not included": any(not call.included for call in calls),
        "later than its aim": any(call.round > call.aim for call in calls),
        "that waits long": any(call.wait_s > 500 for call in calls),
        "that missed a round": any(call.missed for call in calls),
        "cancelled": bool(story.cancelled),
        "beside another": any(not call.alone for call in calls),
    }
    return {what for what, is_there in happens.items() if is_there}


def test_same_seed_same_world():
    assert draw("group", 7, 3) == draw("group", 7, 3)
    assert draw("group", 7, 3) != draw("group", 7, 4)


def test_ranks_that_are_late_at_the_same_time_give_each_other_their_states():
    """The only rank with the state that another one needs has become late itself."""
    check_laws("training", 3, 808)


@pytest.mark.parametrize("size", [7, 16])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_world_in_virtual_time_is_the_same_in_each_run(kind, size):
    """A replay shows what a seed has found, whatever the addresses of the objects of that run."""
    assert len({check_laws(kind, size, 5, transport="memory") for _ in range(3)}) == 1


# -- and are noticed when they do not --------------------------------------------------------------


def tensors(comm, x):
    """The elements of every bucket behind the padding, by [number of the call, rank]."""
    return [bucket[-CALLS * comm.size :].reshape(CALLS, comm.size) for bucket in (x if isinstance(x, list) else [x])]


def own(comm, x):
    """The number of the call that made this contribution."""
    return int(np.flatnonzero(tensors(comm, x)[0][:, comm.rank])[0])


async def drops_a_contribution(call, comm, x):
    if own(comm, x) == 1:
        for tensor in tensors(comm, x):
            tensor[...] = 0
    return await call(x)


async def adds_it_twice(call, comm, x):
    for tensor in tensors(comm, x):
        tensor *= 2
    return await call(x)


async def gives_the_last_one_again(call, comm, x):
    if index := own(comm, x):
        for tensor in tensors(comm, x):
            tensor[index - 1, comm.rank] = 1
    return await call(x)


async def gives_an_old_one(call, comm, x):
    for tensor in tensors(comm, x):
        tensor[...] = 0
        tensor[0, comm.rank] = 1
    return await call(x)


async def goes_back_at_times(call, comm, x):
    return await (gives_an_old_one if own(comm, x) == 3 else honest)(call, comm, x)


async def honest(call, comm, x):
    return await call(x)


async def forgets_a_bucket(call, comm, x):
    reduction = await call(x)
    for tensor in tensors(comm, x)[1:]:
        tensor[...] = 0
    return reduction


async def alters_the_result_at_one_rank(call, comm, x):
    reduction = await call(x)
    if comm.rank == 1:
        for tensor in tensors(comm, x):
            tensor[0, 0] += 1
    return reduction


async def names_another_contributor(call, comm, x):
    reduction = await call(x)
    return replace(reduction, ranks=tuple((rank + 1) % comm.size for rank in reduction.ranks))


async def says_it_is_in_time(call, comm, x):
    return replace(await call(x), lag=0)


async def inverts_included(call, comm, x):
    reduction = await call(x)
    return replace(reduction, included=not reduction.included)


async def counts_one_too_many(call, comm, x):
    reduction = await call(x)
    return replace(reduction, active=reduction.active + 1)


async def counts_one_too_many_at_one_rank(call, comm, x):
    return await (counts_one_too_many if comm.rank == 1 else honest)(call, comm, x)


async def names_itself_alone(call, comm, x):
    return replace(await call(x), group=(comm.rank,))


async def opens_for_the_first(call, comm, x):
    return await comm.solo_allreduce(x, **{key: call.keywords[key] for key in ("sync_every", "sync_offset", "history")})


async def begins_at_once(call, comm, x):
    register_policy("at once", lambda view: True)
    return await call(x, policy="at once")


async def waits_for_all(call, comm, x):
    return await comm.quorum_allreduce(x, quorum=comm.size, **call.keywords)


async def never_waits(call, comm, x):
    return await call(x, sync_every=12)


async def says_nothing_of_synchrony(call, comm, x):
    return replace(await call(x), synchronous=False)


async def reverses_history(call, comm, x):
    reduction = await call(x)
    return replace(reduction, missed=reduction.missed[::-1])


async def forgets_what_it_skipped(call, comm, x):
    return replace(await call(x), skipped=0)


async def hangs(call, comm, x):
    await asyncio.get_running_loop().create_future()


LIES = [
    ("completion", "solo", hangs),
    ("agreement", "quorum", alters_the_result_at_one_rank),
    ("agreement", "solo", counts_one_too_many_at_one_rank),
    ("agreement", "group", names_itself_alone),
    ("wholeness", "majority", forgets_a_bucket),
    ("exactly_once", "solo", adds_it_twice),
    ("exactly_once", "candidates", gives_the_last_one_again),
    ("conservation", "majority", drops_a_contribution),
    ("staleness", "solo", never_waits),
    ("staleness", "group", never_waits),
    ("inclusion", "quorum", inverts_included),
    ("contributors", "solo", counts_one_too_many),
    ("contributors", "quorum", names_another_contributor),
    ("lag", "solo", says_it_is_in_time),
    ("quorum", "quorum", opens_for_the_first),
    ("drawn_ranks", "majority", opens_for_the_first),
    ("drawn_ranks", "candidates", opens_for_the_first),
    ("permission", "policy", begins_at_once),
    ("synchrony", "full", says_nothing_of_synchrony),
    ("history", "solo", reverses_history),
    ("history", "group", forgets_what_it_skipped),
    ("liveness", "solo", waits_for_all),
    ("one_each", "group", gives_the_last_one_again),
    ("never_back", "group", goes_back_at_times),
    ("newest", "group", gives_an_old_one),
]


@pytest.fixture
def spread(monkeypatch):
    """Replaces the method of a kind by one that changes its arguments or results."""

    def install(kind, lie):
        method = f"{ {'full': 'quorum', 'candidates': 'majority'}.get(kind, kind) }_allreduce"
        truth = getattr(Communicator, method)
        monkeypatch.setattr(Communicator, method, lambda comm, x, **rules: lie(partial(truth, comm, **rules), comm, x))

    return install


def breaches(kind, size=5, seeds=100):
    for seed in range(seeds):
        try:
            check_laws(kind, size, seed)
        except LawBroken as broken:
            yield seed, broken


@pytest.mark.parametrize(("law", "kind", "lie"), LIES, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_breaks_its_law(law, kind, lie, spread):
    spread(kind, lie)
    seed, broken = next((seed, broken) for seed, broken in breaches(kind) if broken.law == law)
    assert str(broken).startswith(f"{law} is broken: ")
    assert broken.replay == f"asyncoll laws --kind {kind} --sizes 5 --seed {seed}"
    assert (broken.round is None) == (broken.rank is None) == (law == "completion")


def test_a_join_that_tells_nothing_of_lost_rounds_breaks_its_law(monkeypatch):
    """Those of calls that were given up after a newer answer, which no further call has told of."""
    monkeypatch.setattr("asyncoll.algorithms.rounds.engine.Engine.end", lambda engine: (engine.aim - 1, 0))
    assert "farewell" in {broken.law for _, broken in breaches("solo", 1, seeds=200)}


def test_a_cancelled_call_may_have_taken_part_in_a_synchronous_round():
    """The answer of the cancelled call was in flight, so in its caller's view the next call aims before that round."""
    case = replace(draw("solo", 1, 0), sync_every=3)

    def told(index, aim, number, holds):
        total = np.zeros((1, case.calls, 1), np.int64)
        total[0, holds] = 1
        return MadeCall(0, index, aim, total, (), Reduction(number, 1, index in holds, 0, False), 0.0, True)

    calls = [told(1, 1, 4, []), told(2, 5, 5, [1, 2])]  # and call 0, given up, was in round 3
    assert not list(staleness(Story(case, [calls], [Cancelled(0, 0, 1, 1)])))
    assert [breach.what for breach in staleness(Story(case, [calls], []))] == [
        "its contribution of call 1 entered round 5, and was due by round 3"
    ]


def test_only_a_round_that_a_cancelled_call_has_waited_for_may_be_returned_by_no_call():
    case = replace(draw("solo", 1, 0), sync_every=6, rounds=6)

    def told(index, number):
        total = np.zeros((1, case.calls, 1), np.int64)
        total[0, index] = 1
        return MadeCall(0, index, number, total, (), Reduction(number, 1, True, 0, False), 0.0, True)

    def missing(number, *turns):
        """Breaches if no call returned the round `number`, and a call with each of these `turns` was cancelled."""
        calls = [told(index, each) for index, each in enumerate({1, 2, 3, 4, 5, 6} - {number})]
        cancelled = [Cancelled(0, 5 + index, turn, turn, unsure=True) for index, turn in enumerate(turns)]
        return [(breach.round, breach.what) for breach in conservation(Story(case, [calls], cancelled))]

    assert not missing(3, 3)
    assert not missing(3, 2)
    assert missing(3) == missing(3, 4) == missing(3, 5, 6) == [(3, "no call returned it")]


def test_a_rank_contributes_to_a_synchronous_round_although_its_call_is_cancelled():
    case = replace(draw("solo", 2, 0), sync_every=1, rounds=2)

    def told(rank, index, number, ranks):
        total = np.zeros((1, case.calls, 2), np.int64)
        total[0, index, ranks] = 1
        included = rank in ranks
        return MadeCall(rank, index, number, total, (), Reduction(number, len(ranks), included, 0, True), 0.0, True)

    def breaches(first_round):
        calls = [[told(0, 0, 1, first_round), told(0, 1, 2, [0, 1])], [told(1, 1, 2, [0, 1])]]
        return [(each.round, each.rank) for each in synchrony(Story(case, calls, [Cancelled(1, 0, 1, 1)]))]

    assert not breaches([0, 1])
    assert breaches([0]) == [(1, 1)]


def test_every_law_is_broken_by_a_fault():
    laws = {law.__name__ for kind in KINDS for law in laws_of(kind)}
    assert laws | {"completion"} == {law for law, _, _ in LIES} | {"farewell"}  # which has a test of its own


async def hides_its_update(call, rank):
    x = await call
    x[...] /= 2
    return x


async def changes_with_an_update(call, rank):
    x = await call
    held = np.flatnonzero(x)
    if len(held) % 2 and x[held[0]] < 1:
        x[held[0]] /= 2
    return x


async def loses_an_update(call, rank):
    x = await call
    x[np.flatnonzero(x)[:1]] = 0
    return x


async def names_itself(call, rank):
    await call
    return rank


async def waits_for_the_trainer(call, rank):
    partner = await call
    await asyncio.sleep(NAP_S)
    return partner


async def never_ends(call, rank):
    call.close()
    await asyncio.get_running_loop().create_future()


GOSSIP_LIES = [
    ("read", "update", hides_its_update),
    ("alone", "update", changes_with_an_update),
    ("whole", "close", loses_an_update),
    ("pairs", "exchange", names_itself),
    ("prompt", "exchange", waits_for_the_trainer),
    ("completion", "exchange", never_ends),
]


@pytest.mark.parametrize(("law", "method", "lie"), GOSSIP_LIES, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_breaks_its_law_of_gossip(law, method, lie, monkeypatch):
    truth = getattr(Gossip, method)
    monkeypatch.setattr(Gossip, method, lambda gossip, *x: lie(truth(gossip, *x), gossip._rank))
    broken = next(broken for _, broken in breaches(GOSSIP) if broken.law == law)
    assert (broken.round, broken.rank is None) == ((None, True) if law == "completion" else (0, False))


def test_every_law_of_gossip_is_broken_by_a_fault():
    assert {law.__name__ for law in gossip.LAWS} | {"completion"} == {law for law, _, _ in GOSSIP_LIES}


async def gives_an_element_more(call, comm, x):
    result = await call
    result.reshape(-1)[:1] += 1
    return result


async def rounds_differently_at_one_rank(call, comm, x):
    result = await call
    if comm.rank == 1 and isinstance(result, np.ndarray) and result.dtype == np.float64:
        result[...] = np.nextafter(result, np.inf)
    return result


async def scribbles(call, comm, x):
    result = await call
    x[...] = 1
    return result


async def leaves_early(call, comm):
    asyncio.ensure_future(call).add_done_callback(lambda task: task.cancelled() or task.exception())


async def counts_twice(call, comm, x):
    reduction = await call
    x *= 2
    return reduction


async def goes_on_when_cancelled(call, comm, x):
    return await asyncio.shield(call)


async def blocks(call, comm, x):
    call.close()
    await asyncio.get_running_loop().create_future()


async def is_never_dropped(call, comm, x):
    comm.kept = [*getattr(comm, "kept", ()), await call]
    return comm.kept[-1]


DENSE_LIES = [
    ("formula", "allreduce", gives_an_element_more),
    ("agreement", "allreduce", rounds_differently_at_one_rank),
    ("once", "allgather", scribbles),
    ("meeting", "barrier", leaves_early),
    ("conservation", "solo_allreduce", counts_twice),
    ("ending", "allreduce", goes_on_when_cancelled),
    ("oblivion", "split", is_never_dropped),
    ("farewell", "recv", gives_an_element_more),
    ("completion", "gather", blocks),
]


@pytest.mark.parametrize(("law", "method", "lie"), DENSE_LIES, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_breaks_its_law_of_dense_calls(law, method, lie, monkeypatch):
    truth = getattr(Communicator, method)
    monkeypatch.setattr(Communicator, method, lambda comm, *x, **rest: lie(truth(comm, *x, **rest), comm, *x[:1]))
    broken = next(broken for _, broken in breaches(DENSE) if broken.law == law)
    assert (broken.round, broken.rank is None) == ((None, True) if law == "completion" else (0, False))


def test_every_law_of_dense_calls_is_broken_by_a_fault():
    assert {law.__name__ for law in dense.LAWS} | {"completion"} == {law for law, _, _ in DENSE_LIES}


def test_the_drawn_programs_have_all_operations_on_hosts_of_all_kinds():
    cases = [draw(DENSE, size, seed) for size in (2, 5, 9) for seed in range(40)]
    calls = [call for case in cases for call in DenseProgram(case).calls]
    assert {call.operation for call in calls} == set(OPERATIONS)
    assert {call.dtype for call in calls} == set(DTYPES)
    assert {len(set(case.hosts)) for case in cases} == {1, 2, 3, 4, 5}
    assert {case.bare is None for case in cases} == {case.impatient is None for case in cases} == {True, False}


async def counts_one_rank_twice(comm, x, *rest):
    await TRUE_ALLREDUCE(comm, x, *rest)
    x[-1] *= 2
    x[0] *= 2
    return x


async def gives_up(comm):
    raise EvictedError("here")


def forgets(store, name, entry):
    return entry


TRUE_ALLREDUCE = Communicator.allreduce
EPOCHS_FAULTS = [
    ("whole", Communicator, "allreduce", counts_one_rank_twice),
    ("survival", Communicator, "shrink", gives_up),
    ("agreed", MemoryStore, "compare_and_set", forgets),
]


@pytest.mark.parametrize(("law", "owner", "name", "fault"), EPOCHS_FAULTS)
def test_a_fault_breaks_its_law_of_epochs(law, owner, name, fault, monkeypatch):
    monkeypatch.setattr(owner, name, fault)
    assert any(broken.law == law for _, broken in breaches(EPOCHS))


def test_a_rank_that_goes_back_breaks_a_law():
    program = EpochsProgram(draw(EPOCHS, 3, 0))
    parts = [EpochsPart([(1, [0, 1, 2]), (3, [0, 1]), (2, [0, 1])])]
    assert [*forward(WorldStory(program, parts, 0, 0))]
    assert [*forward(WorldStory(program, [EpochsPart([(1, [0, 1]), (2, [0, 1, 2])])], 0, 0))]
    assert not [*forward(WorldStory(program, [EpochsPart([(1, [0, 1, 2]), (2, [0, 1])])], 0, 0))]


async def blames_nobody(call, comm, x):
    try:
        return await call
    except NonFiniteError as error:
        error.ranks = ()
        raise


async def has_another_sum(call, comm, x):
    reduction = await call
    if comm.rank == 1:
        reduction.values[:1] += 1
    return reduction


async def clears_too_much(call, comm, x):
    reduction = await call
    x.reshape(-1)[:1] = 0
    return reduction


async def counts_one_more(call, comm, x):
    reduction = await call
    return replace(reduction, selected=reduction.selected + 1)


async def doubles_the_sum(call, comm, x):
    reduction = await call
    return replace(reduction, values=2 * reduction.values)


SPARSE_LIES = [
    ("refusal", blames_nobody),
    ("agreement", has_another_sum),
    ("residual", clears_too_much),
    ("choice", counts_one_more),
    ("conservation", doubles_the_sum),
    ("completion", blocks),
]


@pytest.mark.parametrize(("law", "lie"), SPARSE_LIES, ids=lambda value: getattr(value, "__name__", value))
def test_a_fault_breaks_its_law_of_sparse_calls(law, lie, monkeypatch):
    method = "sparse_allreduce"
    truth = getattr(Communicator, method)
    monkeypatch.setattr(Communicator, method, lambda comm, x, **options: lie(truth(comm, x, **options), comm, x))
    broken = next(broken for _, broken in breaches(SPARSE) if broken.law == law)
    assert (broken.rank is None) == (law == "completion")


def test_every_law_of_sparse_calls_is_broken_by_a_fault():
    assert {law.__name__ for law in sparse.LAWS} | {"completion"} == {law for law, _ in SPARSE_LIES}


def test_the_drawn_sparse_worlds_have_all_algorithms_and_dtypes():
    drawn = [each for seed in range(100) for each in SparseProgram(draw(SPARSE, 5, seed)).operations]
    assert {each.algorithm for each in drawn} == set(ALGORITHMS)
    assert {each.dtype for each in drawn} == {"float64", "float32", "float16", "bfloat16"}
    assert {0, 1} < {each.count for each in drawn}
    assert {any(each.culprits) for each in drawn} == {True, False}


def test_a_real_transport_is_named_in_the_replay(spread):
    spread("solo", inverts_included)
    with pytest.raises(LawBroken, match="replay: asyncoll laws --kind solo --sizes 2 --seed 0 --transport inproc"):
        check_laws("solo", 2, 0, transport="inproc")


async def touches_the_memory_of_a_device(call, comm, x):
    if not isinstance(x, np.ndarray):
        x.add_(1)
    return await call(x)


def test_a_hazard_of_a_device_breaks_a_law(spread):
    spread("solo", touches_the_memory_of_a_device)
    seed = next(seed for seed in range(9) if draw("solo", 3, seed).on_devices and draw("solo", 3, seed).buckets == 1)
    check_laws("solo", 3, seed)
    with pytest.raises(LawBroken, match=f"(?s)Hazard: fake:.* memory of a tensor.*--seed {seed} --devices") as broken:
        check_laws("solo", 3, seed, devices=True)
    assert broken.value.law == "completion"


@pytest.fixture
def temporary(monkeypatch, tmp_path):
    """Sets the folder for temporary files, and checks that it is empty afterwards."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_forged_record_of_a_process_is_noticed(monkeypatch, temporary):
    def run_and_forge(arguments):
        run_job(arguments)
        record = Path(arguments[-3]) / "rank-1.npz"
        calls, *rest = read_record(record, "solo")
        forged = replace(calls[0].reduction, included=not calls[0].included)
        calls[0] = replace(calls[0], reduction=forged)
        write_record(record, (calls, *rest))

    run_job = case_runs._run_job
    monkeypatch.setattr(case_runs, "_run_job", run_and_forge)
    with pytest.raises(LawBroken) as broken:
        check_laws("solo", 2, 0, transport="shm-processes")
    assert (broken.value.law, broken.value.rank) == ("inclusion", 1)
    assert broken.value.replay == "asyncoll laws --kind solo --sizes 2 --seed 0 --transport shm-processes"


@pytest.mark.slow
def test_the_error_of_a_failed_process_is_shown(monkeypatch, temporary):
    monkeypatch.setattr("asyncoll.testing.laws.draw", lambda *of: replace(draw(*of), seed=-1))  # which its ranks refuse
    with pytest.raises(LawBroken, match=r"rank \d failed: .*seeds count from 0.*\n  replay: ") as broken:
        check_laws("solo", 2, 0, transport="zmq-processes")
    assert broken.value.law == "completion"
    assert "Traceback" not in str(broken.value)


@pytest.mark.slow
def test_the_output_of_a_killed_process_is_shown(monkeypatch, temporary):
    monkeypatch.setattr(case_runs, "_TIMEOUT_S", 1e-3)
    with pytest.raises(LawBroken, match=r"(?s)the job failed with exit code 124:\n.*replay: "):
        check_laws("solo", 2, 0, transport="zmq-processes")


@pytest.mark.parametrize("kind", [DENSE, SPARSE])
def test_a_record_keeps_the_bits_of_calls(kind, tmp_path):
    part = tell(draw(kind, 3, 1), SIMULATED).parts[0]
    write_record(tmp_path / "record", part)
    np.testing.assert_equal(asdict(read_record(tmp_path / "record", kind)), asdict(part))


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_keeps_all_that_the_laws_need(kind, tmp_path):
    story = tell(draw(kind, 5, 1), SIMULATED)
    for calls in story.calls:
        given_up = [each for each in story.cancelled if each.rank == calls[0].rank]
        joined = [each for each in story.joined if each.rank == calls[0].rank]
        write_record(tmp_path / "record", (calls, given_up, joined))
        calls_again, given_up_again, joined_again = read_record(tmp_path / "record", kind)
        np.testing.assert_equal([*map(asdict, calls_again)], [*map(asdict, calls)])
        assert (given_up_again, joined_again) == (given_up, joined)


# -- the command -----------------------------------------------------------------------------------


def run(*arguments):
    return CliRunner().invoke(main, ["laws", *arguments])


def test_a_failing_seed_prints_the_command_that_replays_it(spread, in_this_process):
    spread("solo", reverses_history)
    swept = run("--kind", "solo", "--sizes", "2-6", "--seeds", "0:30", "--jobs", "1")
    assert swept.exit_code == 1
    assert "laws broken in" in swept.output
    first = swept.output.index("history is broken")
    failure = swept.output[first : swept.output.index("\n", swept.output.index("replay: "))]
    replay = failure.partition("replay: ")[2].split()
    assert replay[:2] == ["asyncoll", "laws"]
    again = run(*replay[2:])
    assert again.exit_code == 1
    assert failure in again.output
    spread("solo", reverses_history)  # reversed twice is right
    assert run(*replay[2:]).exit_code == 0


def test_sizes_and_kinds():
    assert RankCounts().convert("1-3,7,12-12", None, None) == [1, 2, 3, 7, 12]
    assert Kinds().convert("solo,dense,solo", None, None) == ["solo", "dense"]
    assert Kinds().convert("all", None, None) == list(ALL_KINDS)


@pytest.mark.parametrize("wrong", [["--kind", "duo"], ["--sizes", "x"]], ids=" ".join)
def test_wrong_options_are_refused_before_numpy_is_imported(wrong):
    code = "import sys; from asyncoll.cli import main; sys.exit(main(standalone_mode=False))"
    program = f"import sys\ntry:\n    {code}\nfinally:\n    print([*sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program, "laws", *wrong], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode != 0
    assert wrong[1] in done.stderr
    assert not {"'numpy'", "'torch'", "'asyncoll.testing'"} & set(done.stdout.strip("[]\n").split(", "))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kind", "duo"], "'--kind': unknown kind 'duo': use all, or some of solo, "),
        (["--sizes", "3,x"], "'x' is no number of ranks"),
        (["--sizes", "0-4"], "'0-4' is no number of ranks"),
        (["--sizes", "4-2"], "'4-2' is no number of ranks"),
        (["--sizes", ""], "'' is no number of ranks"),
        (["--seeds", "5:5"], "'5:5' are no seeds"),
        (["--seeds", "-1:5"], "'-1:5' are no seeds"),
        (["--seed", "1", "--seeds", "0:5"], "give --seed or --seeds, not both"),
        (["--seed", "-1"], "'--seed'"),
        (["--jobs", "0"], "'--jobs'"),
        (["--transport", "tcp"], "'--transport'"),
    ],
)
def test_bad_arguments(arguments, complaint):
    done = run(*arguments)
    assert done.exit_code == 2
    assert complaint in done.output


def test_bad_arguments_of_the_checker():
    with pytest.raises(UsageError, match="unknown kind 'duo'"):
        check_laws("duo", 2, 0)
    for size, seed in [(0, 0), (2, -1)]:
        with pytest.raises(UsageError, match="at least one rank, and seeds count from 0"):
            check_laws("solo", size, seed)


async def takes_nothing(truth, sgd):
    """As if the state of another rank were there."""
    return sgd.round < sgd._due.needed


async def says_that_it_recovered(truth, sgd):
    await truth(sgd)
    return True


async def doubles_a_gradient(truth, sgd, weight):
    sgd._flat.gradients.mul_(2)
    return await truth(sgd, weight)


async def loses_a_gradient(truth, sgd, weight):
    if sgd.round % 3 == 1:
        sgd._flat.zero_gradients()
    return await truth(sgd, weight)


async def sleeps(truth, sgd, weight):
    await asyncio.sleep(NAP_S)
    return await truth(sgd, weight)


async def gives_nothing(truth, recovery, needed):
    await asyncio.get_running_loop().create_future()


def says_more(truth, metrics):
    return {key: value + 0.5 for key, value in truth(metrics).items()}


def drops_a_result(truth, due, *heard):
    """At a rank that has missed some."""
    truth(due, *heard)
    if len(due._results) > 1:
        due._results.pop()


TRAINING_LIES = [
    ("equal", EagerSGD, "_recover", takes_nothing),
    ("equal", Due, "hear", drops_a_result),
    ("once", EagerSGD, "_update", doubles_a_gradient),
    ("whole", EagerSGD, "_update", loses_a_gradient),
    ("recovery", EagerSGD, "_recover", says_that_it_recovered),
    ("prompt", EagerSGD, "_update", sleeps),
    ("metrics", Metrics, "means", says_more),
    ("completion", Recovery, "give", gives_nothing),
]


@pytest.mark.parametrize(
    ("law", "kind", "method", "lie"), TRAINING_LIES, ids=lambda value: getattr(value, "__name__", value)
)
def test_a_fault_breaks_its_law_of_training(law, kind, method, lie, monkeypatch):
    truth = getattr(kind, method)

    async def lies(self, *x):
        return await lie(truth, self, *x)

    is_plain = method in ("means", "hear")
    monkeypatch.setattr(kind, method, (lambda self, *x: lie(truth, self, *x)) if is_plain else lies)
    broken = next(broken for _, broken in breaches(TRAINING) if broken.law == law)
    assert (broken.rank is None) == (law == "completion")


def test_every_law_of_training_is_broken_by_a_fault():
    assert {law.__name__ for law in training.LAWS} | {"completion"} == {law for law, *_ in TRAINING_LIES}


@pytest.mark.parametrize("transport", [SIMULATED, MEMORY, HOSTS])
def test_the_drawn_trainings_recover_with_metrics_and_cancelled_steps(transport):
    """Of one late rank, of several, and of all but one."""
    missing = {"one rank", "all but one", "metrics", "cancelled", "solo", "majority", "quorum"}
    for seed, size in itertools.product(range(12), (2, 3, 5)):
        missing -= what_trainings_show(tell(draw(TRAINING, size, seed), transport))
        if not missing:
            break
    assert not missing


def what_trainings_show(story):
    late = sum(any(done.recovered for done in part.done) for part in story.parts)
    shown = {
        "one rank": late == 1,
        "all but one": late >= len(story.parts) - 1 > 1,
        "metrics": any(done.recovered and done.metrics for part in story.parts for done in part.done),
        "cancelled": any(len(part.made) >= len(part.done) for part in story.parts),
        story.program.partial: True,
    }
    return {what for what, is_there in shown.items() if is_there}


async def leaves_at_once(truth, departures, reason):
    """So the end of the connection may come before the reason."""


def tells_another_reason(truth, failures, communicator, members, reason):
    truth(failures, communicator, members, "something has happened")


def names_itself(truth, departures, reason):
    """Also where it leaves because another rank has left."""
    cause, _ = truth(departures, reason)
    return cause, departures._router.rank


@pytest.mark.parametrize(
    ("kind", "method", "lie"),
    [
        (Departures, "part_from_others", leaves_at_once),
        (Departures, "told", names_itself),
        (Failures, "abort", tells_another_reason),
    ],
)
def test_a_program_that_raises_without_its_reason_breaks_the_law(kind, method, lie, monkeypatch):
    truth = getattr(kind, method)
    monkeypatch.setattr(kind, method, lambda self, *x: lie(truth, self, *x))
    broken = next(broken for _, broken in breaches(ENDING) if broken.law == "root_cause")
    assert broken.rank is not None


def test_a_rank_that_does_not_hear_of_an_exception_breaks_the_law():
    story = tell(draw(ENDING, 3, 0), SIMULATED)
    story.parts[:] = [replace(part, error="") for part in story.parts]
    assert len(list(ending.heard(story))) == 3 - sum(part.raised for part in story.parts) > 0


@pytest.mark.parametrize("transport", [SIMULATED, MEMORY, HOSTS])
def test_the_drawn_ends_are_before_and_beside_calls_and_of_two_ranks(transport):
    stories = [tell(draw(ENDING, size, seed), transport) for size in (2, 3, 5) for seed in range(12)]
    raised = [[rank for rank, part in enumerate(story.parts) if part.raised] for story in stories]
    assert {len(ranks) for ranks in raised} == {1, 2}
    raisers = [story.program.raisers[rank] for ranks, story in zip(raised, stories, strict=True) for rank in ranks]
    assert {raiser.beside for raiser in raisers} == {raiser.sends_to is None for raiser in raisers} == {False, True}
