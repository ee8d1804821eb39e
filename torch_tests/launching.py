"""Runs a program that starts the processes of ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

ENDING_S = 15  # torchrun gives its ranks this time, then it kills them


def run(command: list[str], env: Mapping[str, str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """The program's end and output. After `limit_s` it is ended, and subprocess.TimeoutExpired is raised.

    It is asked first: a launcher that is killed at once leaves its ranks behind.
    """
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        try:
            output, errors = program.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            program.terminate()
            try:
                program.communicate(timeout=2 * ENDING_S)
            except subprocess.TimeoutExpired:
                program.kill()
            raise
    return subprocess.CompletedProcess(command, program.returncode, output, errors)
