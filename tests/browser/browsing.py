"""A browser page that notices what no page may do, and what is seen of a page: contrast, names, focus, overflow."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

LOOKS = Path(__file__).with_name("looks.js").read_text(encoding="utf-8")
#: the least contrast of text, and of what shows the focus (WCAG 2.2, 1.4.3 and 1.4.11)
TEXT, OUTLINE = 4.5, 3.0
NAMED = {"button", "link", "textbox", "combobox", "radio", "checkbox", "DisclosureTriangle", "SummaryTrigger"}


def opened(chromium, **how) -> Iterator[object]:
    """A page on which a script that fails, an error in the console, a dialog, and a request to another machine are
    failures of the test."""
    context = chromium.new_context(**{"locale": "en", "viewport": {"width": 1200, "height": 800}} | how)
    context.set_default_timeout(10_000)
    faults: list[str] = []
    context.on("weberror", lambda error: faults.append(str(error.error)))
    context.on("dialog", lambda dialog: (faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    context.on("request", lambda request: _local(request.url) or faults.append(f"asked for {request.url}"))
    context.on("console", lambda message: _harmless(message) or faults.append(f"console: {message.text}"))
    yield context.new_page()
    context.close()
    assert not faults, "; ".join(faults)


def _local(url: str) -> bool:
    return re.match(r"http://127\.0\.0\.1:\d+/|file:|data:|blob:", url) is not None


def _harmless(message) -> bool:
    # an answer that says no, or a server that is gone, is the test's own doing
    return message.type != "error" or message.text.startswith("Failed to load resource")


def pale(page) -> list[str]:
    """Visible texts whose contrast with what lies behind them is too small."""
    found = page.evaluate(f"{LOOKS} contrasts()")
    assert found, "there is no text on the page"
    return [f"{text!r}: {contrast:.2f}" for text, contrast in found if contrast < TEXT]


def overhang(page) -> list[str]:
    """Elements that hang over the page's right edge, where the page scrolls sideways."""
    return page.evaluate(f"{LOOKS} overhang()")


def nameless(page) -> list[str]:
    """Controls without a name, and buttons that a listener cannot tell apart, as the browser's own tree has them."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    said = [
        (n["role"]["value"], n.get("name", {}).get("value", ""), n.get("description", {}).get("value", ""))
        for n in nodes
        if not n["ignored"] and n["role"]["value"] in NAMED
    ]
    assert said, "there is no control on the page"
    bare = [f"{role} without a name" for role, name, _ in said if not name.strip()]
    buttons = [one for one in said if one[0] == "button"]
    alike = {one for one in buttons if buttons.count(one) > 1}
    return bare + [f"several buttons {name!r}, {more!r}" for _, name, more in alike]


def unfocused(page) -> list[str]:
    """Controls that Tab does not reach, or that do not show it."""
    page.evaluate(f"window.looks = (() => {{ {LOOKS} return focusWalk(); }})()")
    faults: list[str] = []
    for _ in range(page.evaluate("looks.count()") + 5):
        page.keyboard.press("Tab")
        step = page.evaluate("looks.step()")
        if step is None:
            break
        if not step:
            # past the last control, and before the first
            continue
        name, contrast = step
        if contrast < OUTLINE:
            faults.append(f"{name}: the focus shows with {contrast:.2f}")
    page.evaluate("document.activeElement.blur()")
    return faults + [f"{name}: Tab does not get there" for name in page.evaluate("looks.missed()")]
