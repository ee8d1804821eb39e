"""The versions that asyncoll works with: runs the checks in an environment each, and writes the page.

    python compatibility/run.py             # writes docs/reference/compatibility.md again from its records
    python compatibility/run.py renew [N]   # makes all environments, or those of these rows, and runs the checks

`environments.toml` has the rows and the checks, `records/` the results. uv makes the environments. It takes
interpreters on PATH, and fetches one that is missing, where it can; otherwise the row says so. Where it cannot, a
chroot of Debian unstable has the newest ones. An environment is removed when its checks have run. torch comes from the
index of Python packages, without CUDA: see `empty_libraries.py`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import Any

from empty_libraries import supply

ROOT = Path(__file__).parent.parent
HERE = Path(__file__).parent
RECORDS = HERE / "records"
PAGE = ROOT / "docs" / "reference" / "compatibility.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DECLARED = tomllib.loads((HERE / "environments.toml").read_text())
TOOLS = ("hypothesis", "pytest", "pytest-asyncio")
SHOWN = ("torch", "numpy", "pyzmq", "msgpack", "uvloop")
LIMIT_S = 600  # of one command
Record = dict[str, Any]


@dataclass(frozen=True)
class Environment:
    """One row of the page."""

    python: str
    packages: str  # "lowest", "pinned" or "newest"
    torch: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, ["python" + self.python, self.torch and f"torch{self.torch}", self.packages]))

    @property
    def record(self) -> Record | None:
        path = RECORDS / f"{self.name}.json"
        return json.loads(path.read_text()) if path.exists() else None


@dataclass(frozen=True)
class Check:
    """One column of the page."""

    name: str
    what: str
    commands: tuple[str, ...]


ENVIRONMENTS = [Environment(**row) for row in DECLARED["environment"]]
CHECKS = [Check(**row) for row in DECLARED["check"]]


class CommandError(Exception):
    """A command has failed; the text is the end of what it printed."""


def main(words: Sequence[str]) -> int:
    match list(words):
        case []:
            pass
        case ["renew", *rows] if all(row.isdigit() and 1 <= int(row) <= len(ENVIRONMENTS) for row in rows):
            renew([ENVIRONMENTS[int(row) - 1] for row in rows] or ENVIRONMENTS)
        case _:
            print(f"{__doc__}\nN is the number of a row, from 1 to {len(ENVIRONMENTS)}")
            return 2
    PAGE.write_text(page())
    return 0


# -- environments ---------------------------------------------------------------------------------


def renew(environments: Sequence[Environment]) -> None:
    """Make each environment, run the checks in it, and write its record."""
    RECORDS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as scratch:
        folder = Path(scratch)
        commit = run(["git", "-C", ROOT, "rev-parse", "--short=10", "HEAD"]).strip()
        build = ["uv", "build", "--quiet", "--python", sys.executable, "--out-dir", folder / "dist", ROOT]
        run(build, ASYNCOLL_BUILD_CORE="1")
        for environment in environments:
            print(f"# {environment.name}", flush=True)
            place = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": commit}
            document = json.dumps(place | outcome(environment, folder), indent=1)
            (RECORDS / f"{environment.name}.json").write_text(document + "\n")
            shutil.rmtree(folder / "env", ignore_errors=True)


def outcome(environment: Environment, folder: Path) -> Record:
    """The versions and the results of all checks, or why there are none."""
    python = folder / "env" / "bin" / "python"
    try:
        run(["uv", "venv", "--quiet", "--clear", "--python", environment.python, folder / "env"])
    except CommandError:
        return {"not run": f"no interpreter of Python {environment.python} can be had on this machine"}
    try:
        replaced = install(environment, python, folder / "dist")
    except CommandError as error:
        return {"not run": f"cannot be installed: {last_line(str(error))}"}
    programs = source(folder)
    return {
        "empty CUDA libraries": replaced,
        "versions": json.loads(run([python, "-P", "-c", VERSIONS])),
        "checks": {check.name: result(check, python.parent, programs) for check in CHECKS},
    }


VERSIONS = """
import importlib.metadata, json, platform, asyncoll._core
names = {"torch", "numpy", "pyzmq", "msgpack", "uvloop", "click", "rich", "typeguard"}
versions = {name: importlib.metadata.version(name) for name in sorted(names)}
core = "C" if asyncoll._core.native is not None else "Python"
print(json.dumps({"python": platform.python_version(), "core": core, **versions}))
"""


def install(environment: Environment, python: Path, dist: Path) -> bool:
    """Install torch, then what it and asyncoll need, then asyncoll. Returns whether torch is a build for CUDA."""

    def pip(*words: str | Path) -> None:
        run(["uv", "pip", "install", "--quiet", "--python", python, *words])

    def freedom(packages: str) -> list[str | Path]:
        return {"lowest": ["--resolution", "lowest-direct"], "pinned": ["--constraints", constraints], "newest": []}[
            packages
        ]

    constraints = dist / "constraints.txt"
    constraints.write_text(re.sub(r"^torch==.*\n", "", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    (needs_torch,) = [name for name in PROJECT["dependencies"] if name.startswith("torch")]
    pinned = {"pinned": re.search(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0]}
    torch = f"torch=={environment.torch}" if environment.torch else pinned.get(environment.packages, needs_torch)
    pip("--no-deps", *(freedom("lowest") if environment.packages == "lowest" else []), torch)
    pip(*freedom(environment.packages), *(name for name in PROJECT["dependencies"] if name != needs_torch))
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    kept = "pinned" if environment.packages == "lowest" else environment.packages
    pip(*without_cuda(packages))
    pip(*freedom(kept), *TOOLS)
    has_lock = not environment.python.endswith("t")  # the wheel has the core, which needs it
    (distribution,) = dist.glob("*.whl" if has_lock else "*.tar.gz")
    pip("--no-deps", distribution)
    return supply(packages)


def without_cuda(packages: Path) -> list[str]:
    """The requirements of the installed torch, without CUDA and what writes programs for GPUs."""
    (metadata,) = packages.glob("torch-*.dist-info")
    torch: Distribution = PathDistribution(metadata)
    return [
        name for name in torch.requires or () if not re.match(r"nvidia|cuda|triton", name) and "extra ==" not in name
    ]


def source(folder: Path) -> Path:
    """The source distribution, unpacked, without the package itself: the checks take the installed one."""
    if not (programs := folder / "source").exists():
        (archive,) = (folder / "dist").glob("*.tar.gz")
        with tarfile.open(archive) as files:
            files.extractall(folder / "unpacked", filter="data")
        (unpacked,) = (folder / "unpacked").iterdir()
        shutil.rmtree(unpacked / "asyncoll")
        unpacked.rename(programs)
    return programs


def result(check: Check, programs: Path, folder: Path) -> Record:
    """Whether all commands of the check end with 0, and what those say that do not."""
    started = time.perf_counter()
    failed, counts = [], []
    for command in check.commands:
        print(f"  {shlex.join(shlex.split(command))[:100]}", flush=True)
        try:
            printed = run(shlex.split(command), cwd=folder, PATH=f"{programs}:{os.environ['PATH']}")
        except CommandError as error:
            printed = str(error)
            failed.append({"command": " ".join(shlex.split(command)), "printed": printed.splitlines()[-30:]})
        counts += re.findall(r"\d+ passed", printed)
    return {"failed": failed, "counts": counts, "seconds": round(time.perf_counter() - started)}


def run(command: Sequence[str | Path], cwd: Path = ROOT, **variables: str) -> str:
    """What a command prints."""
    try:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=cwd,
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"not ended after {LIMIT_S} s: {shlex.join(map(str, error.cmd))}") from None
    if done.returncode:
        raise CommandError(f"{done.stdout}\nexit code {done.returncode}")
    return done.stdout


def last_line(text: str) -> str:
    return [line for line in text.splitlines() if line.strip()][-1]


# -- page -----------------------------------------------------------------------------------------

TOP = """# Compatibility

<!-- compatibility/run.py writes this page from the records in compatibility/records. -->

The versions of Python, torch and other packages with which asyncoll has been run. Each row is an environment of its
own. asyncoll was installed from its wheel, which has the compiled core for all versions of Python. Only builds of
Python without a GIL, such as 3.14t, cannot load this core. The first row has the lowest versions that `pip` takes.
"""
END = """## How it is checked

`make compatibility` makes the environments, runs the checks and writes this page; `make compatibility ROWS="1 5"`
renews the first and the fifth row. The rows and the commands are in `compatibility/environments.toml`, the results in
`compatibility/records/`.

All rows ran on the CPU, {dates}. *CUDA* marks a torch that the package index has for CUDA only. It ran without its CUDA
packages: empty libraries take their place, so that torch can be imported.
"""


def page() -> str:
    found = [(environment, environment.record) for environment in ENVIRONMENTS]
    columns = ["Python", *SHOWN, "core", *(check.name for check in CHECKS)]
    rows = [row(environment, record) for environment, record in found if record is not None]
    lines = [columns, ["---"] * len(columns), *rows]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    checks = "\n".join(f"- *{check.name}*: {check.what}." for check in CHECKS)
    return "\n".join([TOP, table, "", checks, "", *notes(found), END.format(dates=dates(found))])


def dates(found: Sequence[tuple[Environment, Record | None]]) -> str:
    days = sorted({record["date"] for _, record in found if record is not None})
    return f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"


def row(environment: Environment, record: Record) -> list[str]:
    if "not run" in record:
        return [environment.python, environment.torch or " ", *[" "] * len(SHOWN), *["not run"] * len(CHECKS)]
    mark = {"torch": " (CUDA)"} if record["empty CUDA libraries"] else {}
    versions = {name: version.partition("+")[0] + mark.get(name, "") for name, version in record["versions"].items()}
    cells = [cell(record["checks"][check.name]) for check in CHECKS]
    return [versions["python"], *(versions[name] for name in SHOWN), versions["core"], *cells]


def cell(found: Record) -> str:
    return "**fails**" if found["failed"] else ", ".join(found["counts"]) or "passes"


def notes(found: Sequence[tuple[Environment, Record | None]]) -> list[str]:
    """What is to be said about the cells that did not pass."""
    lines = []
    for environment, record in found:
        if record is not None and "not run" in record:
            lines.append(f"- Python {environment.python} was not run: {record['not run']}.")
        for check in failing(record):
            reason = DECLARED.get("reasons", {}).get(environment.name, {}).get(check, "not explained yet.")
            lines.append(f"- Python {environment.python}, torch {record['versions']['torch']}, {check}: {reason}")
    return ["## What did not pass", "", *lines, ""] if lines else []


def failing(record: Record | None) -> list[str]:
    return [name for name, found in (record or {}).get("checks", {}).items() if found["failed"]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
