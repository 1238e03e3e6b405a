"""A real browser: Chromium as the system has it, or as PLAUDIT_CHROMIUM names it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from browsing import opened

playwright = pytest.importorskip("playwright.sync_api")

QUIET = ("--no-sandbox", "--disable-background-networking", "--disable-quic")
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="session")
def chromium() -> Iterator[object]:
    program = os.environ.get("PLAUDIT_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here; install it, or name it in PLAUDIT_CHROMIUM")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=program, args=list(QUIET))
        yield browser
        browser.close()


@pytest.fixture
def page(chromium):
    yield from opened(chromium)


@pytest.fixture
def phone(chromium):
    yield from opened(chromium, **PHONE)


@pytest.fixture
def another(chromium):
    """Pages in browsers of their own: ``another(locale="zh-CN")``; ``another(phone=True)``."""
    pages = []

    def make(phone: bool = False, **how):
        made = opened(chromium, **(PHONE if phone else {}) | how)
        pages.append(made)
        return next(made)

    yield make
    for made in pages:
        next(made, None)
