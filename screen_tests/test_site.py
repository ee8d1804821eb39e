"""The site from a folder, without a network: search, both colour schemes, a desk and a phone."""

from __future__ import annotations

from urllib.parse import quote_plus

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait

from screen_tests.conftest import ROOT, open_browser

SCREENS = ROOT / "build" / "screens"
PAGES = ("index", "tutorial", "benchmarks", "howto/ddp-hooks", "reference/communicator")
FOUND = """
    const roots = [...document.querySelectorAll("*")].map(({ shadowRoot }) => shadowRoot).filter(Boolean);
    return roots.flatMap((root) => [...root.querySelectorAll("a")]).map(({ href }) => href);
"""
NARROW = """
    const isNarrow = (cell) => cell.innerText.length > 60 && cell.getBoundingClientRect().width < 110;
    return [...document.querySelectorAll(".md-content td")].filter(isNarrow).map(({ innerText }) => innerText);
"""
ERRORS = (  # the first words of their texts
    "all ranks wait in different calls",
    "is gone: its connection closed",
    "a call needs a running event loop",
    "give either -n RANKS",
    "has shown no sign of life",
    "NaN or infinity in the tensor",
    "no service at",
    "the gradients have changed between backward",
    "this rank has made no call named",
    "unknown algorithm",
    "was not over after",
)


def test_the_search_works_from_a_folder(browser, site):
    browser.get(f"{site}/index.html")
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.CONTROL, "k")
    wait = WebDriverWait(browser, 20)
    wait.until(lambda _: browser.switch_to.active_element.tag_name != "body")
    pages = {
        "streaming rpc": "howto/rpc.html",
        "majority_allreduce": "reference/communicator.html",
        "EagerSGDState": "reference/hooks.html",
        "ASYNCOLL_DEADLINE_S": "reference/variables.html",
        "huggingface": "howto/switch-from-gloo.html",
        "Hugging Face": "howto/switch-from-gloo.html",
        "MismatchError: rank 1 called barrier": "howto/troubleshooting.html",
        "two hosts": "howto/hosts.html",
        "multi node": "howto/hosts.html",
    }
    pages |= dict.fromkeys(ERRORS, "howto/troubleshooting.html")
    for words, page in pages.items():
        browser.switch_to.active_element.send_keys(Keys.CONTROL, "a")
        browser.switch_to.active_element.send_keys(words)
        found = f"{site}/{page}?h={quote_plus(words)}"  # and the place on the page, unless it is its beginning
        wait.until(lambda _, found=found: any(link.startswith(found) for link in links(browser)[:4]), words)
    browser.switch_to.active_element.send_keys(Keys.CONTROL, "a")
    browser.switch_to.active_element.send_keys("kubernetes hyperplane")  # each is on several pages, none has both
    wait.until(lambda _: not any("?h=" in link for link in links(browser)))


def links(browser):
    return browser.execute_script(FOUND)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_no_page_is_wider_than_its_window_or_fetches_anything(site, scheme, width):
    """Writes pictures of the pages to build/screens."""
    browser = open_browser(f"--blink-settings=preferredColorScheme={int(scheme == 'light')}")
    SCREENS.mkdir(exist_ok=True)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 2400, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        for page in PAGES:
            browser.get(f"{site}/{page}.html")
            browser.save_screenshot(str(SCREENS / f"{page.replace('/', '-')}-{width}-{scheme}.png"))
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width, page
            assert browser.execute_script(NARROW) == [], page  # prose in a column that is a word wide
            fetched = browser.execute_script("return performance.getEntriesByType('resource').map(({name}) => name)")
            assert [name for name in fetched if not name.startswith(("file:", "data:", "blob:"))] == []
            assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    finally:
        browser.quit()
