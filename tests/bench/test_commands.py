"""Twenty wrong inputs and more of each command that measures or checks: one line says what to do; exit code 2."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from asyncoll.cli import main

NO_NUMBER = "is not a valid"
RANGE = "is not in the range"
NO_OPTION = "No such option"
NO_KIND = "use all, or some of solo, majority"
NO_SIZES = "use a list such as 1-9,12,13, up to 1024"
NO_SEEDS = "are no seeds: use FROM:TO, such as 0:200, or a count"
NO_CHOICE = "is not one of '"
NO_CELL = "names no cell: use FAULT/OPERATION/MOMENT"
NO_LENGTH = "is not a size such as 4, 16K or 1M"
NO_FLOATS = "is not a positive multiple of 4 bytes"
NO_TIME = "is not a duration such as 1ms, 500us or 0.1s"
NO_CLAIM = "asyncoll bench suite measures training, waiting,"
NO_RESULT = "is no result of `asyncoll bench suite --json` or of `make benchmarks`: give one that is"
NO_VALUE = "does not take a value"
MISSING = "requires an argument"
EXTRA = "Got unexpected extra argument"
OF_SIZES = {
    "--sizes ''": NO_LENGTH,
    "--sizes 0": NO_FLOATS,
    "--sizes 3": NO_FLOATS,
    "--sizes 4,": NO_LENGTH,
    "--sizes 8:4": "goes down: give the smaller size first",
    "--sizes 1.5K": NO_LENGTH,
    "--sizes 4KB": NO_LENGTH,
    "--sizes -4": NO_LENGTH,
    "--sizes 4::8": NO_LENGTH,
    "--sizes 999999G": "do not fit into the memory of this host",
    "--sizes": MISSING,
    "--transport ipc": NO_CHOICE,
    "--transport mpi": NO_CHOICE,
    "--json=x": NO_VALUE,
    "extra": EXTRA,
}
INPUTS = {
    "laws": {
        "--kind duo": NO_KIND,
        "--kind solo,,dense": NO_KIND,
        "--kind ''": NO_KIND,
        "--kind SOLO": NO_KIND,
        "--sizes 0": NO_SIZES,
        "--sizes 3-1": NO_SIZES,
        "--sizes a": NO_SIZES,
        "--sizes 1025": NO_SIZES,
        "--sizes 1,,2": NO_SIZES,
        "--sizes -4": NO_SIZES,
        "--seeds 5:5": NO_SEEDS,
        "--seeds 9:2": NO_SEEDS,
        "--seeds -3:4": NO_SEEDS,
        "--seeds 1:2:3": NO_SEEDS,
        "--seeds abc": NO_SEEDS,
        "--seeds ''": NO_SEEDS,
        "--seeds 0:2000000": NO_SEEDS,
        "--seeds 0": NO_SEEDS,
        "--seed -1": RANGE,
        "--seed 1.5": NO_NUMBER,
        "--seed 1 --seeds 3": "give --seed or --seeds, not both",
        "--jobs 0": RANGE,
        "--jobs many": NO_NUMBER,
        "--transport tcp": NO_CHOICE,
        "--transport SHM": NO_CHOICE,
        "--ranks 4": "No such option '--ranks'. Did you mean '--sizes'?",
        "--device": "Did you mean '--devices'?",
        "--json=yes": NO_VALUE,
        "extra": EXTRA,
    },
    "faults": {
        "--cells kil/*": NO_CELL,
        "--cells 'kill/*,kil/*'": NO_CELL,
        "--cells ''": NO_CELL,
        "--cells kill": NO_CELL,
        "--cells '[/*'": NO_CELL,
        "--cells 'kill-host/*'": NO_CELL,
        "--sample 0": RANGE,
        "--sample -1": RANGE,
        "--sample x": NO_NUMBER,
        "--seeds 5:5": NO_SEEDS,
        "--seeds x": NO_SEEDS,
        "--seed 1 --seeds 2": "give --seed or --seeds, not both",
        "--repeat 3": "No such option '--repeat'. Did you mean '--seeds'?",
        "-n 1": RANGE,
        "-n 1025": RANGE,
        "-n two": NO_NUMBER,
        "--ranks 0": RANGE,
        "--np 4": "Did you mean '--ranks'?",
        "--transport tcp": NO_CHOICE,
        "--jobs 0": RANGE,
        "--jobs 1e3": NO_NUMBER,
        "--hosts 0": RANGE,
        "--hosts 9": "--hosts: 4 ranks are on 1 to 4 hosts, not 9",
        "--cell kill/*": "'--cells'",
        "extra": EXTRA,
    },
    "bench allreduce": OF_SIZES
    | {
        "-n 0": RANGE,
        "-n 1025": RANGE,
        "-n x": NO_NUMBER,
        "--np 2": "Did you mean '--ranks'?",
        "--device gpu": NO_CHOICE,
        "--device cuda --registered": "leave it out with --device cuda",
        "--registered=1": NO_VALUE,
        "--iterations 5": NO_OPTION,
    },
    "bench pingpong": OF_SIZES
    | {
        "-n 2": NO_OPTION,
        "--ranks 2": NO_OPTION,
        "--device cpu": NO_OPTION,
        "--skew 1ms": NO_OPTION,
        "--size 4": "Did you mean '--sizes'?",
    },
    "bench solo": OF_SIZES
    | {
        "-n 1": RANGE,
        "--skew 1": NO_TIME,
        "--skew ms": NO_TIME,
        "--skew -1ms": NO_TIME,
        "--skew 1h": NO_TIME,
        "--skew ''": NO_TIME,
        "--iterations 0": RANGE,
        "--iterations x": NO_NUMBER,
        "--iterations 10000000": RANGE,
    },
    "bench tune": {
        "-n 1": RANGE,
        "-n 0": RANGE,
        "-n -2": RANGE,
        "-n x": NO_NUMBER,
        "-n 1025": RANGE,
        "-n 2.5": NO_NUMBER,
        "-n ''": NO_NUMBER,
        "-n": MISSING,
        "--ranks 1": RANGE,
        "--ranks x": NO_NUMBER,
        "--np 2": "Did you mean '--ranks'?",
        "--nproc 2": "Did you mean '--ranks'?",
        "--rank 3": "Did you mean '--ranks'?",
        "--sizes 4": NO_OPTION,
        "--transport shm": NO_OPTION,
        "--iterations 3": NO_OPTION,
        "--quick": NO_OPTION,
        "-x": NO_OPTION,
        "--json=x": NO_VALUE,
        "extra": EXTRA,
    },
    "bench suite": {
        "--claim rpc": NO_CLAIM,
        "--claim ''": NO_CLAIM,
        "--claim Waiting": NO_CLAIM,
        "--claim waiting,training": NO_CLAIM,
        "--claim waiting --claim nope": NO_CLAIM,
        "--claim": MISSING,
        "--claims waiting": "Did you mean '--claim'?",
        "--json .": "is a directory",
        "--json ''": "--json: cannot write to .: Is a directory; give another file",
        "--json none/x.json": "--json: cannot write to none/x.json: No such file or directory; give another file",
        "--json /proc/x.json": "--json: cannot write to /proc/x.json: ",
        "--json empty/x.json": "--json: cannot write to empty/x.json: Not a directory; give another file",
        "--json": MISSING,
        "--quik": "Did you mean '--quick'?",
        "--quick=1": NO_VALUE,
        "-n 4": NO_OPTION,
        "--ranks 4": NO_OPTION,
        "--seeds 3": NO_OPTION,
        "--transport shm": NO_OPTION,
        "extra": EXTRA,
    },
    "bench compare": {
        "": "Missing argument 'A.json'",
        "good": "Missing argument 'B.json'",
        "good none": "'none' does not exist",
        "none good": "'none' does not exist",
        "'' good": "does not exist",
        "good .": "is a directory",
        "good object": NO_RESULT,
        "object good": NO_RESULT,
        "good broken": NO_RESULT,
        "good list": NO_RESULT,
        "good string": NO_RESULT,
        "good null": NO_RESULT,
        "good empty": NO_RESULT,
        "good binary": NO_RESULT,
        "good deep": NO_RESULT,
        "good claims": NO_RESULT,
        "good cells": NO_RESULT,
        "good number": NO_RESULT,
        "good runs": NO_RESULT,
        "good other": "have no cell in common: give results of the same claims",
        "good good good": EXTRA,
        "--jsn good good": "Did you mean '--json'?",
    },
    "bench": {
        "alreduce": "Did you mean 'allreduce'?",
        "bogus": "No such command 'bogus'",
        "allreduc --sizes 4": "Did you mean 'allreduce'?",
        "--quick": NO_OPTION,
        "-n 4": NO_OPTION,
    },
}
FILES = {  # of `bench compare`
    "good": json.dumps({"claims": {"waiting": {"solo": {"times less": 2.0}}}}),
    "other": json.dumps({"claims": {"training": {"x": {"solo": 2.0}}}}),
    "claims": json.dumps({"claims": "waiting"}),
    "cells": json.dumps({"claims": {"waiting": [1, 2]}}),
    "number": json.dumps({"claims": {"waiting": {"solo": 3}}}),
    "runs": json.dumps({"claim": "waiting", "runs": [{}]}),
    "object": "{}",
    "broken": "{nope",
    "list": "[1]",
    "string": '"s"',
    "null": "null",
    "empty": "",
    "deep": "[" * 100_000,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", INPUTS)
def test_a_wrong_input_is_one_line_that_says_what_to_do(command: str) -> None:
    for words, complaint in INPUTS[command].items():
        result = CliRunner().invoke(main, [*command.split(), *shlex.split(words)])
        told = [line for line in result.output.splitlines() if line.startswith("Error: ")]
        assert (result.exit_code, len(told), type(result.exception)) == (2, 1, SystemExit), (words, result.output)
        assert complaint in told[0], words


def test_each_command_has_twenty() -> None:
    assert {command for command, inputs in INPUTS.items() if len(inputs) < 20} == {"bench"}
