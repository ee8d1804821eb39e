"""The round player: its rounds are those of the library, and a reader can follow a gradient into its round."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By

from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.testing import Network, simulate
from screen_tests.conftest import ROOT

PLAYER = (ROOT / "docs" / "assets" / "player.js").read_text()
RUN = (
    PLAYER
    + "\nreturn arguments[0].map(({table, ...world}) => playRounds({...world, drawn: (n) => table[n - 1]}).calls)"
)
RULES = ("solo", "majority", "quorum", "all")
STEPS = 25


def draw(seed: int) -> dict[str, object]:
    """The world of `seed`, as the player takes it."""
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, 9))
    quorum, candidates = (int(number) for number in generator.integers(1, size + 1, 2))
    steps = (0.2 + generator.exponential(0.3, (size, STEPS))).tolist()
    operation = Operation("x", (), ReduceOp.SUM, Opening.MAJORITY, candidates=candidates)
    table = [operation.drawn(number, size) for number in range(1, size * STEPS + 2)]
    return {"rule": RULES[seed % 4], "quorum": quorum, "candidates": candidates, "steps": steps, "table": table}


def simulated(world: dict[str, object]) -> tuple[float, list[tuple[object, ...]]]:
    """When the first rank has made its steps, and the calls that have ended until then."""
    rule, steps = world["rule"], world["steps"]

    async def main(comm):
        calls = []
        for step, seconds in enumerate(steps[comm.rank]):
            await asyncio.sleep(seconds)
            x = np.zeros(1)
            match rule:
                case "solo":
                    reduction = await comm.solo_allreduce(x)
                case "majority":
                    reduction = await comm.majority_allreduce(x, candidates=world["candidates"])
                case _:
                    quorum = comm.size if rule == "all" else world["quorum"]
                    reduction = await comm.quorum_allreduce(x, quorum=quorum)
            end = asyncio.get_running_loop().time()
            told = (reduction.round, reduction.active, reduction.lag, reduction.included)
            calls.append((end, comm.rank, step, *told))
        return calls

    ranks = simulate(len(steps), main, Network(latency_s=0.0), shared_memory=True).results
    first_end = min(calls[-1][0] for calls in ranks)
    return first_end, [call[1:] for calls in ranks for call in calls if call[0] < first_end]


def test_rounds_are_those_of_the_library_for_200_seeds(browser):
    worlds = [draw(seed) for seed in range(200)]
    for seed, (world, calls) in enumerate(zip(worlds, browser.execute_script(RUN, worlds), strict=True)):
        first_end, expected = simulated(world)
        played = [call for call in calls if call["end"] < first_end - 1e-9]
        names = ("rank", "step", "round", "active", "lag", "included")
        assert sorted(tuple(call[name] for name in names) for call in played) == sorted(expected), f"seed {seed}"


@pytest.mark.parametrize("page", ["index.html", "concepts/rounds.html"])
def test_a_reader_plays_rounds_and_follows_a_gradient(browser, site, page):
    browser.get(f"{site}/{page}")
    player = browser.find_element(By.CLASS_NAME, "player")
    buttons = player.find_elements(By.TAG_NAME, "button")
    facts = player.find_element(By.CLASS_NAME, "player-facts")
    assert "no round yet" in facts.text
    for _ in range(3):
        buttons[1].click()
    assert "3 rounds" in facts.text
    assert "in exactly one round each" in facts.text
    gradient = player.find_element(By.CSS_SELECTOR, ".step")
    ActionChains(browser).move_to_element(gradient).perform()
    assert "in round 1, with 3 of 4 ranks" in facts.text
    assert len(player.find_elements(By.CSS_SELECTOR, "line.followed")) == 1
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
