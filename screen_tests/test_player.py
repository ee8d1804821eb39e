"""The round player: its rounds are those of the library, and a reader can follow a gradient into its round."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter

import numpy as np
import pytest
from selenium.webdriver import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from asyncoll.algorithms.rounds.operation import Opening, Operation
from asyncoll.tensors.reductions import ReduceOp
from asyncoll.testing import Cut, Network, simulate
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


# -- records -------------------------------------------------------------------------------------

KINDS = ("solo", "majority", "quorum", "group", "allreduce", "sparse", "rpc")


def write_record(kind, size, seed, file):
    """A record of a world in which calls of `kind` meet late ranks. Returns its lines, without the first."""

    async def main(comm):
        draw = np.random.default_rng((seed, comm.rank))

        @comm.rpc.register
        def double(number: int) -> int:
            return 2 * number

        for _ in range(4):
            await asyncio.sleep(draw.exponential(1e-3))
            x = draw.standard_normal(50)
            match kind:
                case "sparse":
                    await comm.sparse_allreduce(x, density=0.1)
                case "rpc":
                    await comm.rpc.call((comm.rank + 1) % comm.size, "double", 2)
                case "allreduce":
                    await comm.allreduce(x)
                case "group":
                    await comm.group_allreduce(x, group_size=2 if comm.size > 1 else 1)
                case _:
                    await getattr(comm, f"{kind}_allreduce")(x)

    network = Network(latency_s=1e-4, jitter_s=1e-4, faults=[Cut(0, 1, 0.5e-3, 1e-3)] if size > 1 else ())
    simulate(size, main, network, seed, record=file)
    return [json.loads(line) for line in file.read_text().splitlines()[1:]]


def counts(messages, time):
    departed = [message for message in messages if message["departs_s"] <= time]
    return {
        "departed": len(departed),
        "arrived": sum(message["arrives_s"] is not None and message["arrives_s"] <= time for message in departed),
        "bytes": sum(message["bytes"] for message in departed),
        "kinds": dict(Counter(message["kind"] for message in departed)),
        "calls": len({message["call"] for message in departed if message["call"] and not message["round"]}),
        "rounds": len({(message["call"], message["round"]) for message in departed if message["round"]}),
    }


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17])
def test_the_counts_of_a_record_are_those_of_its_file(browser, tmp_path, size):
    file = tmp_path / "world.jsonl"
    for seed, kind in enumerate(KINDS):
        messages = write_record(kind, size, seed + size, file)
        end = max((message["arrives_s"] or 0 for message in messages), default=0)
        times = [0, end / 3, end / 2, end]
        script = "\nconst record = parseRecord(arguments[0]); return arguments[1].map((t) => countRecord(record, t))"
        assert browser.execute_script(PLAYER + script, file.read_text(), times) == [counts(messages, t) for t in times]


@pytest.fixture
def player(browser, site):
    browser.get(f"{site}/howto/simulation.html")
    return browser.find_element(By.CLASS_NAME, "player")


def replayed(browser, player):
    """The text with the counts, at the end of the record."""
    slider = player.find_element(By.CSS_SELECTOR, "input[type=range]")
    browser.execute_script(
        "arguments[0].value = arguments[0].max; arguments[0].dispatchEvent(new Event('input'))", slider
    )
    return player.find_element(By.CLASS_NAME, "player-facts").text


def shown(messages):
    found = counts(messages, float("inf"))
    kinds = ", ".join(f"{found['kinds'][kind]} {kind}" for kind in sorted(found["kinds"]))
    of_kinds = f" ({kinds})" if kinds else ""
    return (
        f"{len(messages)} of {len(messages)} messages have departed{of_kinds}, {found['arrived']} have arrived; "
        f"{found['bytes']} bytes, {found['calls']} calls, {found['rounds']} rounds."
    )


def wait_for(player, text):
    WebDriverWait(player, 10).until(lambda _: text in player.find_element(By.CLASS_NAME, "player-facts").text)


def test_a_reader_replays_a_record(browser, player, tmp_path):
    """By the file chooser, and by dropping the file on the player. Nothing leaves the page."""
    file = tmp_path / "world.jsonl"
    chooser = player.find_element(By.CSS_SELECTOR, "input[type=file]")
    for seed, size in enumerate((1, 3, 13)):
        messages = write_record("quorum", size, seed, file)
        chooser.send_keys(str(file))
        wait_for(player, "have departed")
        assert shown(messages) in replayed(browser, player)
        assert len(player.find_elements(By.CSS_SELECTOR, ".message")) == len(messages)
    drop = """
        const data = new DataTransfer();
        data.items.add(new File([arguments[1]], arguments[2]));
        arguments[0].dispatchEvent(new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true}));
    """
    messages = write_record("solo", 4, 9, file)
    browser.execute_script(drop, player, file.read_text(), "dropped.jsonl")
    wait_for(player, f"of {len(messages)} messages")
    assert shown(messages) in replayed(browser, player)
    for text, reason in [("{", "line 1"), ("{}", "first line"), ('{"asyncoll": "simulate", "format": 2}', "format 2")]:
        browser.execute_script(drop, player, text, "bad.jsonl")
        wait_for(player, "bad.jsonl is no record")
        assert re.search(reason, player.text)
    rule = player.find_element(By.TAG_NAME, "select")
    browser.execute_script("arguments[0].dispatchEvent(new Event('change'))", rule)
    assert not player.find_elements(By.CSS_SELECTOR, ".message")
    fetched = browser.execute_script("return performance.getEntriesByType('resource').map(({name}) => name)")
    assert [name for name in fetched if not name.startswith(("file:", "data:", "blob:"))] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
