"""The live page over run folders: what it is told, what it shows, and whom it lets in."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from serving import served
from tiny_runs import config

import plaudit
from plaudit.cli import main
from plaudit.inspection.follow import FILES, PIECE, Follower, News, watched
from plaudit.pages.watching import watch_page
from plaudit.report import STAGES, read_stages
from plaudit.runs import read_jsonl


def folder(path: Path, name: str = "run", **files: list[dict]) -> Path:
    """A run folder with these lines."""
    run = path / name
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"command": "ppo", "iterations": 3, "monitors": ["gold"]}))
    for kind, lines in files.items():
        (run / f"{kind}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def browser(run: Path | str, host: str = "127.0.0.1") -> TestClient:
    return TestClient(watch_page([str(run)], host).app, base_url="http://127.0.0.1", raise_server_exceptions=True)


class Stream:
    """A browser's side of the events."""

    def __init__(self, port: int):
        self.connection = HTTPConnection("127.0.0.1", port, timeout=10)
        self.connection.request("GET", "/events", headers={"Accept": "text/event-stream"})
        self.answer = self.connection.getresponse()

    def next(self) -> dict:
        while True:
            line = self.answer.readline().decode()
            if line.startswith("data: "):
                return json.loads(line.removeprefix("data: "))


def test_each_line_is_told_once_and_a_torn_one_when_it_is_whole(tmp_path):
    run = folder(tmp_path, metrics=[{"step": 1}])
    follower = Follower(watched(run))
    first = {n.kind: n for n in follower.news()}
    assert first["metrics"].lines == [{"step": 1}] and first["metrics"].anew
    assert not list(follower.news())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n{"st')
        file.flush()
        assert [(n.lines, n.anew) for n in follower.news()] == [([{"step": 2}], False)]
        file.write('ep": 3}\n')
    assert [(n.lines, n.anew) for n in follower.news()] == [([{"step": 3}], False)]


def test_what_a_resumed_run_takes_back_is_told_anew(tmp_path):
    run = folder(tmp_path, metrics=[{"step": 1}, {"step": 2}])
    follower = Follower(watched(run))
    list(follower.news())
    scratch = run / "other"
    scratch.write_text('{"step": 1}\n')
    scratch.replace(run / "metrics.jsonl")
    assert [(n.lines, n.anew) for n in follower.news()] == [([{"step": 1}], True)]
    scratch.write_text("")
    scratch.replace(run / "metrics.jsonl")
    assert [(n.lines, n.anew) for n in follower.news()] == [([], True)]


def test_a_long_run_is_told_in_pieces_and_keeps_nobody_waiting(tmp_path, monkeypatch):
    lines = [{"step": i, "note": "x" * 1000} for i in range(4 * PIECE // 1000)]
    run = folder(tmp_path, metrics=lines)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"st')
    pieces = [n for n in Follower(watched(run)).news() if n.kind == "metrics"]
    assert [line for piece in pieces for line in piece.lines] == lines
    assert [piece.anew for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert max(len(json.dumps(piece.lines)) for piece in pieces) < 1.5 * PIECE

    # a disk that answers only after somebody else has asked for the page
    asked = threading.Event()

    def slow(self: Follower) -> Iterator[News]:
        asked.wait(30)
        yield from ()

    monkeypatch.setattr(Follower, "news", slow)
    with served(watch_page([str(run)], "127.0.0.1").app) as port:
        Stream(port)
        other = HTTPConnection("127.0.0.1", port, timeout=10)
        other.request("GET", "/")
        assert other.getresponse().status == 200
        asked.set()


def test_traces_are_told_with_their_iterations(tmp_path):
    run = folder(tmp_path, metrics=[{"step": 1}])
    follower = Follower(watched(run))
    list(follower.news())
    (run / "traces").mkdir()
    (run / "traces" / "iteration-000002.json").write_text("{}")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2}\n')
    assert [n.lines[0]["traced"] for n in follower.news() if n.kind == "state"] == [[2]]


def test_a_quickstart_is_followed_from_round_to_round(tmp_path):
    """Of one round at a time: what has not begun in it is not there yet, whatever the round before has."""
    run = tmp_path / "quick"

    def stage(place: str, command: str, **files: str) -> None:
        (run / place).mkdir(parents=True)
        (run / place / "config.json").write_text(json.dumps({"command": command}))
        for kind, text in files.items():
            (run / place / f"{kind}.jsonl").write_text(text)

    stage("", "quickstart")
    stage("sft", "sft")
    stage("round-1/ppo", "ppo", metrics='{"step": 1}\n', samples='{"step": 1}\n')
    stage("round-1/evaluate", "evaluate")
    follower = Follower(watched(run))
    assert {n.kind: n.lines for n in follower.news()}["metrics"] == [{"step": 1}]

    # its store is there before its first stage begins
    (run / "round-2").mkdir()
    assert not list(follower.news()) and read_stages(run)[1]["evaluate"].state == "not finished"
    stage("round-2/collect", "collect")
    told = {n.kind: n for n in follower.news()}
    assert all(told[kind].anew and not told[kind].lines for kind in FILES)
    assert told["state"].lines[0]["folder"] == str(run / "round-2" / "ppo")
    stages = read_stages(run)[1]
    begun = {name: stage.state != "not begun" for name, stage in stages.items()}
    assert begun == dict.fromkeys(STAGES, False) | {"sft": True, "collect": True}

    stage("round-2/ppo", "ppo", metrics='{"step": 7}\n')
    assert [n.lines for n in follower.news() if n.kind == "metrics"] == [[{"step": 7}]]


def test_a_line_that_is_no_number_or_no_object_does_not_stop_the_page(tmp_path):
    run = folder(tmp_path)
    (run / "metrics.jsonl").write_bytes(b'{"step": 1, "kl": NaN}\n\xff\xfe\n[1]\n{"step": 2, "kl": Infinity}\n')
    lines = next(n.lines for n in Follower(watched(run)).news() if n.kind == "metrics")
    assert [line["step"] for line in lines] == [1, 2]
    assert not any(isinstance(line["kl"], float) and not math.isfinite(line["kl"]) for line in lines)


def test_a_file_that_cannot_be_read_leaves_the_others_alone(tmp_path):
    run = folder(tmp_path, samples=[{"step": 1}])
    (run / "metrics.jsonl").mkdir()
    (run / "events.jsonl").write_text("[" * 100_000 + "\n" + '{"kind": "warning"}\n')
    told = {n.kind: n.lines for n in Follower(watched(run)).news()}
    assert told["samples"] == [{"step": 1}] and told["events"] == [{"kind": "warning"}] and "metrics" not in told


@pytest.mark.parametrize("words", [["--port", "99999"], ["--port", "-1"], ["--host", "é..é"]])
def test_an_address_that_is_none_is_named(tmp_path, capsys, words):
    assert main(["watch", str(folder(tmp_path)), *words]) == 2
    assert words[1] in capsys.readouterr().err


def test_a_page_hears_what_was_and_what_comes_and_the_end(tmp_path):
    run = folder(tmp_path, metrics=[{"step": 1, "score": 0.5}])
    with served(watch_page([str(run)], "127.0.0.1").app) as port:
        stream = Stream(port)
        assert stream.next() == {"run": 0, "kind": "metrics", "lines": [{"step": 1, "score": 0.5}], "anew": True}
        assert stream.next()["lines"] == [{"folder": str(run), "finished": False, "traced": []}]
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2}\n')
        assert stream.next() == {"run": 0, "kind": "metrics", "lines": [{"step": 2}], "anew": False}
        (run / "summary.json").write_text("{}")
        assert stream.next()["lines"] == [{"folder": str(run), "finished": True, "traced": []}]


def test_a_quickstart_is_watched_before_its_ppo_has_begun(tmp_path):
    run = tmp_path / "quick"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"command": "quickstart", "ppo": {"iterations": 30}}))
    with served(watch_page([str(run)], "127.0.0.1").app) as port:
        stream = Stream(port)
        assert stream.next()["kind"] == "state"
        (run / "ppo").mkdir()
        (run / "ppo" / "metrics.jsonl").write_text('{"step": 1}\n')
        assert stream.next()["lines"] == [{"step": 1}]


def test_the_page_names_its_runs_and_nothing_in_a_name_can_run(tmp_path):
    run = folder(tmp_path, "<script>alert(1)<")
    page = browser(run).get("/")
    assert page.status_code == 200 and "<script>alert" not in page.text
    told = json.loads(re.search(r'id="runs">(.*?)</script>', page.text, re.S)[1])
    assert told == [{"name": str(run), "iterations": 3, "monitors": ["gold"], "traced": 0}]
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert not re.search(r'(?:src|href)="(?!/|data:)', page.text)


def test_the_page_speaks_chinese(tmp_path):
    page = browser(folder(tmp_path)).get("/", headers={"accept-language": "zh-CN"})
    assert '<html lang="zh' in page.text and "运行进展" in page.text


def test_a_traced_answer_opens_from_the_page(cache, tmp_path):
    plaudit.ppo(config(tmp_path / "run"))
    client = browser(tmp_path / "run")
    page = client.get("/trace/0/2/1")
    assert page.status_code == 200 and "<style>" not in page.text and "/static/trace.js" in page.text
    assert [client.get(f"/trace/{where}").status_code for where in ("0/9/0", "0/2/99", "7/2/0")] == [404] * 3


def test_from_elsewhere_a_link_is_needed(tmp_path):
    run = folder(tmp_path)
    page = watch_page([str(run)], "0.0.0.0")
    client = TestClient(page.app, base_url="http://train.example")
    assert [client.get(where).status_code for where in ("/", "/events", "/trace/0/1/0")] == [401] * 3
    assert client.get("/enter/wrong").status_code == 401
    assert client.get(page.ways[0][1]).status_code == 200


def test_on_this_machine_another_name_is_refused(tmp_path):
    client = TestClient(watch_page([str(folder(tmp_path))], "127.0.0.1").app, base_url="http://evil.example")
    assert client.get("/").status_code == 400


@pytest.mark.parametrize("made", ["nothing", "another command"])
def test_what_is_no_run_is_named(tmp_path, capsys, made):
    where = tmp_path / "x"
    if made != "nothing":
        where.mkdir()
        (where / "config.json").write_text('{"command": "sft"}')
    assert main(["watch", str(where)]) == 2
    assert str(where) in capsys.readouterr().err


def test_what_shows_a_run_starts_without_torch():
    code = "import sys, plaudit.pages.watching, plaudit.pages.tracing; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the same prompts again and again ---------------------------------------------------------------------------------


def test_the_same_prompts_are_answered_again_with_the_same_draws(cache, tmp_path):
    """A policy that does not change says the same every time; one that does is seen beside its start."""
    still = tmp_path / "still"
    plaudit.ppo(config(still, probe__every=1, iterations=3, actor__learning_rate=0.0))
    lines = read_jsonl(still / "probes.jsonl")
    assert [line["step"] for line in lines] == [s for s in range(4) for _ in range(4)]
    assert all(lines[i]["response"] == lines[i % 4]["response"] for i in range(16))
    moved = tmp_path / "moved"
    plaudit.ppo(config(moved, probe__every=2, iterations=3, actor__learning_rate=0.05))
    later = read_jsonl(moved / "probes.jsonl")
    assert [line["step"] for line in later] == [s for s in (0, 2, 3) for _ in range(4)]
    assert [line["response"] for line in later[:4]] == [line["response"] for line in lines[:4]]
    assert later[8:] != later[:4]


def test_probing_changes_nothing_of_the_run(cache, tmp_path):
    plaudit.ppo(config(tmp_path / "with", probe__every=1))
    plaudit.ppo(config(tmp_path / "without", probe__prompts=0))
    assert not (tmp_path / "without" / "probes.jsonl").exists()

    def numbers(name: str) -> list[dict]:
        lines = read_jsonl(tmp_path / name / "metrics.jsonl")
        return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in lines]

    assert numbers("with") == numbers("without")
