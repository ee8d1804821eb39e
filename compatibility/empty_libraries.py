"""Empty libraries in place of those of CUDA, with which a torch for CUDA can be imported without them.

On Linux the index of Python packages has torch for CUDA only, which needs three to five gigabytes of libraries when it
is imported. On the CPU none of their functions is called.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path

OF_CUDA = re.compile(r"cu|CU|nv|nccl|_ZN?.*(cudnn|nccl|nvshmem)")
HAS_FUNCTION = re.compile(r"\w+")


def supply(packages: Path) -> bool:
    """Put a library with all functions that torch wants of it beside those of torch. Returns whether any was missing.

    A function that no library of torch has goes into every library, under the versions that torch asks of that library.
    """
    folder = packages / "torch" / "lib"
    own = [*folder.glob("*.so*"), *(packages / "torch").glob("_C*.so")]
    needed: set[str] = set()
    versions: defaultdict[str, set[str]] = defaultdict(set)
    wanted: dict[str, str] = {}
    defined: set[str] = set()
    for library in own:
        listing = printed("readelf", "--wide", "--dynamic", "--version-info", "--dyn-syms", str(library))
        needed.update(re.findall(r"\(NEEDED\).*\[(.*)\]", listing))
        for name, entries in re.findall(r"Version: 1  File: (\S+).*\n((?:.*Name: \S+  Flags:.*\n)*)", listing):
            versions[name].update(re.findall(r"Name: (\S+)  Flags", entries))
        for binding, index, symbol in re.findall(r"(GLOBAL|WEAK)\s+\w+\s+(\w+)\s+(\S+)", listing):
            name, _, version = symbol.partition("@")
            if index != "UND":
                defined.add(name)
            elif binding == "GLOBAL":
                wanted[name] = version.lstrip("@")
    present = {library.name for library in own}
    system = printed("ldconfig", "-p")
    missing = sorted(name for name in needed if name not in present and name not in system)
    functions = {
        name: version for name, version in wanted.items() if name not in defined and HAS_FUNCTION.fullmatch(name)
    }
    for name in missing:
        write(folder / name, functions, sorted(versions[name]))
    return bool(missing)


def write(target: Path, functions: dict[str, str], versions: list[str]) -> None:
    """A library with the functions of these versions, and those of CUDA without a version."""
    mine = {name: version for name, version in functions.items() if version in versions}
    others = [name for name, version in functions.items() if not version and OF_CUDA.match(name)]
    with tempfile.TemporaryDirectory() as scratch:
        source, script = Path(scratch) / "empty.c", Path(scratch) / "versions"
        source.write_text("".join(f"int {name}(void) {{ return 100; }}\n" for name in [*mine, *others]))
        command = [
            "cc",
            "-w",
            "-fno-builtin",
            "-shared",
            "-fPIC",
            str(source),
            "-o",
            str(target),
            f"-Wl,-soname,{target.name}",
        ]
        if versions:
            names = {each: [name for name, version in mine.items() if version == each] for each in versions}
            nodes = (f"{each} {{ global: {'; '.join(names[each]) or 'none'}; }};\n" for each in versions)
            script.write_text("".join(nodes))
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def printed(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
