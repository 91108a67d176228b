"""Which tests are collected, and the server that most of them share."""

import importlib.util

import pytest
from serving import CHROMIUM, running

# the page is looked at where there is a browser to look with
collect_ignore = []
if CHROMIUM is None or importlib.util.find_spec("playwright") is None:
    collect_ignore += ["test_inspector_page.py", "test_inspector_extremes.py"]
if importlib.util.find_spec("schemathesis") is None:
    collect_ignore.append("test_api_description.py")


@pytest.fixture(scope="session")
def server():
    with running() as made:
        yield made


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        made = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()
