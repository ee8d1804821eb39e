"""Worlds without the processes that would load the package for each of them."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def in_this_process(monkeypatch):
    """Lets `asyncoll laws` check its worlds in this process."""
    from asyncoll.testing.laws import sweep

    monkeypatch.setattr(sweep, "answers", lambda module, worlds, jobs, environ: (sweep.check(each) for each in worlds))


@pytest.fixture
def without_launcher(forked_world, monkeypatch):
    """Forks the ranks of each case."""
    from asyncoll.testing.laws import case_runs

    def run_job(arguments):
        _, size, _, transport, _, _, *program = arguments
        for rank in forked_world(os.environ | {"ASYNCOLL_TRANSPORT": transport}, int(size), *program):
            assert rank.end() == (0, "", "")

    monkeypatch.setattr(case_runs, "_run_job", run_job)
