"""The labelling page as a browser sees it: what is asked, what counts, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from markupsafe import escape

from plaudit.config import PageConfig
from plaudit.pages.labelling import label_page
from plaudit.pages.watching import watch_page
from plaudit.preferences.desk import Asking, Desk, Said
from plaudit.preferences.store import PreferenceStore
from plaudit.types import Answer, Comparison
from plaudit.web.words import phrases

HOSTILE = [
    "<script>document.title='taken'</script>",
    "[press](javascript:alert(1)) ![x](http://elsewhere.example/x.png)",
    "left \u202e thgir",
    "null \x00 byte, bell \x07",
    "'\"><img src=x onerror=alert(1)>",
]


def filled(path: Path, count: int = 6, k: int = 2) -> str:
    store = PreferenceStore(path, create=True)
    store.add(
        [
            Comparison(0, f"prompt {i}", tuple(Answer(f"answer {i}.{j}") for j in range(k)), {"model": "m"})
            for i in range(count)
        ]
    )
    store.close()
    return str(path)


@pytest.fixture
def store(tmp_path: Path) -> str:
    return filled(tmp_path / "s.sqlite")


def _run(folder: Path) -> Path:
    """A run folder that can be watched."""
    (folder / "config.json").write_text('{"command": "ppo"}')
    return folder


def browser(app: FastAPI) -> TestClient:
    return TestClient(app, base_url="http://127.0.0.1")


def page(store: str, name: str | None = "ann", **keys) -> TestClient:
    """A browser before the page, with a name where one is given."""
    client = browser(label_page(PageConfig(store=store, **keys)).app)
    if name:
        client.post("/enter", data={"name": name})
    return client


def key(client: TestClient) -> str:
    return re.search(r'name="key" value="(\w+)"', client.get("/").text)[1]


def answer(client: TestClient, choice: str = "1", **more):
    return client.post("/answer", data={"key": key(client), "choice": choice, "seconds": "1.5"} | more)


def said(store: str):
    opened = PreferenceStore(store)
    found = opened.preferences()
    opened.close()
    return found


def shown_texts(client: TestClient) -> list[str]:
    return re.findall(r"answer \d+\.\d+", client.get("/").text)


# --- labelling --------------------------------------------------------------------------------------------------------


def test_a_choice_is_stored_with_who_said_it_how_it_was_shown_and_how_long_it_took(store):
    client = page(store)
    first = shown_texts(client)
    assert answer(client, "2").status_code == 200
    (label,) = said(store)
    assert label.annotator == "ann" and label.comparison.provenance == {"model": "m"}
    texts = [a.text for a in label.comparison.answers]
    assert texts[label.ranks.index(0)] == first[1]
    assert [texts[i] for i in label.order] == first
    assert 0 <= label.seconds <= 1.5


@pytest.mark.parametrize(("choice", "ranks"), [("equal", (0, 0)), ("both_bad", (0, 0))])
def test_ties(store, choice, ranks):
    client = page(store)
    answer(client, choice)
    assert said(store)[0].ranks == ranks


def test_everything_is_asked_once_and_then_nothing(store):
    client = page(store, repeat_every=0)
    prompts = set()
    for _ in range(6):
        prompts.add(re.search(r"prompt \d", client.get("/").text)[0])
        answer(client)
    assert len(prompts) == 6
    assert "You have answered every question" in client.get("/").text
    assert len(said(store)) == 6


def test_a_skipped_question_is_no_preference_and_does_not_come_back_but_goes_to_another(store):
    client = page(store, repeat_every=0)
    for _ in range(6):
        answer(client, "skip")
    assert said(store) == []
    assert "every question" in client.get("/").text
    assert "prompt" in page(store, "ben").get("/").text


def test_reloading_and_a_second_tab_show_the_same_question(store):
    client = page(store)
    assert key(client) == key(client) and shown_texts(client) == shown_texts(client)


def test_a_double_click_and_a_resent_request_count_once(store):
    client = page(store)
    form = {"key": key(client), "choice": "1", "seconds": "1"}
    for _ in range(3):
        assert client.post("/answer", data=form).status_code == 200
    assert len(said(store)) == 1


def test_undo_takes_back_and_asks_again_in_the_same_order(store):
    client = page(store)
    first = shown_texts(client)
    answer(client, "1")
    assert shown_texts(client) != first
    client.post("/undo")
    assert said(store) == [] and shown_texts(client) == first
    answer(client, "2")
    assert [p.comparison.answers[p.ranks.index(0)].text for p in said(store)] == [first[1]]


def test_undo_goes_further_back_each_time(store):
    client = page(store)
    for _ in range(3):
        answer(client)
    for left in (2, 1, 0):
        client.post("/undo")
        assert len(said(store)) == left


def test_an_own_label_can_be_revised_and_stands_until_then(store):
    client = page(store)
    first = shown_texts(client)
    answer(client, "1", reason="shorter")
    listed = client.get("/mine").text
    assert first[0] in listed and "shorter" in listed
    client.post(re.search(r'action="(/revise/\d+)"', listed)[1])
    assert len(said(store)) == 1
    again = client.get("/").text
    assert "You are changing an earlier answer" in again and "shorter" in again
    answer(client, "2")
    assert [p.comparison.answers[p.ranks.index(0)].text for p in said(store)] == [first[1]]


def test_best_of_k_ranking_and_rating(tmp_path):
    store = filled(tmp_path / "s.sqlite", count=3, k=3)
    best = page(store, mode="best")
    first = shown_texts(best)
    answer(best, "3")
    (label,) = said(store)
    assert sorted(label.ranks) == [0, 1, 1]
    assert label.comparison.answers[label.ranks.index(0)].text == first[2]
    rank = page(store, mode="rank")
    first = shown_texts(rank)
    answer(rank, "submit", place_1="2", place_2="1", place_3="2")
    label = said(store)[1]
    assert [label.ranks[i] for i in label.order] == [1, 0, 1]
    rate = page(store, mode="rate")
    answer(rate, "submit", rating_1="2", rating_2="7", rating_3="5")
    label = said(store)[2]
    assert [label.ranks[i] for i in label.order] == [2, 0, 1]


def test_two_of_four_are_asked_pair_by_pair_without_the_other_answers(tmp_path):
    store = filled(tmp_path / "s.sqlite", count=1, k=4)
    client = page(store, mode="compare", repeat_every=0)
    seen = set()
    for _ in range(6):
        shown = shown_texts(client)
        assert len(shown) == 2
        seen.add(frozenset(shown))
        answer(client, "1")
    assert len(seen) == 6
    assert all(len(p.ranks) == len(p.comparison.answers) == 2 for p in said(store))


# --- several people ---------------------------------------------------------------------------------------------------


def test_people_share_the_questions_and_overlap_says_how_many_answer_each(store):
    ann, ben, eve = (page(store, name, overlap=2, repeat_every=0) for name in ("ann", "ben", "eve"))
    for _ in range(6):
        for client in (ann, ben, eve):
            if 'name="key"' in client.get("/").text:
                answer(client)
    by_question: dict[str, list[str]] = {}
    for p in said(store):
        by_question.setdefault(p.comparison.prompt, []).append(p.annotator)
    assert all(len(set(who)) == len(who) == 2 for who in by_question.values()) and len(by_question) == 6


def test_what_lies_before_one_person_is_not_laid_before_another(store):
    open_to_all = [re.search(r"prompt \d", page(store, name).get("/").text)[0] for name in ("ann", "ben", "eve")]
    assert len(set(open_to_all)) == 3


def test_with_overlap_as_many_people_see_a_question_at_once_as_may_answer_it(store):
    people = ("ann", "ben", "eve", "dan", "fay")
    before = [re.search(r"prompt \d", page(store, name, overlap=2).get("/").text)[0] for name in people]
    assert before[0] == before[1] != before[2] == before[3] and before[4] not in before[:4]


def test_people_see_answers_in_different_orders(tmp_path):
    store = filled(tmp_path / "s.sqlite", count=40)
    ann, ben = (page(store, name, overlap=2, repeat_every=0) for name in ("ann", "ben"))
    for _ in range(40):
        answer(ann)
        answer(ben)
    orders = {name: [p.order for p in said(store) if p.annotator == name] for name in ("ann", "ben")}
    assert 10 < sum(order == (0, 1) for order in orders["ann"]) < 30
    assert orders["ann"] != orders["ben"]


def test_a_person_is_asked_again_now_and_then_and_it_is_no_second_label(tmp_path):
    store = filled(tmp_path / "s.sqlite", count=40)
    client = page(store, repeat_every=5)
    for _ in range(30):
        text = client.get("/").text
        first, second = re.findall(r"answer \d+\.(\d+)", text)
        answer(client, "1" if first < second else "2")
    labels = said(store)
    assert len({p.comparison.id for p in labels}) == len(labels) < 30
    overview = client.get("/admin").text
    assert re.search(r"Same when asked again</th><td>100% ", overview)


def test_attention_checks_are_asked_and_are_nobodys_preference(tmp_path):
    from plaudit.recipes.stores import store_import

    store = filled(tmp_path / "s.sqlite", count=10)
    file = tmp_path / "checks.jsonl"
    file.write_text(json.dumps({"prompt": "one and one?", "chosen": "two", "rejected": "five"}))
    store_import(store, str(file), checks=True)
    client = page(store, check_every=3, repeat_every=0)
    asked = []
    for _ in range(5):
        text = client.get("/").text
        asked.append("one and one?" in text)
        shown = re.findall(r">(two|five)<", text)
        answer(client, "1" if shown[:1] == ["two"] else "2")
    assert asked == [False, False, True, False, False]
    assert len(said(store)) == 4
    assert "100%" in client.get("/admin").text


def test_a_disagreement_is_shown_and_the_verdict_stands_for_all(store):
    ann, ben = (page(store, name, overlap=2) for name in ("ann", "ben"))
    for client, wanted in ((ann, "0"), (ben, "1")):
        first = re.findall(r"answer \d+\.(\d+)", client.get("/").text)
        answer(client, "1" if first[0] == wanted else "2")
    overview = ann.get("/admin").text
    assert overview.count("best: answer") == 2
    question = re.search(r'name="question" value="(\d+)"', overview)[1]
    assert ann.post("/decide", data={"question": question, "best": "1"}).status_code == 200
    (label,) = said(store)
    assert label.ranks == (1, 0)
    assert "No question has differing labels" in ann.get("/admin").text


def test_what_an_ensemble_disagrees_on_comes_first_until_that_order_is_taken_back(store):
    opened = PreferenceStore(store)
    desk = Desk(opened, Asking(repeat_every=0))

    def order(name: str) -> list[str]:
        prompts = []
        while asked := desk.next(name):
            prompts.append(asked.prompt)
            desk.answer(name, asked.key, lambda count: Said("skip"))
        return prompts

    at_random = order("ann")
    # two members, further apart from question to question
    apart = {question: [[i, 0.0], [0.0, i]] for i, (question, _, _) in enumerate(desk.open_questions(), 1)}
    prompts = {question: prompt for question, prompt, _ in desk.open_questions()}
    desk.ask_first(apart)
    assert order("ben") == [prompts[question] for question in reversed(apart)] != at_random
    desk.ask_at_random()
    assert order("eve") == at_random
    opened.close()


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("render", ["text", "markdown"])
@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_that_a_model_writes_can_run_or_hide(tmp_path, text, render):
    opened = PreferenceStore(tmp_path / "s.sqlite", create=True)
    opened.add([Comparison(0, text, (Answer(text), Answer(text + "!")), {})])
    opened.close()
    response = page(str(tmp_path / "s.sqlite"), render=render).get("/")
    body = response.text.replace('<script src="/static/label.js" defer></script>', "")
    assert not re.search(r"<script|<img|onerror=[^&]*>|href=\"javascript", body.replace("&lt;", ""))
    assert not re.search("[\u202e\x00\x07]", body)
    assert "script-src 'self'" in response.headers["content-security-policy"]


def test_a_long_text_is_cut_and_can_be_opened_whole(tmp_path):
    opened = PreferenceStore(tmp_path / "s.sqlite", create=True)
    opened.add([Comparison(0, "p", (Answer("word " * 200_000), Answer("short")), {})])
    opened.close()
    client = page(str(tmp_path / "s.sqlite"))
    body = client.get("/").text
    assert len(body) < 60_000
    link = re.search(r'href="(/text/\d)"', body)[1]
    whole = client.get(link)
    assert len(whole.text) == 1_000_000 and whole.headers["content-type"].startswith("text/plain")


def test_model_names_are_hidden(tmp_path):
    opened = PreferenceStore(tmp_path / "s.sqlite", create=True)
    opened.add([Comparison(0, "p", (Answer("a"), Answer("b")), {"model": "secret-model-7"})])
    opened.close()
    client = page(str(tmp_path / "s.sqlite"))
    assert "secret-model-7" not in client.get("/").text
    answer(client)
    assert "secret-model-7" not in client.get("/mine").text


def test_the_page_speaks_chinese_where_asked(store):
    client = page(store)
    chosen = client.get("/", headers={"accept-language": "zh-CN,zh;q=0.9,en;q=0.5"}).text
    assert "哪个回答更好" in chosen and 'lang="zh"' in chosen
    client.get("/language/zh")
    assert "哪个回答更好" in client.get("/").text


def test_guidelines_stand_beside_the_question(store, tmp_path):
    (tmp_path / "g.md").write_text("# Rules\n\nPrefer *short* answers. <script>x</script>")
    text = page(store, guidelines=str(tmp_path / "g.md")).get("/").text
    assert "<em>short</em>" in text and "<script>x" not in text


def test_a_page_weighs_little_and_needs_no_other_server(store):
    client = page(store)
    weight = 0
    for path in ("/", "/static/style.css", "/static/label.js"):
        body = client.get(path)
        weight += len(body.content)
        assert not re.search(r"https?://|//[a-z]+\.", body.text)
    assert weight < 150_000


# --- what is refused --------------------------------------------------------------------------------------------------


def test_links_let_in_whom_they_name_and_nobody_else(store):
    made = label_page(PageConfig(store=store, people=["ann", "ben"]))
    ways = dict(made.ways)
    assert set(ways) == {"ann", "ben", "admin"}
    stranger = browser(made.app)
    for path in ("/", "/mine", "/admin", "/export.jsonl", "/enter/abc", "/text/1"):
        response = stranger.get(path)
        assert response.status_code == 401 and "Ask whoever runs the page" in response.text
    assert stranger.post("/enter", data={"name": "ann"}).status_code == 401
    assert stranger.post("/answer", data={"key": "x", "choice": "1"}).status_code == 401
    ann = browser(made.app)
    assert "Which answer" in ann.get(ways["ann"]).text
    assert ann.get("/admin").status_code == 401
    admin = browser(made.app)
    admin.get(ways["admin"])
    assert admin.get("/admin").status_code == 200
    # links outlive a restart
    again = browser(label_page(PageConfig(store=store, people=["ann", "ben"])).app)
    assert again.get(ways["ann"]).status_code == 200


def test_a_link_expires(store, monkeypatch):
    import itsdangerous.timed

    made = label_page(PageConfig(store=store, people=["ann"], link_days=2))
    client = browser(made.app)
    assert client.get(made.ways[0][1]).status_code == 200
    real = itsdangerous.timed.time.time
    monkeypatch.setattr(itsdangerous.timed.time, "time", lambda: real() + 3 * 86400)
    assert client.get("/").status_code == 401
    assert browser(made.app).get(made.ways[0][1]).status_code == 401


@pytest.mark.parametrize(
    "headers", [{"origin": "http://elsewhere.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}]
)
def test_a_request_from_another_page_is_refused(store, headers):
    client = page(store)
    form = {"key": key(client), "choice": "1"}
    assert client.post("/answer", data=form, headers=headers).status_code == 403
    assert said(store) == []


def test_another_name_for_this_machine_is_refused(store):
    assert page(store).get("/", headers={"host": "elsewhere.example"}).status_code == 400


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ({"choice": "7"}, 409),
        ({"choice": ""}, 409),
        ({"choice": "submit"}, 409),
        ({"choice": "1", "key": "00"}, 409),
        ({"choice": "1", "key": ""}, 409),
        ({"choice": "1", "reason": "x" * 2001}, 409),
        ({"choice": "1", "reason": "x" * 100_000}, 413),
        ({"choice": "-1"}, 409),
        ({"choice": "²"}, 409),
        ({}, 409),
    ],
)
def test_what_is_no_answer_is_refused_in_words_and_nothing_is_written(store, form, status):
    client = page(store)
    response = client.post("/answer", data={"key": key(client)} | form)
    assert response.status_code == status
    assert "Traceback" not in response.text and "Back to the question" in response.text
    assert said(store) == []


@pytest.mark.parametrize("path", ["/revise/999", "/revise/x", "/revise/99999999999999999999"])
def test_a_label_that_does_not_exist_cannot_be_revised(store, path):
    response = page(store).post(path)
    assert response.status_code in (400, 409) and "Nothing was written" in response.text


@pytest.mark.parametrize("form", [{"question": "999", "best": "0"}, {"question": "1", "best": "9"}, {"best": "0"}])
def test_a_verdict_over_what_does_not_exist_is_refused(store, form):
    response = page(store).post("/decide", data=form)
    assert response.status_code in (400, 409) and "Nothing was written" in response.text


def test_another_persons_label_cannot_be_revised_or_answered(store):
    ann, ben = page(store, "ann"), page(store, "ben")
    open_before_ann = key(ann)
    answer(ann)
    listed = ann.get("/mine").text
    assert ben.post(re.search(r'action="(/revise/\d+)"', listed)[1]).status_code == 409
    assert ben.post("/answer", data={"key": open_before_ann, "choice": "2"}).status_code == 409


@pytest.mark.parametrize("name", ["", " ", "<b>", "a" * 81, "oracle", "x\ny\x00"])
def test_what_is_no_name_is_refused(store, name):
    response = page(store, None).post("/enter", data={"name": name})
    assert response.status_code == 400 and "Who are you?" in response.text


def test_an_empty_store_says_how_to_fill_it(tmp_path):
    PreferenceStore(tmp_path / "s.sqlite", create=True).close()
    assert "plaudit collect" in page(str(tmp_path / "s.sqlite")).get("/").text


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("kind", ["label", "label by link", "watch", "watch by link"])
def test_what_is_refused_is_said_on_a_page_in_the_readers_language(store, tmp_path, kind, language):
    """By every page alike, with what to do and nothing of the store, the run or the token."""
    by_link = kind.endswith("link")
    if kind.startswith("label"):
        made = label_page(PageConfig(store=store, people=["ann"] if by_link else []))
        refused = {"/mine": (401, "no_link" if by_link else "no_name"), "/nowhere": (404, "unknown_page")}
    else:
        made = watch_page([str(_run(tmp_path))], "0.0.0.0" if by_link else "127.0.0.1")
        refused = {"/nowhere": (404, "unknown_page")}
        refused["/trace/0/1/0"] = (401, "no_link") if by_link else (404, "no_trace")
        refused |= {} if by_link else {"/trace/x/y/z": (400, "not_understood")}
    if by_link:
        refused["/enter/abcde"] = (401, "no_link")
    client = browser(made.app)
    for path, (status, why) in refused.items():
        answer = client.get(path, headers={"accept-language": language})
        assert answer.status_code == status and escape(phrases(language)[why]) in answer.text, path
        assert f'<html lang="{language}">' in answer.text
        assert str(tmp_path) not in answer.text and "abcde" not in answer.text


def test_pages_on_one_machine_do_not_sign_each_other_out(store, tmp_path):
    """A browser sends a host's cookies to all its ports."""
    pages = [
        label_page(PageConfig(store=store, people=["ann"])),
        label_page(PageConfig(store=filled(tmp_path / "other.sqlite"), people=["ann"])),
        watch_page([str(_run(tmp_path))], "0.0.0.0"),
    ]
    cookies = None
    for way_in in (True, False):
        for port, made in enumerate(pages, 8111):
            client = TestClient(made.app, base_url=f"http://127.0.0.1:{port}", cookies=cookies)
            assert client.get(made.ways[0][1] if way_in else "/").status_code == 200
            cookies = client.cookies


def test_a_store_that_fails_is_said_without_details(store, monkeypatch):
    client = page(store)
    from plaudit.errors import DataError

    monkeypatch.setattr(Desk, "next", lambda *_: (_ for _ in ()).throw(DataError("/secret/path: disk is full")))
    response = client.get("/")
    assert response.status_code == 503 and "secret" not in response.text


def test_both_languages_say_the_same_things():
    from plaudit.web.words import phrases

    english, chinese = phrases("en"), phrases("zh")
    assert english.keys() == chinese.keys()
    for name, text in english.items():
        assert sorted(re.findall(r"{\w+}", text)) == sorted(re.findall(r"{\w+}", chinese[name])), name
