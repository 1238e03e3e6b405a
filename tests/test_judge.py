"""A language model in a person's place: what it is asked, what follows from its replies, and servers that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from plaudit.cli import main
from plaudit.preferences.store import PreferenceStore
from plaudit.types import Answer, Comparison

ASKED = re.compile(r"(?:Prompt:\n(.*?)\n\n)?Answer A:\n(.*?)\n\nAnswer B:\n(.*?)\n\n", re.DOTALL)
KEY = "sk-very-secret-1234567890"


def longer(text: str) -> str:
    """A judge without a bias: the letter of the longer answer."""
    _, a, b = _parts(text)
    return "A" if len(a) > len(b) else "B"


def _parts(text: str) -> tuple[str, str, str]:
    found = ASKED.search(text)
    assert found, text
    return found[1] or "", found[2], found[3]


@dataclass
class Server:
    """A server that speaks chat completions. ``judge``: the text asked -> what it says; ``troubles``: what happens to
    the first requests instead, each a status, (status, headers, body), or "drop"."""

    judge: Callable[[str], str] = longer
    troubles: list[Any] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    flying: int = 0
    most_flying: int = 0
    seconds: float = 0.0
    url: str = ""

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def answered(self) -> list[tuple[str, str, str]]:
        return [_parts(text) for text in self.asked]


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server.lock:
                server.times.append(time.monotonic())
                server.bodies.append(body)
                server.keys.append(self.headers.get("Authorization"))
                trouble = server.troubles.pop(0) if server.troubles else None
                server.flying += 1
                server.most_flying = max(server.most_flying, server.flying)
            time.sleep(server.seconds)
            with server.lock:
                server.flying -= 1
            if self.path != "/v1/chat/completions":
                trouble = 404
            if trouble == "drop":
                self.close_connection = True
                self.connection.close()
                return
            if isinstance(trouble, int):
                trouble = (trouble, {}, json.dumps({"error": {"message": f"trouble with {self.headers}"}}))
            text = body["messages"][0]["content"]
            if trouble is None:
                with server.lock:
                    server.asked.append(text)
                message = {"role": "assistant", "content": server.judge(text)}
                choice = {"index": 0, "message": message, "finish_reason": "stop"}
                whole = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
                trouble = (200, {}, json.dumps(whole))
            status, headers, said = trouble
            self.send_response(status)
            for name, value in ({"Content-Type": "application/json"} | headers).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(said.encode())))
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *_: Any) -> None:
            return

    return Handler


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """A client that hangs up is no fault of the server's."""


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    state = Server()
    http = _Quiet(("127.0.0.1", 0), _handler(state))
    state.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield state
    http.shutdown()
    http.server_close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path


def filled(place: Path, *answers: tuple[str, ...]) -> list[Comparison]:
    store = PreferenceStore(place / "s.sqlite", create=True)
    added = store.add([Comparison(0, f"p{i}", tuple(map(Answer, texts))) for i, texts in enumerate(answers)])
    store.close()
    return added


def words(place: Path, *more: str, model: str = "m") -> list[str]:
    return ["label", f"{place}/s.sqlite", "--judge", model, f"out={place}/run", *more]


def labels(place: Path) -> dict[str, tuple[int, ...]]:
    """prompt -> ranks, of what the judge m said."""
    store = PreferenceStore(place / "s.sqlite")
    said = {p.comparison.prompt: p.ranks for p in store.preferences() if p.annotator.startswith("judge:")}
    store.close()
    return said


def summary(place: Path) -> dict[str, Any]:
    return json.loads((place / "run/summary.json").read_text(encoding="utf-8"))


def _fails(capsys, line: list[str], *parts: str) -> str:
    assert main(line) == 2
    err = capsys.readouterr().err
    assert len(err.strip().splitlines()) <= 2 and "Traceback" not in err
    for part in parts:
        assert part in err, err
    assert KEY not in err
    return err


# --- what follows from replies ----------------------------------------------------------------------------------------


def test_the_better_answer_wins_in_whichever_place_it_stands(server, place, capsys):
    filled(place, ("a", "bbb"), ("aaa", "b"))
    assert main(words(place, f"judge.endpoint={server.url}")) == 0
    assert labels(place) == {"p0": (1, 0), "p1": (0, 1)}
    assert sorted(server.answered()) == sorted(
        [("p0", "a", "bbb"), ("p0", "bbb", "a"), ("p1", "aaa", "b"), ("p1", "b", "aaa")]
    )
    assert all(b["temperature"] == 0 and b["model"] == "m" and b["max_tokens"] == 8 for b in server.bodies)
    assert summary(place)["labelled"] == 2 and summary(place)["asked"] == 4
    assert summary(place)["unclear"] == 0 and summary(place)["first_chosen"] == 0.5
    out = capsys.readouterr().out
    assert "4 questions about 2 comparisons" in out and "shown first" not in out


@pytest.mark.parametrize(("letter", "share"), [("A", 1.0), ("B", 0.0)])
def test_a_judge_that_likes_a_place_finds_ties_everywhere_and_it_is_said(server, place, capsys, letter, share):
    filled(place, ("a", "bbb"), ("aaa", "b"), ("x", "yy", "zzz"))
    server.judge = lambda text: letter
    assert main(words(place, f"judge.endpoint={server.url}")) == 0
    assert labels(place) == {"p0": (0, 0), "p1": (0, 0), "p2": (0, 0, 0)}
    assert summary(place)["ties"] == 3 and summary(place)["first_chosen"] == share
    assert f"shown first in {share:.0%}" in capsys.readouterr().out


def test_several_answers_are_ranked_by_the_pairs_they_win(server, place):
    """Of four answers all six pairs are asked in both orders; equal ones share a place."""
    filled(place, ("aa", "bbb", "cc", "d"))

    def judge(text: str) -> str:
        _, a, b = _parts(text)
        return "A" if len(a) >= len(b) else "B"

    server.judge = judge
    assert main(words(place, f"judge.endpoint={server.url}")) == 0
    assert labels(place) == {"p0": (1, 0, 1, 3)}
    assert len(server.asked) == len(set(server.asked)) == 12


@pytest.mark.parametrize(
    "said", ["", "Both are fine.", "A good answer needs more.", "I cannot say", "A or B", "A/B", "C", "Ab"]
)
def test_a_reply_without_a_letter_is_no_preference_and_is_counted(server, place, said):
    filled(place, ("a", "bbb"))
    # in the other order it names the longer one, which alone makes no winner
    server.judge = lambda text: longer(text) if _parts(text)[1] == "a" else said
    assert main(words(place, f"judge.endpoint={server.url}")) == 0
    assert labels(place) == {"p0": (0, 0)}
    assert summary(place)["unclear"] == 1 and summary(place)["asked"] == 2


@pytest.mark.parametrize(
    "dressed", ["{}", " {}.", "**{}**", "({})", "Answer: {}", "The better answer is {}.", "{}\nbecause", "{}) is best"]
)
def test_a_letter_is_read_as_models_write_it(server, place, dressed):
    filled(place, ("a", "bbb"))
    server.judge = lambda text: dressed.format(longer(text))
    assert main(words(place, f"judge.endpoint={server.url}")) == 0
    assert labels(place) == {"p0": (1, 0)}


def test_what_a_model_thinks_before_it_answers_is_not_its_answer(server, place):
    filled(place, ("a", "bbb"))
    server.judge = lambda text: f"<think>\nA. is short, so\n</think>\n\n{longer(text)}"
    assert main(words(place, f"judge.endpoint={server.url}", "judge.max_tokens=500")) == 0
    assert labels(place) == {"p0": (1, 0)} and server.bodies[0]["max_tokens"] == 500


def test_the_question_is_configurable_and_texts_alone_have_no_prompt(server, place):
    store = PreferenceStore(place / "s.sqlite", create=True)
    store.add([Comparison(0, "", (Answer("a"), Answer("bbb")))])
    store.close()
    assert main(words(place, f"judge.endpoint={server.url}", "judge.criterion=Which is kinder?")) == 0
    assert all("Which is kinder?" in text and "Prompt" not in text for text in server.asked)


def test_a_label_says_who_when_and_how_it_was_shown(server, place):
    added = filled(place, *[("a", "bbb")] * 1, *[(f"a{i}", "bbbb") for i in range(12)])
    assert main(words(place, f"judge.endpoint={server.url}", "judge.concurrency=1")) == 0
    store = PreferenceStore(place / "s.sqlite")
    said = store.preferences()
    assert len(said) == len(added) and {p.annotator for p in said} == {"judge:m"}
    assert all(p.seconds > 0 and p.created for p in said)
    # the order recorded is the one asked first, and not always that of the store
    asked = server.answered()
    for p in said:
        first = next(a for a in asked if a[0] == p.comparison.prompt)
        assert first[1:] == tuple(p.comparison.answers[i].text for i in p.order)
    assert {p.order for p in said} == {(0, 1), (1, 0)}


def test_no_person_may_take_a_judges_name():
    from plaudit.web.door import proper_name

    assert proper_name("judge:m") is None


# --- a model on this machine ------------------------------------------------------------------------------------------


def test_a_model_on_this_machine_labels_and_its_letters_are_its_likelier_tokens(cache, place):
    """The letters agree with the model's own forward pass, and the labels with the letters."""
    import torch

    from plaudit.models.load import load_language_model

    filled(place, ("a", "bbb"), ("good", "bad"), ("x", "yy", "z z"), *[(f"{i} one", f"two {i}{i}") for i in range(15)])
    assert main(words(place, model="tiny")) == 0
    rows = [json.loads(line) for line in (place / "run/judgements.jsonl").read_text().splitlines()]
    assert len(rows) == summary(place)["asked"] == 2 + 2 + 6 + 30
    model, tokenizer = load_language_model("tiny")
    store = PreferenceStore(place / "s.sqlite")
    said = {p.comparison.id: p for p in store.preferences()}
    letters: dict[tuple[int, int, int], str] = {}
    for row in rows:
        p = said[row["comparison"]]
        a, b = (p.comparison.answers[row[place_]].text for place_ in ("first", "second"))
        text = (
            f"Prompt:\n{p.comparison.prompt}\n\nAnswer A:\n{a}\n\nAnswer B:\n{b}\n\n"
            "Which answer is better? Reply with one letter, A or B.\nAnswer: "
        )
        with torch.no_grad():
            logits = model(torch.tensor([tokenizer.text_ids(text)])).logits[0, -1]
        ids = [tokenizer.answer_ids(letter)[0] for letter in "AB"]
        assert row["letter"] == "AB"[int(logits[ids].argmax())]
        margin = float(re.search(r"= (\S+)", row["said"])[1])
        assert margin == pytest.approx(float(logits[ids[0]] - logits[ids[1]]), abs=2e-3)
        letters[row["comparison"], row["first"], row["second"]] = row["letter"]
    assert {p.annotator for p in said.values()} == {"judge:tiny"}
    for p in said.values():
        if len(p.ranks) == 2:
            both = letters[p.comparison.id, 0, 1] + letters[p.comparison.id, 1, 0]
            assert p.ranks == {"AB": (0, 1), "BA": (1, 0)}.get(both, (0, 0))


def test_the_same_model_says_the_same_again_whatever_the_batches(cache, place):
    filled(place, *[(f"{i} one", f"two {i}{i}") for i in range(6)])
    assert main(words(place, model="tiny")) == 0
    first = labels(place)
    store = PreferenceStore(place / "s.sqlite")
    store.forget("judge:tiny")
    store.close()
    again = ["label", f"{place}/s.sqlite", "--judge", "tiny", f"out={place}/again", "judge.batch_tokens=1"]
    assert main(again) == 0
    assert labels(place) == first and len(first) == 6


def test_a_chat_template_frames_the_question(cache, place, tmp_path):
    """With a template that ends in the letter's opposite, the model sees that and nothing of ours behind it."""
    from plaudit.models.load import load_language_model

    model, tokenizer = load_language_model("tiny")
    tokenizer.inner.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    model.save_pretrained(tmp_path / "chatty")
    tokenizer.inner.save_pretrained(tmp_path / "chatty")
    filled(place, ("a", "bbb"))
    assert main(words(place, model=str(tmp_path / "chatty"))) == 0
    import torch

    rows = [json.loads(line) for line in (place / "run/judgements.jsonl").read_text().splitlines()]
    row = next(r for r in rows if r["first"] == 0)
    text = (
        "<Prompt:\np0\n\nAnswer A:\na\n\nAnswer B:\nbbb\n\nWhich answer is better? Reply with one letter, A or B.>"
    )
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.text_ids(text)])).logits[0, -1]
    ids = [tokenizer.answer_ids(letter)[0] for letter in "AB"]
    margin = float(re.search(r"= (\S+)", row["said"])[1])
    assert margin == pytest.approx(float(logits[ids[0]] - logits[ids[1]]), abs=2e-3)


def test_what_exceeds_the_context_stays_without_a_label_and_is_said(cache, place, capsys):
    filled(place, ("a", "b" * 300), ("aaa", "b"))
    assert main(words(place, model="tiny")) == 0
    assert list(labels(place)) == ["p1"] and summary(place)["left_out"] == 1
    assert "context" in capsys.readouterr().out


def test_where_nothing_fits_it_is_an_error_and_the_folder_is_free_again(cache, place, capsys):
    filled(place, ("a", "b" * 300))
    _fails(capsys, words(place, model="tiny"), "context of tiny 256", "longer")
    assert not (place / "run").exists()


# --- servers that fail ------------------------------------------------------------------------------------------------


def test_too_many_requests_waits_as_long_as_the_server_asks(server, place):
    filled(place, ("a", "bbb"))
    server.troubles = [(429, {"Retry-After": "1"}, "{}")]
    assert main(words(place, f"judge.endpoint={server.url}", "judge.concurrency=1")) == 0
    assert labels(place) == {"p0": (1, 0)}
    # on its own the first wait is half a second
    assert server.times[1] - server.times[0] >= 1.0


@pytest.mark.parametrize("trouble", [500, 503, "drop"])
def test_what_passes_is_tried_again(server, place, trouble):
    filled(place, ("a", "bbb"), ("aaa", "b"))
    server.troubles = [trouble]
    assert main(words(place, f"judge.endpoint={server.url}")) == 0
    assert labels(place) == {"p0": (1, 0), "p1": (0, 1)} and len(server.times) == 5


def test_a_slow_reply_is_tried_again(server, place):
    filled(place, ("a", "bbb"))
    slow = iter([1.0])

    def judge(text: str) -> str:
        time.sleep(next(slow, 0.0))
        return longer(text)

    server.judge = judge
    assert main(words(place, f"judge.endpoint={server.url}", "judge.timeout=0.4", "judge.concurrency=1")) == 0
    assert labels(place) == {"p0": (1, 0)} and len(server.times) == 3


@pytest.mark.parametrize(
    ("trouble", "parts"),
    [
        (401, ["refuses the key in OPENAI_API_KEY", "401"]),
        (403, ["refuses the key in OPENAI_API_KEY", "403"]),
        (404, ["404", "'m'", "judge.model", "judge.endpoint"]),
        (500, ["fails (500", "log"]),
        (429, ["429", "judge.requests_per_minute"]),
        ("drop", ["cannot be reached", "whether the server runs"]),
        ((200, {}, "{no json"), ["no chat completion", "{no json"]),
        ((200, {}, "{}"), ["no chat completion", "/v1"]),
        ((200, {"Content-Type": "text/html"}, f"<h1>hello {KEY}"), ["no chat completion", "<h1>hello"]),
    ],
)
def test_a_server_that_keeps_failing_is_named_with_what_to_do(server, place, capsys, trouble, parts):
    filled(place, ("a", "bbb"))
    server.troubles = [trouble] * 20
    _fails(capsys, words(place, f"judge.endpoint={server.url}", "judge.retries=0"), server.url, *parts)
    assert labels(place) == {} and not (place / "run").exists()


def test_a_server_that_is_not_there_is_named(place, capsys):
    filled(place, ("a", "bbb"))
    line = words(place, "judge.endpoint=http://127.0.0.1:9/v1", "judge.retries=0")
    _fails(capsys, line, "http://127.0.0.1:9/v1", "cannot be reached")


def test_a_server_that_wants_a_key_where_there_is_none(server, place, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY")
    filled(place, ("a", "bbb"))
    server.troubles = [401] * 9
    _fails(capsys, words(place, f"judge.endpoint={server.url}"), "wants a key", "OPENAI_API_KEY")
    assert set(server.keys) == {None}


def test_a_question_that_the_server_refuses_is_left_out_and_the_others_are_labelled(server, place, capsys):
    filled(place, ("a", "bbb"), ("aaa", "b"), ("c", "ddd"))
    # p0 is answered; the first question about p1 is refused, so that its second is not asked
    whole = server.judge

    def troubled(text: str) -> str:
        if len(server.asked) == 2:
            server.troubles = [(400, {}, json.dumps({"error": {"message": "too long by half"}}))]
        return whole(text)

    server.judge = troubled
    assert main(words(place, f"judge.endpoint={server.url}", "judge.concurrency=1")) == 0
    assert labels(place) == {"p0": (1, 0), "p2": (1, 0)} and len(server.times) == 5
    assert summary(place)["left_out"] == 1 and "too long by half" in capsys.readouterr().out


def test_a_server_that_refuses_from_the_start_is_not_asked_everything(server, place, capsys):
    filled(place, *[(f"a{i}", "bbb") for i in range(20)])
    server.troubles = [(400, {}, json.dumps({"error": {"message": "no such parameter"}}))] * 40
    _fails(capsys, words(place, f"judge.endpoint={server.url}", "judge.concurrency=1"), "400", "no such parameter")
    assert len(server.times) == 3


# --- pace -------------------------------------------------------------------------------------------------------------


def test_the_rate_limit_holds_for_requests_that_are_tried_again_too(server, place):
    filled(place, ("a", "bbb"), ("aaa", "b"), ("c", "ddd"))
    server.troubles = [(429, {"Retry-After": "0.01"}, "{}")] * 3
    assert main(words(place, f"judge.endpoint={server.url}", "judge.requests_per_minute=600")) == 0
    gaps = [b - a for a, b in zip(server.times, server.times[1:], strict=False)]
    assert len(server.times) == 9
    # a request may lie a little on its way
    assert min(gaps) > 0.05 and server.times[-1] - server.times[0] > 0.75


def test_several_requests_fly_at_once_and_no_more_than_asked_for(server, place):
    filled(place, *[(f"a{i}", "bbb") for i in range(8)])
    server.seconds = 0.05
    assert main(words(place, f"judge.endpoint={server.url}", "judge.concurrency=3")) == 0
    assert server.most_flying == 3


# --- going on ---------------------------------------------------------------------------------------------------------


def test_after_an_error_the_run_goes_on_and_asks_nothing_twice(server, place, capsys):
    filled(place, *[(f"a{i}", "bbb") for i in range(6)])
    whole = server.judge

    def troubled(text: str) -> str:
        if len(server.asked) == 5:
            server.troubles = [401] * 9
        return whole(text)

    server.judge = troubled
    line = words(place, f"judge.endpoint={server.url}", "judge.concurrency=1")
    _fails(capsys, line, "refuses the key", f"--resume {place}/run")
    # two whole pairs are in the store, and the half of the third is kept
    assert len(labels(place)) == 2 and len(server.asked) == 5
    server.judge, server.troubles = whole, []
    assert main(["label", "--resume", f"{place}/run"]) == 0
    assert len(labels(place)) == 6 and len(server.asked) == len(set(server.asked)) == 12
    assert summary(place)["asked"] == 12
    store = PreferenceStore(place / "s.sqlite")
    assert store.counts()["by judge:m"] == 6
    store.close()


def test_ctrl_c_keeps_what_was_said_and_asks_nothing_twice(server, place, capsys):
    filled(place, *[(f"a{i}", "bbb") for i in range(6)])
    whole = server.judge

    def interrupting(text: str) -> str:
        if len(server.asked) == 5:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        return whole(text)

    server.judge = interrupting
    assert main(words(place, f"judge.endpoint={server.url}", "judge.concurrency=2")) == 130
    assert f"plaudit label --resume {place}/run" in capsys.readouterr().err
    before = labels(place)
    assert 2 <= len(before) < 6
    assert main(["label", "--resume", f"{place}/run"]) == 0
    assert len(labels(place)) == 6 and len(server.asked) == len(set(server.asked)) == 12
    assert before.items() <= labels(place).items()


def test_a_run_killed_between_reply_and_label_has_the_label_from_the_reply(server, place):
    filled(place, ("a", "bbb"), ("aaa", "b"))
    assert main(words(place, f"judge.endpoint={server.url}")) == 0
    (place / "run/summary.json").unlink()
    store = PreferenceStore(place / "s.sqlite")
    store.forget("judge:m")
    store.close()
    with (place / "run/judgements.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"comparison": 1, "fi')  # torn off while it was written
    assert main(["label", "--resume", f"{place}/run"]) == 0
    assert labels(place) == {"p0": (1, 0), "p1": (0, 1)} and len(server.asked) == 4


def test_a_local_run_that_was_stopped_goes_on(cache, place, monkeypatch):
    from plaudit.evaluation import language_judge

    monkeypatch.setattr(language_judge, "BATCH", 4)
    filled(place, *[(f"a{i}", "bbb") for i in range(6)])
    put = language_judge.LocalAsker._ask
    calls: list[int] = []

    def once(self, encoded):
        calls.append(len(encoded))
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return put(self, encoded)

    monkeypatch.setattr(language_judge.LocalAsker, "_ask", once)
    assert main(words(place, model="tiny")) == 130
    assert len(labels(place)) == 4
    assert main(["label", "--resume", f"{place}/run"]) == 0
    assert len(labels(place)) == 6 and calls == [4, 4, 4]


# --- the key ----------------------------------------------------------------------------------------------------------


def test_the_key_is_sent_and_written_nowhere(server, place, capsys, monkeypatch):
    """Not even where the server repeats it."""
    monkeypatch.delenv("OPENAI_API_KEY")
    monkeypatch.setenv("MY_KEY", KEY + "\n")
    filled(place, ("a", "bbb"), ("aaa", "b"))
    server.judge = lambda text: f"{longer(text)}. Your key is {KEY}"
    assert main(words(place, f"judge.endpoint={server.url}", "judge.api_key_env=MY_KEY")) == 0
    assert labels(place) == {"p0": (1, 0), "p1": (0, 1)}
    assert set(server.keys) == {f"Bearer {KEY}"}
    files = [path for path in place.rglob("*") if path.is_file()]
    assert len(files) > 4 and not any(KEY.encode() in path.read_bytes() for path in files)
    shown = capsys.readouterr()
    assert KEY not in shown.out + shown.err


def test_no_key_is_sent_where_none_is_wanted(server, place):
    filled(place, ("a", "bbb"))
    assert main(words(place, f"judge.endpoint={server.url}", "judge.api_key_env=''")) == 0
    assert set(server.keys) == {None}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (["--oracle", "--judge", "tiny"], ["--oracle, --judge"]),
        (["--oracle", "judge.model=tiny"], ["judge.model", "--judge MODEL"]),
        (["--oracle", "judge.criterion=x"], ["criterion", "no effect", "--judge MODEL"]),
        (["--oracle", "judge.endpoint=http://h/v1"], ["endpoint", "no effect"]),
        (["judge.model=tiny"], ["--judge MODEL"]),
        (["--judge", ""], ["--judge", "no model"]),
        (["--judge", "tiny", "judge.requests_per_minute=9.0"], ["requests_per_minute", "no effect", "endpoint"]),
        (["--judge", "tiny", "judge.concurrency=9"], ["concurrency", "no effect", "endpoint"]),
        (["--judge", "tiny", "judge.api_key_env=MINE"], ["api_key_env", "no effect"]),
        (["--judge", "m", "judge.endpoint=http://h/v1", "judge.batch_tokens=9"], ["batch_tokens", "no effect"]),
        (["--judge", "m", "judge.endpoint=nowhere"], ["endpoint", "http://host:8000/v1"]),
        (["--judge", "m", "judge.endpoint=http://"], ["endpoint", "http://host:8000/v1"]),
        (["--judge", "m", "judge.endpoint=http://h:99999/v1"], ["endpoint", "http://host:8000/v1"]),
        (["--judge", "m", f"judge.endpoint=http://u:{KEY}@h/v1"], ["endpoint", "api_key_env"]),
        (["--judge", "m", f"judge.endpoint=http://h/v1?key={KEY}"], ["endpoint", "api_key_env"]),
        (["--judge", "m", "judge.endpoint=http://h/v1", f"judge.api_key_env={KEY}"], ["api_key_env", "variable"]),
        (["--judge", "m", "judge.endpoint=http://h/v1", "judge.api_key_env=ABSENT_K"], ["ABSENT_K", "not set"]),
        (["--judge", "tiny", "judge.criterion=' '"], ["criterion", "empty"]),
        (["--judge", "nowhere/at/all"], ["nowhere/at/all", "no such model folder"]),
    ],
)
def test_a_mistake_is_told_and_leaves_nothing(cache, place, capsys, line, parts):
    filled(place, ("a", "bbb"))
    _fails(capsys, ["label", f"{place}/s.sqlite", f"out={place}/run", *line], *parts)
    assert labels(place) == {} and not (place / "run").exists()


def test_without_the_package_it_is_named(server, place, capsys, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "openai", None)
    filled(place, ("a", "bbb"))
    _fails(capsys, words(place, f"judge.endpoint={server.url}"), 'pip install "plaudit[judge]"')
    assert not (place / "run").exists()


def test_a_model_on_this_machine_does_without_the_package(cache, place, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "openai", None)
    filled(place, ("a", "bbb"))
    assert main(words(place, model="tiny")) == 0
    assert len(labels(place)) == 1
