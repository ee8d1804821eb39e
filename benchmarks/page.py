"""The page of benchmarks, docs/benchmarks.md, from the records in benchmarks/results, and these from their scripts.

    python benchmarks/page.py               # writes the page and its drawings again
    python benchmarks/page.py renew [NAME]  # measures all claims, or one, and writes the page
    python benchmarks/page.py age           # lists records that are older than the code they measure; exit code 1

A claim (asyncoll/bench/claims.toml) has one record, benchmarks/results/NAME.json: its runs, each with the command, the
date, the commit, the machine and the cells of the table, and from scripts all raw numbers. A test compares the page
with what the records give. The first records were typed from the journal, and say so. The scripts of several hosts need
root.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from charts import draw
from common import machine

from asyncoll.bench.claims import Cells, Claim, ClaimRun, FasterPeer, judge, load, merged, show
from asyncoll.bench.suite import measure

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "benchmarks.md"
DRAWINGS = ROOT / "docs" / "drawings" / "benchmarks"
Record = dict[str, Any]

TOP = """# Benchmarks

<!-- benchmarks/page.py writes this page from the records in benchmarks/results. -->

Each section has one claim, the numbers that show it, and the command that measures it again. `asyncoll bench suite
--quick` checks four of them on your host in four minutes; `make benchmarks` measures all of them and writes this page.
"""
PEERS = """## Where a peer is faster

All cells of the records in which a peer took less time; the speed is that of asyncoll over the peer's.
"""
END = """## How it was measured

Times are medians; systems that one command measures took turns in one run. Every result was compared with what it must
be, at every rank, element and call: no wrong element was found. More than two ranks share two cores, so their times are
mostly processor time. Links between hosts are those of network namespaces of one machine. Open MPI has not been
measured between hosts.

The records are in `benchmarks/results/`. Those from the journal (`benchmarks/history/`) were typed from it, and have no
raw numbers. `benchmarks/README.md` lists all scripts.

```sh
asyncoll bench allreduce -n 2 --sizes 4:4K --registered
```

```sh
# Not run by the tests: it takes minutes.
asyncoll bench suite --quick --json here.json
asyncoll bench compare here.json there.json
asyncoll bench tune -n 4    # how arrays are best cut up in memory on this host
```
"""


def main(words: Sequence[str]) -> int:
    claims, failed = load(), False
    match list(words):
        case []:
            pass
        case ["renew", *names] if set(names) <= set(claims):
            renewed = [renew(claims[name]) for name in names or claims]
            failed = not all(renewed)
        case ["age"]:
            return tell_ages(claims)
        case _:
            print(f"{__doc__}\nNAME is one of {', '.join(claims)}")
            return 2
    write(claims)
    return int(failed)


# -- records --------------------------------------------------------------------------------------


def record_of(claim: Claim) -> Record:
    path = RESULTS / f"{claim.name}.json"
    return json.loads(path.read_text()) if path.exists() else {"claim": claim.name, "runs": []}


def cells_of(record: Record) -> Cells:
    return merged(run["cells"] for run in record["runs"])


def renew(claim: Claim) -> bool:
    """Measure the claim, and write its record. Returns whether that was possible: some scripts need root."""
    try:
        runs = [measured(claim, run) for run in claim.runs]
    except (subprocess.CalledProcessError, RuntimeError) as error:
        print(f"{claim.name} keeps its record: {error}", file=sys.stderr)
        return False
    RESULTS.mkdir(exist_ok=True)
    document = json.dumps({"claim": claim.name, "runs": runs}, indent=1, allow_nan=False)
    (RESULTS / f"{claim.name}.json").write_text(document + "\n")
    return True


def measured(claim: Claim, run: ClaimRun) -> Record:
    place: Record = {
        "command": command(claim, run),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": git("rev-parse", "--short=10", "HEAD"),
        "machine": machine(),
    }
    print(f"# {claim.name}: {place['command']}", flush=True)
    if run.module:
        return place | {"cells": measure(run, quick=False)}
    with tempfile.TemporaryDirectory(prefix="asyncoll-") as folder:
        words = [sys.executable, str(ROOT / run.script), *shlex.split(run.options), "--out", folder]
        code = subprocess.run(words, check=False, cwd=ROOT).returncode
        written = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    found = next((each for each in written if each["cells"]), None)
    if found is None:  # one that misses a target of its own has measured all the same
        raise RuntimeError(f"{run.script} ended with exit code {code}, and gave no cells")
    return place | {"cells": found["cells"], "raw": found["raw"]}


def command(claim: Claim, run: ClaimRun) -> str:
    return f"asyncoll bench suite --claim {claim.name}" if run.module else f"python {run.script} {run.options}".strip()


def git(*words: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True).stdout.strip()


# -- age ------------------------------------------------------------------------------------------


def age(claim: Claim) -> int:
    """The number of commits in the measured code since the oldest run of the record."""
    return max((commits_since(run, claim.measures) for run in record_of(claim)["runs"]), default=0)


def commits_since(run: Record, folders: Sequence[str]) -> int:
    """Of a commit that is not in this history, such as one that was rewritten, those since its day began."""
    ancestry = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", run["commit"], "HEAD"]
    is_here = subprocess.run(ancestry, capture_output=True).returncode == 0
    since = [f"{run['commit']}..HEAD"] if is_here else [f"--since={run['date']}T00:00:00Z", "HEAD"]
    return int(git("rev-list", "--count", "--no-merges", *since, "--", *folders))


def counted(commits: int) -> str:
    return f"{commits} commit{'s' * (commits > 1)}"


def tell_ages(claims: dict[str, Claim]) -> int:
    ages = {name: age(claim) for name, claim in claims.items()}
    for name, commits in ages.items():
        if commits:
            print(
                f"{name}: {counted(commits)} since in {', '.join(claims[name].measures)}: make benchmarks CLAIM={name}"
            )
    return int(any(ages.values()))


def marked(markdown: str) -> str:
    """The page, with a mark at each claim whose record is older than the code. docs/_site.py shows it so.

    Without the history of the repository, as in a source distribution, or without git, nothing is marked.
    """
    has_history = shutil.which("git") is not None and (ROOT / ".git").exists()
    if not has_history or git("rev-parse", "--is-shallow-repository") == "true":
        return markdown
    for claim in load().values():
        heading = f"## {claim.heading}\n"
        if commits := age(claim):
            markdown = markdown.replace(heading, f"{heading}\n*Older than the code: {counted(commits)} since.*\n")
    return markdown


# -- page -----------------------------------------------------------------------------------------


def write(claims: dict[str, Claim]) -> None:
    DRAWINGS.mkdir(parents=True, exist_ok=True)
    for name, text in files(claims).items():
        (ROOT / name).write_text(text)


def files(claims: dict[str, Claim]) -> dict[str, str]:
    """The page and its drawings, by their paths in the repository."""
    found = {claim.name: cells_of(record_of(claim)) for claim in claims.values()}
    parts = [section(claim, found[claim.name], record_of(claim)["runs"]) for claim in claims.values()]
    page = "\n".join([TOP, *parts, faster_peers(claims, found), END])
    drawings = {DRAWINGS / f"{claim.name}.svg": draw(claim, found[claim.name]) for claim in claims.values()}
    return {str(path.relative_to(ROOT)): text for path, text in {PAGE: page, **drawings}.items()}


def section(claim: Claim, cells: Cells, runs: list[Record]) -> str:
    fails = "".join(
        f"\n**Does not hold in this record**: {words}.\n" for words, holds in judge(claim, cells) if not holds
    )
    commands = "\n".join(f"- `{run['command']}`: {place(run)}" for run in runs)
    rows = [[row, *(claim.shown(cells, row, column) for column in claim.columns)] for row in claim.rows]
    return f"""## {claim.heading}

{claim.sentence(cells)}
{fails}
{table(["", *claim.columns], rows)}

![](drawings/benchmarks/{claim.name}.svg)

<details markdown="1">
<summary>make benchmarks CLAIM={claim.name}</summary>

{commands}

</details>
"""


def place(run: Record) -> str:
    cpu = f"{run['machine']['cores']} cores, {run['machine']['cpu']}"
    note = f"; {run['note']}" if "note" in run else ""
    return f"{run['date']}, commit {run['commit'][:8]}, {cpu}{note}"


def faster_peers(claims: dict[str, Claim], found: dict[str, Cells]) -> str:
    """A row for each system and peer of a claim: all cells in which it is faster, and the worst ratio of these."""
    groups: dict[tuple[str, str, str], list[FasterPeer]] = {}
    for claim in claims.values():
        for loss in claim.losses(found[claim.name]):
            groups.setdefault((loss.heading, loss.ours, loss.peer), []).append(loss)
    rows = [
        (
            min(loss.theirs_s / loss.mine_s for loss in losses),
            heading,
            ours,
            peer,
            ", ".join(loss.what for loss in losses),
        )
        for (heading, ours, peer), losses in groups.items()
    ]
    lines = [
        [f"{heading}: {ours}", peer, where, show(worst, "times")] for worst, heading, ours, peer, where in sorted(rows)
    ]
    return f"{PEERS}\n{table(['asyncoll', 'peer', 'faster at', 'speed, at worst'], lines)}\n"


def sections() -> dict[str, str]:
    """The text of each section of the page by its anchor."""
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {anchor(part.partition("\n")[0]): part for part in parts}


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---", *["---:"] * (len(headings) - 1)], *rows]
    return "\n".join(f"|{'|'.join(cell or ' ' for cell in line)}|" for line in lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
