"""Runs a command whose Python processes see the stand-in for CUDA, which is built first:

python tests/stand_in asyncoll launch -n 3 program.py
python tests/stand_in python benchmarks/gpu.py bits order
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = [HERE / "tensors.cpp", HERE / "runtime.cpp"]
LIBRARY = HERE.parents[1] / "build" / "stand_in" / "libcudart_stand_in.so"


def build() -> None:
    """Compile the library, with the headers of the installed torch, if that is newer than it, or a source file is."""
    import torch

    home = Path(torch.__file__).parent
    libraries = home / "lib"
    if LIBRARY.exists() and LIBRARY.stat().st_mtime > max(each.stat().st_mtime for each in [*SOURCES, libraries]):
        return
    LIBRARY.parent.mkdir(parents=True, exist_ok=True)
    headers = [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
    linked = [f"-L{libraries}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{libraries}"]
    flags = [
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-w",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    ]
    new = LIBRARY.with_suffix(".new")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    subprocess.run([*compiler, *flags, *headers, *map(str, SOURCES), "-o", str(new), *linked], check=True)
    new.replace(LIBRARY)


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    build()
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    found = Path(sys.executable).parent / sys.argv[1]  # `asyncoll` and `python` of this environment
    command = [str(found) if found.exists() else sys.argv[1], *sys.argv[2:]]
    os.execvpe(command[0], command, environment)


if __name__ == "__main__":
    main()
