"""Two models answer, a person votes: blind, recorded with its provenance, counted as a win rate."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from safetensors.torch import load_file, save_file

from plaudit.cli import main
from plaudit.config import CompareConfig
from plaudit.models.load import locate, weights_digest
from plaudit.pages.labelling import compare_page
from plaudit.preferences.store import PreferenceStore
from plaudit.schema import build


@pytest.fixture
def store(cache, tmp_path) -> str:
    return str(tmp_path / "votes.sqlite")


@pytest.fixture
def contender(cache, tmp_path) -> Path:
    """The tiny model under another name."""
    return Path(shutil.copytree(locate("tiny"), tmp_path / "contender"))


def page(store: str, first: str = "tiny", second: str = "tiny", **keys) -> TestClient:
    keys = {"store": store, "raw": True, "sampling": {"max_new_tokens": 8}} | keys
    client = TestClient(compare_page(first, second, build(CompareConfig, keys)).app, base_url="http://127.0.0.1")
    client.post("/enter", data={"name": "ann"})
    return client


def ask(client: TestClient, prompt: str):
    return client.post("/ask", data={"prompt": prompt})


def vote(client: TestClient, choice: str):
    key = re.search(r'name="key" value="(\w+)"', client.get("/").text)[1]
    return client.post("/answer", data={"key": key, "choice": choice, "seconds": "1"})


def said(store: str):
    opened = PreferenceStore(store)
    found = opened.preferences()
    opened.close()
    return found


def test_a_prompt_is_answered_by_both_and_the_vote_is_recorded(store):
    client = page(store)
    assert "Ask both models" in client.get("/").text
    question = ask(client, "the day")
    assert "the day" in question.text and "Which answer is better?" in question.text
    assert "Ask both models" in vote(client, "2").text
    (label,) = said(store)
    assert label.annotator == "ann" and label.ranks[label.order[1]] == 0
    provenance = label.comparison.provenance
    assert provenance["models"] == ["tiny", "tiny"] and provenance["weights"] == [weights_digest("tiny")] * 2
    assert provenance["sampling"]["max_new_tokens"] == 8


def test_which_model_said_what_is_not_shown_while_voting(store, contender):
    client = page(store, second=str(contender))
    assert "contender" not in ask(client, "the day").text
    assert "contender" in vote(client, "1").text


def test_votes_become_a_win_rate_with_its_interval(store):
    client = page(store)
    for i, choice in enumerate(["1", "2", "equal", "1", "skip"]):
        ask(client, f"the day {i}")
        text = vote(client, choice).text
    second = sum(p.ranks[1] < p.ranks[0] for p in said(store)) + 0.5
    shown = re.search(r"in (\d+) % of (\d+) votes \(95 % interval (\d+) to (\d+) %", text)
    rate, votes, low, high = map(int, shown.groups())
    assert votes == 4 and rate == round(100 * second / 4) and low < rate < high


def test_votes_on_weights_that_have_changed_since_do_not_count(store, contender):
    client = page(store, second=str(contender))
    ask(client, "the day")
    assert "1 votes" in vote(client, "1").text
    assert "1 votes" in page(store, second=str(contender)).get("/").text
    (file,) = contender.glob("*.safetensors")
    save_file({k: v + 1 for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    assert "No votes yet" in page(store, second=str(contender)).get("/").text


@pytest.mark.parametrize(("prompt", "why"), [("   ", "Type something"), ("word " * 4000, "exceed the model")])
def test_what_cannot_be_answered_is_said_and_the_prompt_is_kept(store, prompt, why):
    client = page(store)
    answer = ask(client, prompt)
    assert answer.status_code == 400 and why in answer.text
    assert prompt.strip() in answer.text
    assert not said(store)


def test_a_prompt_is_text_on_the_page(store):
    client = page(store)
    assert "<script>alert" not in ask(client, "<script>alert(1)</script>").text


def test_the_page_speaks_chinese(store):
    client = page(store)
    text = client.get("/", headers={"accept-language": "zh"}).text
    assert "向两个模型提问" in text


def test_a_request_from_elsewhere_asks_nothing(store):
    client = page(store)
    refused = client.post("/ask", data={"prompt": "the day"}, headers={"origin": "http://elsewhere.example"})
    assert refused.status_code == 403
    assert "Ask both models" in client.get("/").text


def test_a_missing_model_is_named(store, capsys):
    assert main(["compare", "tiny", "./nowhere", f"store={store}", "raw=true"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert not Path(store).exists()


def test_from_elsewhere_people_are_needed(store, capsys):
    assert main(["compare", "tiny", "tiny", f"store={store}", "host=0.0.0.0"]) == 2
    assert "people=" in capsys.readouterr().err
