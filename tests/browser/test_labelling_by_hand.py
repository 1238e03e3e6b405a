"""The labelling page in a real browser: by keyboard, by touch, by two people, in Chinese, in the dark, under attack."""

from __future__ import annotations

import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import served

from plaudit.config import PageConfig
from plaudit.preferences.store import PreferenceStore
from plaudit.recipes.pages import label_page
from plaudit.types import Answer, Comparison

pytestmark = pytest.mark.browser

HOSTILE = (
    "<script>document.title='taken'</script>",
    "[press](javascript:document.title='taken') ![x](http://elsewhere.example/x.png) <img src=x onerror=alert(1)>",
    "left \u202e thgir \u200b and \x00 and \x07 and \udc80",
    "word " * 200_000,
)
#: text whose contrast with what lies behind it is below 4.5, of all text that can be seen
FAINT = """() => {
  const parts = c => (c.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const light = c => c.slice(0, 3).map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor);
    if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll("body *")].filter(e => e.checkVisibility() && !e.closest("[disabled]") &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
      const [a, b] = [light(parts(getComputedStyle(e).color)), light(behind(e))];
      return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.textContent.trim().slice(0, 30)];
    }).filter(([contrast]) => contrast < 4.5);
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input:not([type=hidden]), select, textarea, a")].filter(e =>
  e.checkVisibility() && !(e.textContent.trim() || e.getAttribute("aria-label") || (e.labels && e.labels.length)))
  .map(e => e.outerHTML)"""


def comparisons(count: int, k: int = 2) -> list[Comparison]:
    return [Comparison(0, f"prompt {i}", tuple(Answer(f"answer {i}.{j}") for j in range(k))) for i in range(count)]


@contextmanager
def labelling(path: Path, asked: list[Comparison], **keys: Any):
    """The page over a new store: its address, its store, and each person's way in."""
    store = str(path / "s.sqlite")
    opened = PreferenceStore(store, create=True)
    opened.add(asked)
    opened.close()
    made = label_page(PageConfig(store=store, **{"repeat_every": 0, "check_every": 0} | keys))
    with served(made.app) as port:
        yield f"http://127.0.0.1:{port}", store, dict(made.ways)


def enter(page: Any, address: str, name: str = "ann") -> None:
    page.goto(address)
    page.fill("#name", name)
    page.keyboard.press("Enter")
    page.wait_for_selector("#question")


def said(store: str) -> list[Any]:
    opened = PreferenceStore(store)
    found = opened.preferences()
    opened.close()
    return found


def press(page: Any, key: str) -> None:
    """A key, and the page that follows."""
    with page.expect_navigation():
        page.keyboard.press(key)


def shown(page: Any) -> list[str]:
    """The answers that lie there, in the order shown."""
    return [t.strip() for t in page.locator(".answers .text").all_inner_texts()]


def test_walk_twenty_labels_by_keyboard(page, tmp_path):
    """Chosen, equal, skipped, undone, with a reload in between: the store holds exactly what was meant."""
    meant: dict[str, tuple[str, ...]] = {}
    with labelling(tmp_path, comparisons(24)) as (address, store, _):
        enter(page, address)
        page.keyboard.press("?")
        assert page.locator("#keys[open]").count() == 1
        for turn in range(20):
            answers = shown(page)
            question = re.match(r"answer (\d+)", answers[0])[1]
            if turn == 5:
                press(page, "s")
                continue
            if turn == 8:
                press(page, "2")
                press(page, "u")
                assert shown(page) == answers, "what was undone lies there again"
            if turn == 11:
                page.reload()
                assert shown(page) == answers, "a reload asks the same"
            key = "0" if turn in (3, 14) else "12"[turn % 2]
            press(page, key)
            meant[question] = () if key == "0" else (answers[int(key) - 1],)
        found = {}
        for label in said(store):
            texts = [a.text for a in label.comparison.answers]
            best = tuple(t for t, rank in zip(texts, label.ranks, strict=True) if rank == 0)
            found[re.match(r"answer (\d+)", texts[0])[1]] = best if len(best) == 1 else ()
        assert found == meant and len(found) == 19
        page.goto(f"{address}/mine")
        assert page.locator("main").inner_text().count("prompt") >= 19


def test_walk_by_touch_on_a_phone(phone, tmp_path):
    with labelling(tmp_path, comparisons(3)) as (address, store, _):
        enter(phone, address)
        for _ in range(3):
            with phone.expect_navigation():
                phone.tap("button.choose >> nth=1")
        assert phone.locator("#question").count() == 0
        assert [label.ranks[label.order[1]] for label in said(store)] == [0, 0, 0]


def test_two_people_at_once_see_every_pair_once_each(another, tmp_path):
    with labelling(tmp_path, comparisons(6), overlap=2) as (address, store, _):
        ann, ben = another(), another()
        enter(ann, address, "ann")
        enter(ben, address, "ben")
        for _ in range(6):
            press(ann, "1")
            press(ben, "2")
        labels = said(store)
        assert len(labels) == 12
        for name in ("ann", "ben"):
            assert len({label.comparison.id for label in labels if label.annotator == name}) == 6


@pytest.mark.parametrize(
    ("mode", "keys", "ranks"),
    [("best", ["3"], {0: 1, 1: 1, 2: 0}), ("rank", ["2", "1", "3", "Enter"], {0: 1, 1: 0, 2: 2})],
)
def test_other_modes_by_keyboard(page, tmp_path, mode, keys, ranks):
    with labelling(tmp_path, comparisons(1, k=3), mode=mode) as (address, store, _):
        enter(page, address)
        for key in keys[:-1]:
            page.keyboard.press(key)
        press(page, keys[-1])
        (label,) = said(store)
        assert {place: label.ranks[i] for place, i in enumerate(label.order)} == ranks


def test_ratings_by_keyboard(page, tmp_path):
    with labelling(tmp_path, comparisons(1), mode="rate") as (address, store, _):
        enter(page, address)
        page.keyboard.press("3")
        page.keyboard.press("6")
        press(page, "Enter")
        (label,) = said(store)
        assert label.ranks[label.order[1]] == 0


@pytest.mark.parametrize("render", ["text", "markdown"])
def test_nothing_that_a_model_wrote_can_run(page, tmp_path, render):
    """The fixture fails on a dialog and on a script's error."""
    asked = [Comparison(0, text, (Answer(text), Answer(f"{text}!"))) for text in HOSTILE]
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    with labelling(tmp_path, asked, render=render) as (address, store, _):
        enter(page, address)
        for _ in HOSTILE:
            assert "taken" not in page.title()
            for link in page.locator(".text a").all():
                assert not (link.get_attribute("href") or "").startswith("javascript")
            assert not page.locator(".text script, .text img").count()
            press(page, "1")
        assert len(said(store)) == len(HOSTILE)
        assert all(url.startswith((address, "data:")) for url in requests)


def test_a_chinese_browser_is_answered_in_chinese(another, tmp_path):
    with labelling(tmp_path, comparisons(2)) as (address, _, _):
        page = another(locale="zh-CN")
        enter(page, address)
        assert page.locator("html").get_attribute("lang").startswith("zh")
        assert "哪个" in page.locator("h1").inner_text()
        page.click("text=English")
        assert page.locator("html").get_attribute("lang") == "en"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_and_everything_has_a_name(another, tmp_path, scheme):
    with labelling(tmp_path, comparisons(3), guidelines="") as (address, _, _):
        page = another(color_scheme=scheme)
        page.goto(address)
        assert page.evaluate(FAINT) == [] and page.evaluate(NAMELESS) == []
        enter(page, address)
        for path in ("/", "/mine", "/admin", "/nowhere"):
            page.goto(address + path)
            assert page.evaluate(FAINT) == [], path
            assert page.evaluate(NAMELESS) == [], path
        page.goto(address)
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"


def test_nothing_hangs_over_on_a_phone(phone, tmp_path):
    long = "x" * 400
    asked = [Comparison(0, long, (Answer(long), Answer("short")))]
    with labelling(tmp_path, asked) as (address, _, _):
        enter(phone, address)
        for path in ("/", "/mine", "/admin", "/nowhere"):
            phone.goto(address + path)
            assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth"), path


def test_without_scripts_a_label_can_be_given(another, tmp_path):
    with labelling(tmp_path, comparisons(1)) as (address, store, _):
        page = another(java_script_enabled=False)
        page.goto(address)
        page.fill("#name", "ann")
        page.click("button.choose")
        page.click("button.choose >> nth=0")
        assert len(said(store)) == 1


def test_a_link_that_has_expired_lets_nobody_in(page, tmp_path):
    with labelling(tmp_path, comparisons(1), people=["ann"], link_days=1 / 86400) as (address, _, ways):
        page.goto(address + ways["ann"])
        page.wait_for_selector("#question")
        page.wait_for_timeout(2200)
        for where in (address, address + ways["ann"]):
            assert page.goto(where).status == 401
            assert page.locator("body").inner_text().strip() == "401"


def test_a_page_is_light(page, tmp_path):
    weights: list[int] = []
    page.on("response", lambda response: weights.append(len(response.body())))
    with labelling(tmp_path, comparisons(2)) as (address, _, _):
        enter(page, address)
        page.wait_for_load_state("networkidle")
        assert 3_000 < sum(weights) < 150_000
