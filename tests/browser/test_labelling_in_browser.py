"""The labelling page in a real browser: keys, touch, two people at once, languages, colours, hostile texts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browsing import nameless, opened, overhang, pale, unfocused
from fastapi import FastAPI
from fastapi.testclient import TestClient
from serving import served

from plaudit.config import PageConfig
from plaudit.pages.labelling import label_page
from plaudit.preferences.desk import Asking, Desk
from plaudit.preferences.exchange import exported
from plaudit.preferences.store import PreferenceStore
from plaudit.types import Answer, Comparison
from plaudit.web.door import Door
from plaudit.web.labelling import Standing, labelling_app
from plaudit.web.words import SHOWN, phrases

pytestmark = pytest.mark.browser

#: what a key says: the word in the store, and the places of the two answers as shown
MEANING = {
    "1": ("ranked", [0, 1]),
    "2": ("ranked", [1, 0]),
    "0": ("ranked", [0, 0]),
    "b": ("both_bad", [0, 0]),
    "s": ("skip", None),
}
#: what is pressed on the way through twenty questions; whatever is left then is answered with 2
WALK = "1 2 0 s u b ? 1 s 2 u u 0 reload 1 1 reason 2 b u reload 1 0 s 2 s ? 2 1 b u reason"
HOSTILE = (
    "<script>document.title='taken'; alert(1)</script>",
    "[press](javascript:alert(1)) <javascript:alert(1)> ![x](http://elsewhere.invalid/x.png) ![y](//elsewhere.invalid)",
    "'\"><img src=x onerror=\"document.title='taken'\"><svg onload=alert(1)>",
    "left \u202e thgir \u2066 \u200b",
    "broken \udcff and null \x00, bell \x07",
    "</div></form><form action=http://elsewhere.invalid/><button name=choice value=1>This one is better</button>",
    "x" * 1_000_000,
    "ẑ̸̧̛̟̝̬́͐" * 400 + "[" * 3000 + "\n\n|a|b|\n|-|-|\n|" + "w" * 500 + "|`c`|\n\n    " + "code " * 200,
)


@dataclass(frozen=True)
class Seen:
    """A question as it lies on the screen."""

    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Pressed:
    seen: Seen
    key: str
    reason: str = ""


def filled(path: Path, count: int = 6, k: int = 2, texts: Sequence[str] = ()) -> str:
    """A store of plain comparisons, or with each of some texts as a comparison's prompt and answers."""
    store = PreferenceStore(path, create=True)
    plain = [(f"prompt {i}", [f"answer {i}.{j}" for j in range(k)]) for i in range(count)]
    given = [(text, [f"{text}{j}" for j in range(k)]) for text in texts]
    store.add([Comparison(0, prompt, tuple(map(Answer, answers)), {}) for prompt, answers in given or plain])
    store.close()
    return str(path)


def rows(store: str) -> list[dict]:
    kept = PreferenceStore(store)
    found = list(exported(kept, "labels"))
    kept.close()
    return found


def by_place(row: dict) -> list[int] | None:
    """A row's places, by the answers as they were shown."""
    return row["ranks"] and [row["ranks"][i] for i in row["shown"]]


def said(row: dict) -> tuple[Seen, str, list[int] | None, str]:
    shown = tuple(row["answers"][i]["text"] for i in row["shown"])
    return Seen(row["prompt"], shown), row["said"], by_place(row), row["reason"]


@contextmanager
def at(store: str, **keys) -> Iterator[str]:
    with served(label_page(PageConfig(store=store, **keys)).app) as port:
        yield f"http://127.0.0.1:{port}"


def enter(page, address: str, name: str = "ann") -> None:
    page.goto(address)
    page.fill("#name", name)
    with page.expect_navigation():
        page.press("#name", "Enter")


def press(page, key: str) -> None:
    """A key that leads to another page."""
    with page.expect_navigation():
        page.keyboard.press(key)


def seen(page) -> Seen:
    return Seen(page.inner_text(".prompt .text"), tuple(page.locator(".answers .text").all_inner_texts()))


def waiting(page) -> bool:
    return page.locator("#question").count() == 1


# --- labelling --------------------------------------------------------------------------------------------------------


@contextmanager
def command(store: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """``plaudit label`` as a person starts it."""
    words = [sys.executable, "-m", "plaudit", "label", store, "--port", "0"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            found = next(filter(None, (re.search(r"http://\S+", line) for line in process.stdout)), None)
            assert found, "the command ended before it served"
            yield process, found[0]
        finally:
            process.kill()


def test_walk_twenty_comparisons_by_keys_alone_are_in_the_store_as_they_were_pressed(tmp_path, page):
    """With undo, a reload and a reason between, and a server that is killed at the end."""
    store = filled(tmp_path / "s.sqlite", count=20)
    pressed: list[Pressed] = []
    begun = time.monotonic()
    with command(store) as (process, address):
        page.goto(address)
        page.wait_for_selector("#name:focus")
        page.keyboard.type("ann")
        press(page, "Enter")
        for action in re.findall(r"\S+", WALK):
            before = seen(page)
            if action == "reload":
                page.reload()
                assert seen(page) == before
            elif action == "?":
                page.keyboard.press("?")
                assert page.locator("#keys p").is_visible() and seen(page) == before
            elif action == "u":
                press(page, "u")
                taken = pressed.pop()
                assert seen(page) == taken.seen, "what is taken back is asked again, in the same order"
            elif action == "reason":
                # the keys of the page are letters here
                while page.evaluate("document.activeElement.innerText") != phrases("en")["reason"]:
                    page.keyboard.press("Tab")
                page.keyboard.press("Enter")
                page.keyboard.press("Tab")
                page.keyboard.type("1 s u b, shorter?")
                page.keyboard.press("Escape")
                press(page, "1")
                pressed.append(Pressed(before, "1", "1 s u b, shorter?"))
            else:
                press(page, action)
                pressed.append(Pressed(before, action))
        while waiting(page):
            pressed.append(Pressed(seen(page), "2"))
            press(page, "2")
        assert "every question" in page.inner_text("main")
        press(page, "u")
        assert seen(page) == pressed.pop().seen, "the key works where nothing is left, too"
        pressed.append(Pressed(seen(page), "b"))
        press(page, "b")
        assert page.locator("text=every question").count() == 1
        process.kill()
    found = rows(store)
    assert [said(row) for row in found] == [(p.seen, *MEANING[p.key], p.reason) for p in pressed]
    assert len({p.seen.prompt for p in pressed}) == len(pressed) == 20
    assert {p.key for p in pressed} == set(MEANING)
    assert {(row["annotator"], row["kind"]) for row in found} == {("ann", "label")}
    assert 0 < sum(row["seconds"] for row in found) < time.monotonic() - begun


def kept_back(page, place: str) -> list:
    """Requests that wait until the test lets them go on."""
    held: list = []
    page.route(place, lambda route: held.append(route))
    return held


def test_keys_that_are_pressed_while_an_answer_is_on_its_way_say_nothing(tmp_path, page):
    store = filled(tmp_path / "s.sqlite")
    with at(store) as address:
        enter(page, address)
        for _ in range(3):
            press(page, "1")
        for way, key, left in (("answer", "2", 4), ("undo", "u", 3)):
            held = kept_back(page, f"**/{way}")
            page.keyboard.press(key)
            for more in ("1", "u", "s", "u"):
                page.keyboard.press(more)
            page.wait_for_timeout(100)
            with page.expect_navigation():
                for route in held:
                    route.continue_()
            page.unroute(f"**/{way}")
            assert waiting(page) and len(rows(store)) == left


def test_a_question_of_many_answers_by_keys(tmp_path, another):
    """Best of all, a ranking with a place that is given back, and ratings."""
    store = filled(tmp_path / "s.sqlite", count=3, k=4)
    keyed = {
        "best": (["3"], [1, 1, 0, 1], None),
        "rank": (["3", "1", "3", "4", "3", "2", "Enter"], [1, 3, 2, 0], None),
        "rate": (["2", "7", "5", "7", "Enter"], [3, 0, 2, 0], [2, 7, 5, 7]),
    }
    for mode, (keys, places, ratings) in keyed.items():
        with at(store, mode=mode) as address:
            page = another()
            enter(page, address)
            before = seen(page)
            for key in keys[:-1]:
                page.keyboard.press(key)
            press(page, keys[-1])
            row = rows(store)[-1]
            assert said(row) == (before, "ranked", places, "")
            assert ratings == (row["ratings"] and [row["ratings"][i] for i in row["shown"]])


def test_an_answer_without_all_its_places_is_refused_and_the_question_stays(tmp_path, page):
    store = filled(tmp_path / "s.sqlite", count=1, k=3)
    with at(store, mode="rank") as address:
        enter(page, address)
        before = seen(page)
        page.keyboard.press("2")
        press(page, "Enter")
        assert phrases("en")["not_answered"] in page.inner_text("main")
        with page.expect_navigation():
            page.click("main a")
        assert seen(page) == before and rows(store) == []


def test_by_touch_on_a_phone(tmp_path, phone):
    store = filled(tmp_path / "s.sqlite")
    with at(store) as address:
        phone.goto(address)
        phone.tap("#name")
        phone.keyboard.type("ann")
        with phone.expect_navigation():
            phone.tap("text=Begin")
        told = []
        for choice, key in (("2", "2"), ("equal", "0"), ("1", "1"), ("both_bad", "b"), ("skip", "s")):
            told.append(Pressed(seen(phone), key))
            with phone.expect_navigation():
                phone.tap(f"button[value='{choice}']")
        with phone.expect_navigation():
            phone.tap("button[form=undo]")
        assert seen(phone) == told.pop().seen
    assert [said(row) for row in rows(store)] == [(p.seen, *MEANING[p.key], "") for p in told]


def test_a_finger_hits_what_it_means_and_reads_of_no_keys(tmp_path, phone):
    with at(filled(tmp_path / "s.sqlite")) as address:
        enter(phone, address)
        small = phone.evaluate(
            "[...document.querySelectorAll('a, button, summary')].filter((e) => e.checkVisibility())"
            ".filter((e) => e.getBoundingClientRect().height < 24).map((e) => e.innerText)"
        )
        assert small == []
        assert phone.locator("kbd:visible, #keys:visible").count() == 0


def test_two_people_at_once_see_each_pair_once_and_both_are_recorded(tmp_path, another):
    store = filled(tmp_path / "s.sqlite")
    with at(store, overlap=2, repeat_every=0) as address:
        people = {name: another() for name in ("ann", "ben")}
        met: dict[str, list[Seen]] = {name: [] for name in people}
        for name, page in people.items():
            enter(page, address, name)
        for _ in range(6):
            for name, page in people.items():
                met[name].append(seen(page))
                press(page, "1")
        assert not any(map(waiting, people.values()))
    for name in people:
        mine = [row for row in rows(store) if row["annotator"] == name]
        assert [said(row)[0] for row in mine] == met[name] and len({s.prompt for s in met[name]}) == 6
        assert all(by_place(row) == [0, 1] for row in mine)


def test_a_label_is_changed_and_a_disagreement_decided_by_clicks(tmp_path, another):
    store = filled(tmp_path / "s.sqlite", count=1)
    with at(store, overlap=2) as address:
        ann, ben = another(), another()
        for page, name in ((ann, "ann"), (ben, "ben")):
            enter(page, address, name)
        first = seen(ann)
        press(ann, "1")
        press(ben, "1" if seen(ben).answers[0] == first.answers[0] else "2")
        ann.click(f"text={phrases('en')['mine']}")
        with ann.expect_navigation():
            ann.click(f"text={phrases('en')['change']}")
        assert seen(ann) == first and first.answers[0] in ann.inner_text(".note")
        press(ann, "2")
        ann.click(f"text={phrases('en')['admin']}")
        assert ann.locator(".case").count() == 1
        with ann.expect_navigation():
            ann.click(f".case button:has-text('{first.answers[1]}')")
        assert ann.locator(".case").count() == 0
    kept = PreferenceStore(store)
    (label,) = kept.preferences()
    kept.close()
    assert label.comparison.answers[label.ranks.index(0)].text == first.answers[1]


def test_without_scripts_a_label_is_given_by_clicking(tmp_path, another):
    store = filled(tmp_path / "s.sqlite")
    with at(store) as address:
        page = another(java_script_enabled=False)
        enter(page, address)
        before = seen(page)
        assert page.locator("kbd:visible, #keys:visible").count() == 0, "keys are for scripts"
        page.click("summary:has-text('Reason')")
        page.fill("textarea", "for a reason")
        with page.expect_navigation():
            page.click("button[value='2']")
        with page.expect_navigation():
            page.click("button[value='skip']")
        with page.expect_navigation():
            page.click("button[form=undo]")
        assert waiting(page)
    assert [said(row) for row in rows(store)] == [(before, *MEANING["2"], "for a reason")]


# --- who may come in --------------------------------------------------------------------------------------------------


def test_a_link_of_yesterday_opens_nothing_and_says_nothing(tmp_path, another, monkeypatch):
    import itsdangerous

    store = filled(tmp_path / "s.sqlite")
    config = PageConfig(store=store, people=["ann"], link_days=1)
    with monkeypatch.context() as past:
        then = time.time() - 86400 - 60
        past.setattr(itsdangerous.TimestampSigner, "get_timestamp", lambda self: int(then))
        old = dict(label_page(config).ways)["ann"]
    with served(label_page(config).app) as port:
        address = f"http://127.0.0.1:{port}"
        page = another()
        for path in (old, "/", "/mine", "/admin"):
            assert page.goto(address + path).status == 401
            assert "Ask whoever runs the page" in page.inner_text("main") and "prompt" not in page.inner_text("body")
        assert page.context.cookies() == []
        invited = another()
        assert invited.goto(address + dict(label_page(config).ways)["ann"]).status == 200
        assert waiting(invited) and rows(store) == []


# --- what a model may write -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("render", ["text", "markdown"])
def test_nothing_that_a_model_or_a_person_writes_does_anything(tmp_path, another, render):
    """The pages that these browsers have are the checks: no dialog, no error, no request to another machine."""
    store = filled(tmp_path / "s.sqlite", texts=HOSTILE)
    with at(store, render=render, overlap=2, repeat_every=0) as address:
        asked: set[str] = set()
        titles = {f"{phrases('en')[key]} – Plaudit" for key in ("ask_compare", "mine", "admin", "done_title")}

        def harmless(page) -> None:
            assert page.title() in titles
            assert page.locator("img, svg:not(.meter svg), iframe, script:not([src='/static/label.js'])").count() == 0
            hrefs = page.evaluate("[...document.links].map((a) => a.href)")
            assert all(re.match("https?:", href) for href in hrefs)
            assert not re.search("[\u202e\u2066\u200b\x00\x07]", page.content())
            assert page.locator("form[action^=http]").count() == 0
            assert overhang(page) == []

        for name, key in (("ann", "1"), ("ben", "2")):
            page = another(phone=name == "ann")
            page.on("request", lambda request: asked.add(urlsplit(request.url).netloc))
            enter(page, address, name)
            for _ in HOSTILE:
                harmless(page)
                assert page.locator("button.choose").count() == 2
                page.click("summary:has-text('Reason')")
                page.fill("textarea", HOSTILE[0] + HOSTILE[3])
                page.keyboard.press("Escape")
                press(page, key)
            assert not waiting(page)
            harmless(page)
            for path in ("/mine", "/admin"):
                page.goto(address + path)
                harmless(page)
        assert page.locator(".case").count() > 0, "hostile texts stand on the overview too"
        assert asked <= {urlsplit(address).netloc, ""}
    assert len(rows(store)) == 2 * len(HOSTILE)


def test_a_million_characters_are_shown_whole_in_a_tab_of_their_own(tmp_path, page):
    with at(filled(tmp_path / "s.sqlite", texts=HOSTILE[6:7])) as address:
        begun = time.monotonic()
        enter(page, address)
        # of the prompt and of both answers as much as a page shows at once, and what stands around them
        assert 3 * SHOWN < len(page.inner_text("body")) < 3 * SHOWN + 1000
        with page.context.expect_page() as opening:
            page.click("text=1,000,001 characters >> nth=0")
        whole = opening.value
        whole.wait_for_load_state()
        assert len(whole.inner_text("body")) == 1_000_001
        press(page, "1")
        assert not waiting(page)
        assert time.monotonic() - begun < 10


# --- how it looks -----------------------------------------------------------------------------------------------------


class _Asks:
    """Two models that nobody waits for."""

    def ask(self, prompt: str) -> None: ...

    def standing(self) -> Standing:
        return Standing("first", "second", 3, 0.5, 0.1, 0.9)


@dataclass(frozen=True)
class Sites:
    """Addresses of pages over stores in which everything that can be shown stands."""

    compare: str
    best: str
    rank: str
    rate: str
    empty: str
    marked: str
    contest: str


@pytest.fixture(scope="module")
def sites(tmp_path_factory) -> Iterator[Sites]:
    folder = tmp_path_factory.mktemp("sites")
    (folder / "guidelines.md").write_text("# Better\n\n- *shorter*, see [rules](http://elsewhere.invalid/)\n- `true`\n")
    store = filled(folder / "a.sqlite", count=12)
    texts = ["# Title\n\n|a|b|\n|-|-|\n|1|`code`|\n\n> said\n\n    code " + "wide " * 60, "word" * 6000]
    PreferenceStore(folder / "empty.sqlite", create=True).close()
    app = label_page(PageConfig(store=store, overlap=2, guidelines=str(folder / "guidelines.md"))).app
    # every page below is walked several times, so that nobody may run out of questions; these two disagree
    for name in ("ann", "ben"):
        person = TestClient(app, base_url="http://127.0.0.1")
        person.post("/enter", data={"name": name})
        for _ in range(4):
            shown = person.get("/").text
            first = re.findall(r"answer \d+\.(\d)", shown)[0] == "0"
            key = re.search(r'name="key" value="(\w+)"', shown)[1]
            choice = "1" if first == (name == "ann") else "2"
            person.post("/answer", data={"key": key, "choice": choice, "reason": "a reason of a long" + "g" * 80})
    empty = PreferenceStore(folder / "contest.sqlite", create=True)
    contest = labelling_app(Desk(empty, Asking()), Door("s", open_house=True, days=1), contest=_Asks())
    marked = filled(folder / "marked.sqlite", texts=texts)
    with ExitStack() as stack:

        def there(app: FastAPI) -> str:
            return f"http://127.0.0.1:{stack.enter_context(served(app))}"

        modes = {
            mode: stack.enter_context(at(filled(folder / f"{mode}.sqlite", k=4), mode=mode))
            for mode in ("best", "rank", "rate")
        }
        yield Sites(
            compare=there(app),
            empty=stack.enter_context(at(str(folder / "empty.sqlite"))),
            marked=stack.enter_context(at(marked, render="markdown")),
            contest=there(contest),
            **modes,
        )
    empty.close()


def every_page(page, sites: Sites) -> Iterator[str]:
    """Opens each page there is in turn, with all that can be opened on it, and says its name."""

    def unfold(name: str) -> str:
        for closed in page.locator("details:not([open]) > summary").all():
            if closed.is_visible():
                closed.click()
        return name

    page.goto(sites.compare)
    yield "who"
    page.fill("#name", "<b>")
    with page.expect_navigation():
        page.press("#name", "Enter")
    yield "no name"
    enter(page, sites.compare, "ann")
    yield unfold("question")
    for path, name in (("/mine", "mine"), ("/admin", "overview"), ("/nowhere", "message")):
        page.goto(sites.compare + path)
        yield name
    page.goto(sites.compare + "/mine")
    with page.expect_navigation():
        page.click("td button >> nth=0")
    yield unfold("revision")
    for mode in ("best", "rank", "rate"):
        enter(page, getattr(sites, mode), "ann")
        page.keyboard.press("3") if mode != "best" else None
        yield unfold(mode)
    enter(page, sites.empty, "ann")
    yield "empty"
    enter(page, sites.contest, "ann")
    yield "ask"
    enter(page, sites.marked, "ann")
    while waiting(page):
        yield unfold("texts")
        press(page, "1")
    yield "end"
    # all is as it was for who comes next
    press(page, "u")
    yield unfold("undone")
    press(page, "u")


@pytest.mark.parametrize("locale", ["en", "zh-CN"])
def test_nothing_hangs_over_on_a_phone(sites, another, locale):
    page = another(phone=True, locale=locale)
    faults = {name: found for name in every_page(page, sites) if (found := overhang(page))}
    assert faults == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_stands_out_from_what_lies_behind_it(sites, another, scheme):
    page = another(color_scheme=scheme)
    faults = {name: found for name in every_page(page, sites) if (found := pale(page))}
    assert faults == {}


def test_every_control_has_a_name_that_tells_it_from_the_others(sites, another):
    page = another()
    faults = {name: found for name in every_page(page, sites) if (found := nameless(page))}
    assert faults == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tab_gets_everywhere_and_shows_where_it_is(sites, another, scheme):
    page = another(color_scheme=scheme)
    faults = {name: found for name in every_page(page, sites) if (found := unfocused(page))}
    assert faults == {}


def test_a_chinese_browser_gets_chinese_pages(sites, another):
    page = another(locale="zh-CN")
    #: what is no language of the page: names, keys, and the way to the other language
    kept = {"Plaudit", "English", "UTC", "ann", "ben", "first", "second", "export", "jsonl"}
    kept |= set(re.findall("[A-Za-z]{3,}", re.sub(r"{\w+}", "", " ".join(phrases("zh").values()))))
    for name in every_page(page, sites):
        assert page.get_attribute("html", "lang") == "zh"
        text = page.evaluate(
            "(() => { const copy = document.body.cloneNode(true);"
            " copy.querySelectorAll('.text, textarea, kbd, option, .case span, .note').forEach((e) => e.remove());"
            " return copy.textContent; })()"
        )
        assert re.search("[\u4e00-\u9fff]", text), name
        assert set(re.findall("[A-Za-z]{3,}", text)) <= kept, name
    page.goto(sites.rate)
    with page.expect_navigation():
        page.click("text=English")
    assert page.get_attribute("html", "lang") == "en" and phrases("en")["who"] in page.inner_text("body")


def test_the_first_page_weighs_little_and_comes_from_one_server(tmp_path, another):
    with at(filled(tmp_path / "s.sqlite")) as address:
        page = another()
        sizes: dict[str, int] = {}

        def add(request) -> None:
            told = request.sizes()
            # what comes from the browser's memory the second time weighs nothing then
            sizes[request.url] = sizes.get(request.url, 0) + told["responseBodySize"] + told["responseHeadersSize"]

        page.on("requestfinished", add)
        page.goto(address)
        page.wait_for_load_state("networkidle")
        page.fill("#name", "ann")
        with page.expect_navigation():
            page.press("#name", "Enter")
        page.wait_for_load_state("networkidle")
        asked = [url for url in sizes if not url.startswith("data:")]
        assert {urlsplit(url).netloc for url in asked} == {urlsplit(address).netloc}
        assert {urlsplit(url).path for url in asked} >= {"/", "/static/style.css", "/static/label.js"}
        assert all(sizes[url] > 0 for url in asked) and sum(sizes.values()) < 150_000


def test_the_checks_see_what_they_look_for(chromium):
    watched = opened(chromium)
    page = next(watched)
    page.set_content(
        "<body style='background: #fff'><p style='color: #999'>pale</p><p style='opacity: .5'>paler</p><p>plain</p>"
        "<div style='width: 3000px'>wide</div><button></button><a href='#x' style='outline: none'>link</a>"
        "<button>same</button><button>same</button><button tabindex='-1'>missed</button>"
        "<img src='http://elsewhere.invalid/x.png'><script>console.error('oh'); alert(1)</script>"
    )
    assert [line.split(":")[0] for line in pale(page)] == ["'pale'", "'paler'"]
    assert len(overhang(page)) == 1
    assert nameless(page) == ["button without a name", "several buttons 'same', ''"]
    faults = unfocused(page)
    assert any(fault.startswith("a link") for fault in faults) and "button missed: Tab does not get there" in faults
    page.wait_for_timeout(200)
    with pytest.raises(AssertionError) as told:
        next(watched, None)
    for fault in ("elsewhere.invalid", "console: oh", "dialog: 1"):
        assert fault in str(told.value)
