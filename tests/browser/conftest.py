"""A real browser: Chromium as the system has it, or as PLAUDIT_CHROMIUM names it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

playwright = pytest.importorskip("playwright.sync_api")

QUIET = ("--no-sandbox", "--disable-background-networking", "--disable-quic")


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    program = os.environ.get("PLAUDIT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here; install it, or name it in PLAUDIT_CHROMIUM")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=list(QUIET))
        yield browser
        browser.close()


def opened(chromium, **how) -> Iterator[object]:
    """A page on which a script that fails, and a dialog, is a failure of the test."""
    context = chromium.new_context(**{"locale": "en", "viewport": {"width": 1200, "height": 800}} | how)
    context.set_default_timeout(10_000)
    made, faults = context.new_page(), []
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on("dialog", lambda dialog: (faults.append(dialog.message), dialog.dismiss()))
    yield made
    context.close()
    assert not faults


@pytest.fixture
def page(chromium):
    yield from opened(chromium)


@pytest.fixture
def phone(chromium):
    yield from opened(chromium, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)


@pytest.fixture
def another(chromium):
    """Pages in browsers of their own: ``another(locale="zh-CN")``."""
    pages = []

    def make(**how):
        made = opened(chromium, **how)
        pages.append(made)
        return next(made)

    yield make
    for made in pages:
        next(made, None)
