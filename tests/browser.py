"""A headless browser that drives a page; tests are skipped where none is installed."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Error, Page, Playwright, sync_playwright

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
QUIET += ("--disable-background-networking", "--disable-component-update", "--disable-sync")


def installed_browser() -> str:
    """The path of a browser; the test is skipped without any."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:  # no package of Python brings one
        pytest.skip(f"none of {', '.join(BROWSERS)} is installed")
    return browser


@cache
def _started() -> tuple[Playwright, Browser, asyncio.AbstractEventLoop]:
    """One browser for all tests of this process, and the loop that its calls run in."""
    playwright = sync_playwright().start()
    browser = playwright.chromium.launch(executable_path=installed_browser(), args=[*QUIET])
    return playwright, browser, asyncio.get_running_loop()


@contextmanager
def _its_loop() -> Iterator[None]:
    """Outside of the block no loop runs, so that others may: playwright leaves its own running."""
    try:
        asyncio._set_running_loop(_started()[2])
        yield
    finally:
        asyncio._set_running_loop(None)


def _new_context(**options: Any) -> BrowserContext:
    """One of the browser, or of another if that has died since the last test."""
    with _its_loop():
        browser = _started()[1]
        try:
            return browser.new_context(**options)
        except Error:
            if browser.is_connected():
                raise
            _end()
    with _its_loop():
        return _started()[1].new_context(**options)


@contextmanager
def opened(url: str, width: int = 1400, **options: Any) -> Iterator[Page]:
    """A page at `url`, which shares nothing with those before it; no script of it may fail."""
    installed_browser()
    faults = []
    context = _new_context(viewport={"width": width, "height": 844}, **options)
    with _its_loop():
        try:
            page = context.new_page()
            page.set_default_timeout(20_000)
            page.on("pageerror", lambda error: faults.append(str(error)))
            page.goto(url)
            yield page
        finally:
            context.close()
    assert faults == []


def close() -> None:
    """End the browser, if one was started."""
    if _started.cache_info().currsize:
        with _its_loop():
            _end()


def _end() -> None:
    playwright, browser, _ = _started()
    browser.close()
    playwright.stop()
    _started.cache_clear()
