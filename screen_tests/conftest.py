"""A browser without a window, and the site as a folder. Without Debian's chromium these tests are skipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

ROOT = Path(__file__).parent.parent
SITE = ROOT / "build" / "site"
PROGRAMS = [shutil.which(name) for name in ("chromium", "chromedriver")]


def open_browser(*arguments: str) -> Chrome:
    browser, driver = PROGRAMS
    if browser is None or driver is None:
        pytest.skip("there is no chromium: on Debian, apt install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1280,900", *arguments):
        options.add_argument(argument)
    return Chrome(options=options, service=Service(driver))


@pytest.fixture
def browser() -> Iterator[Chrome]:
    opened = open_browser()
    yield opened
    opened.quit()


@pytest.fixture(scope="session")
def site() -> str:
    """The address of the folder of the site, which is built first."""
    subprocess.run([sys.executable, ROOT / "docs" / "_site.py"], check=True)
    return SITE.as_uri()
