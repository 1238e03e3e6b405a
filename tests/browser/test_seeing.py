"""The trace and the live page in a real browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from serving import served
from tiny_runs import config

import plaudit
from plaudit.inspection import trace
from plaudit.pages.watching import watch_page
from plaudit.web.trace import trace_page

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache) -> Path:
    out = tmp_path_factory.mktemp("seen") / "run"
    plaudit.ppo(config(out, monitors=["plaudit.rewards.function:vowels"]))
    return out


def test_walk_a_token_opens_with_its_sums_by_mouse_by_key_and_by_touch(run, tmp_path, page):
    file = tmp_path / "trace.html"
    file.write_text(trace_page(trace.find(run)), encoding="utf-8")
    page.goto(file.as_uri())
    tokens = page.locator(".token")
    last = tokens.count() - 1
    assert page.locator(".detail:visible").get_attribute("id") == f"d{last}"
    assert "score" in page.locator(".detail:visible").inner_text()
    tokens.nth(0).hover()
    assert page.locator(".detail:visible").get_attribute("id") == "d0"
    tokens.nth(1).click()
    tokens.nth(0).hover()
    assert page.locator(".detail:visible").get_attribute("id") == "d1", "a token that was clicked stays"
    page.keyboard.press("ArrowRight")
    assert page.locator(".detail:visible").get_attribute("id") == "d2"
    before = tokens.nth(0).evaluate("t => t.style.backgroundColor")
    page.check("input[value=entropy]")
    assert tokens.nth(0).evaluate("t => t.style.backgroundColor") != before
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_walk_the_live_page_follows_a_run(run, tmp_path, page):
    """What is written while the page is open appears on it, without loading it again; the end too."""
    live = tmp_path / "live"
    live.mkdir()
    (live / "config.json").write_text(json.dumps({"command": "ppo", "iterations": 3, "monitors": ["gold"]}))
    with served(watch_page([str(live), str(run)], "127.0.0.1").app) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        assert page.locator(".state").count() == 2
        page.wait_for_selector("text=finished")
        charts = page.locator("#charts .chart").count()
        assert charts > 5
        hostile = "<script>document.title='taken'</script> \u202e <img src=x onerror=\"document.title='taken'\">"
        with (live / "metrics.jsonl").open("a") as file:
            for step in (1, 2):
                file.write(json.dumps({"step": step, "score": step, "gold": 0.5, "kl": 1.0, "seconds": 2.0}) + "\n")
        (live / "samples.jsonl").write_text(json.dumps({"step": 2, "prompt": "p", "response": hostile}) + "\n")
        (live / "events.jsonl").write_text(json.dumps({"kind": "warning", "message": "KL runs away"}) + "\n")
        page.wait_for_selector("text=KL runs away")
        page.wait_for_selector("text=iteration 2 of 3")
        assert page.locator("text=U+202E").count() == 1
        assert page.title() == "Runs, as they go – Plaudit"
        assert page.locator("#charts .chart").count() > charts, "gold has a chart now"
        (live / "summary.json").write_text("{}")
        page.locator(".state").first.get_by_text("finished").wait_for()


def test_a_traced_answer_is_a_click_away(run, page):
    with served(watch_page([str(run)], "127.0.0.1").app) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.click("text=token by token >> nth=0")
        assert page.locator(".token").count() > 0
        assert page.locator(".detail:visible").count() == 1
        assert page.locator(".token").first.evaluate("t => t.style.backgroundColor") != ""


def test_the_same_prompts_stand_beside_the_references_answers(run, page):
    first = trace.read(run, 1).answers[0]
    assert first.prompt
    with served(watch_page([str(run)], "127.0.0.1").app) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#probes .panel")
        assert page.locator("#probes .panel").count() == 4
        heads = page.locator("#probes .panel >> nth=0").locator("h3").all_inner_texts()
        assert heads == ["The reference", "After iteration 2"]


def test_a_page_whose_server_is_gone_says_so_and_takes_up_again(run, page):
    app = watch_page([str(run)], "127.0.0.1").app
    with served(app) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#charts .chart")
    page.wait_for_selector("text=no connection")


@pytest.mark.parametrize("path", ["/", "/trace/0/2/0"])
def test_nothing_hangs_over_on_a_phone(run, phone, path):
    with served(watch_page([str(run)], "127.0.0.1").app) as port:
        phone.goto(f"http://127.0.0.1:{port}{path}")
        phone.wait_for_timeout(500)
        assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_only_the_server_is_asked(run, page):
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    with served(watch_page([str(run)], "127.0.0.1").app) as port:
        page.goto(f"http://127.0.0.1:{port}/")
        page.wait_for_selector("#charts .chart")
        page.goto(f"http://127.0.0.1:{port}/trace/0/2/0")
        assert asked and all(re.match(rf"http://127\.0\.0\.1:{port}/|data:", url) for url in asked)
