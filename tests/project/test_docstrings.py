"""Every example in the docstring of a public name runs.

An example is a block that is indented below an empty line, or a fenced block of Python. One that uses `comm` runs at
`RANKS` ranks on one loop. One that calls `asyncoll.run` or `asyncoll.connect` is a world of one rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import re
import textwrap
from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import torch

import asyncoll
from asyncoll import rpc, testing
from tests.support.cases import case

RANKS = 2
BLOCK = re.compile(r"^\n(?P<indented>(?: {4}[^\n]*\n|\n(?= {4}))+)|^```python\n(?P<fenced>.*?)^```", re.M | re.S)
# Definitions that the docstring leaves to the program around its example.
BEFORE = {
    "asyncoll.Communicator.abort": "load = range",
    "asyncoll.deadline": "x = np.ones(3)",
    "asyncoll.flatten": """
        model, batches = torch.nn.Linear(3, 1), torch.ones(2, 5, 3)
        loss = lambda model, batch: model(batch).sum()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    """,
    "asyncoll.offload": "train_step, model, batch = (lambda model, batch: model * batch), 2.0, 3.0",
    "asyncoll.rpc.Rpc.proxy": """
        class Model:
            async def evaluate(self, batch: torch.Tensor) -> float:
                return float(batch.mean())

        comm.rpc.register(Model())
        await comm.barrier()
        batch = torch.ones(3)
    """,
    "asyncoll.rpc.Rpc.stream": """
        @comm.rpc.register
        async def batches(count: int) -> AsyncIterator[int]:
            for number in range(count):
                yield number

        await comm.barrier()
    """,
}
# These examples run in tests of their own.
SERVICE = {"asyncoll.rpc.connect", "asyncoll.rpc.serve"}
LOSS = "asyncoll.testing.fault"


def documented(module) -> Iterator[tuple[str, object]]:
    """The public names of a module, and those of its classes, that have a docstring."""
    yield module.__name__, module
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isroutine(value):
            yield f"{module.__name__}.{name}", value
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            if not attribute.startswith("_"):
                yield f"{module.__name__}.{name}.{attribute}", member


def examples_in(docstring: str) -> list[str]:
    found = BLOCK.finditer(inspect.cleandoc(docstring) + "\n")
    return [textwrap.dedent(block["indented"] or block["fenced"]) for block in found]


EXAMPLES = [
    (name, source)
    for module in (asyncoll, rpc, testing)
    for name, value in documented(module)
    for source in examples_in(inspect.getdoc(value) or "")
]


def coroutine(name: str, source: str):
    """An async function of `comm` that runs the example after the definitions it needs."""
    body = textwrap.dedent(BEFORE.get(name, "")) + "\n" + source
    scope = {"asyncio": asyncio, "asyncoll": asyncoll, "np": np, "torch": torch, "AsyncIterator": AsyncIterator}
    exec(f"async def example(comm):\n{textwrap.indent(body, '    ')}", scope)
    return scope["example"]


def run_example(name: str, source: str) -> str:
    """Run an example. Returns its output."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        if "asyncoll.run(" in source:
            exec(source, {"asyncoll": asyncoll, "np": np, "torch": torch})
        elif "asyncoll.connect(" in source:
            asyncio.run(coroutine(name, source)(None))
        else:
            testing.run_ranks(RANKS, coroutine(name, source))
    return out.getvalue()


def test_examples_run():
    for name, source in EXAMPLES:
        if name not in SERVICE | {LOSS}:
            with case(name=name):
                run_example(name, source)


def test_a_service_and_its_client(tmp_path):
    ends = {name: source.replace("/run/user/1000", str(tmp_path)) for name, source in EXAMPLES if name in SERVICE}
    assert all(str(tmp_path) in source for source in ends.values())

    is_served = (tmp_path / "adder.socket").exists

    async def main():
        service = asyncio.create_task(coroutine("serve", ends["asyncoll.rpc.serve"])(None))
        while not is_served():
            await asyncio.sleep(0)
        await coroutine("connect", ends["asyncoll.rpc.connect"])(None)
        service.cancel()
        await asyncio.wait([service])
        assert service.cancelled()

    asyncio.run(main())


def test_a_fault_is_noticed():
    (source,) = (source for name, source in EXAMPLES if name == LOSS)
    before = "from asyncoll.testing import Kill, fault\nx = np.ones(3)\n"
    with pytest.raises(asyncoll.PeerLostError) as lost:
        testing.simulate(3, coroutine(LOSS, before + source))
    assert lost.value.rank == 2


def test_every_example_is_found_and_a_faulty_one_is_noticed():
    found = {name for name, _ in EXAMPLES}
    announced = {name for name, value in documented(asyncoll) if "\nExample:\n" in (inspect.getdoc(value) or "")}
    assert announced <= found
    assert {*BEFORE, *SERVICE, LOSS} <= found
    (faulty,) = examples_in("Text.\n\nExample:\n\n    x = await comm.allreduce(np.ones(3))\n\n    assert x[0] == 3\n")
    with pytest.raises(AssertionError):
        run_example("faulty", faulty)
