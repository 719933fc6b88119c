"""A headless browser that drives a page; tests are skipped where none is installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Page, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
QUIET += ("--disable-background-networking", "--disable-component-update", "--disable-sync")


def installed_browser() -> str:
    """The path of a browser; the test is skipped without any."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:  # no package of Python brings one
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return browser


@contextmanager
def opened(url: str, width: int = 1400, **options: Any) -> Iterator[Page]:
    """A page at `url`; no script of it may fail."""
    path, faults = installed_browser(), []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=[*QUIET])
        context = browser.new_context(viewport={"width": width, "height": 844}, **options)
        page = context.new_page()
        page.set_default_timeout(20_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(url)
        yield page
        browser.close()
    assert faults == []
