"""The report, through its one entry, on small run folders made here: whole, safe, and honest about what is missing."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from plaudit.errors import RunError
from plaudit.report import write_report

STAGES = ("sft", "collect", "label", "reward", "ppo", "evaluate")
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}$\\frac"


class Page(HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str, **wanted: str) -> int:
        return sum(t == tag and wanted.items() <= a.items() for t, a in self.tags)


def _json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def _lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps({"step": 1} | row) + "\n" for row in rows), encoding="utf-8")


def _config(command: str) -> dict[str, Any]:
    more = {"ppo": {"monitors": ["gold", "vader"]}, "evaluate": {"judges": ["gold", "vader"]}}
    return {"command": command, "seed": 0, "model": "tiny", "optimizer": {"betas": [0.9, 0.999]}} | more.get(
        command, {}
    )


def _answers(count: int = 40) -> list[dict[str, Any]]:
    """An evaluation in which every answer gets better in gold's eyes, and all become the same."""
    return [
        {
            "prompt": f"opening {i} ",
            "before": f"number {i} is dull and slow in way {i}.",
            "after": "a moving and charming film, a moving and charming film.",
            "ended_before": True,
            "ended": i > 0,
            "kl": float(i % 5),
            **{"gold_before": 0.2, "gold_after": 0.9, "vader_before": 0.0, "vader_after": 0.5 * (i % 2)},
            **{"score_before": i / 40, "score_after": 1 + i / 40},
        }
        for i in range(count)
    ]


def _ppo_metrics(count: int = 12) -> list[dict[str, Any]]:
    names = ("score", "gold", "vader", "kl", "response_tokens", "ended", "explained_variance", "distinct2", "seconds")
    names += (
        "actor/entropy_nats_per_token",
        "actor/clip_fraction",
        "actor/approx_kl_k2_nats_per_token",
        "first_log_ratio_max",
        "engine_gap_nats_per_token",
    )
    return [{"step": i + 1} | {name: (i + k) / (20 + k) for k, name in enumerate(names)} for i in range(count)]


def _source(accuracy: float) -> dict[str, Any]:
    bins = [{"confidence": 0.55, "accuracy": 0.5, "pairs": 30}, {"confidence": 0.8, "accuracy": 0.7, "pairs": 20}]
    measured = {"accuracy": accuracy, "low": accuracy - 0.05, "high": accuracy + 0.05, "pairs": 50, "comparisons": 50}
    return measured | {"ece": 0.07, "calibration": bins, "longer_wins": 0.52, "bag_of_words": 0.61}


def _stage(folder: Path, command: str) -> Path:
    """A finished run folder of a stage."""
    _json(folder / "config.json", _config(command))
    _json(folder / "environment.json", {"python": "3.11", "started": "2030-01-01T00:00:00+0000"})
    summary: dict[str, Any] = {"seconds": 61.0, "peak_rss_mib": 900, "seed": 0}
    metrics: list[dict[str, Any]] = [
        {"step": i, "nll_nats_per_token": 3 / i, "loss": 1 / i, "accuracy": 0.7} for i in range(1, 4)
    ]
    samples: list[dict[str, Any]] = [{"prompt": "it is", "response": f" text {i}", "ended": True} for i in range(4)]
    if command == "collect":
        summary |= {"answers": 8, "comparisons": 2, "human_comparisons": 0}
    if command == "label":
        summary |= {"labelled": 1}
        samples = [{"prompt": "", "answers": ["worse", "better"], "ranks": [1, 0], "annotator": "oracle"}]
    if command == "reward":
        headline = {"reward_model_accuracy": 0.8, "reward_model_accuracy_low": 0.75, "reward_model_accuracy_high": 0.85}
        summary |= headline | {"longer_wins": 0.52, "bag_of_words": 0.61, "sources": {"people": _source(0.8)}}
        samples = [{"response": "word " * i, "score": i % 3, "rank": 0, "annotator": "people"} for i in range(9)]
    if command == "ppo":
        metrics = _ppo_metrics()
        samples = [
            {"step": i, "prompt": "p", "response": f" said in {i}", "score": 0.5, "kl": 1.0} for i in range(1, 13)
        ]
        _lines(folder / "events.jsonl", [{"kind": "warning", "message": "look for dropout", "step": 3}])
    if command == "evaluate":
        summary |= {"n_eval": 40, "gold_before": 0.0, "gold_after": 1.0, "vader_before": 0.0, "vader_after": 0.25}
        summary |= {
            "win_rate": 1.0,
            "win_rate_low": 0.91,
            "win_rate_high": 1.0,
            "kl": 2.0,
            "kl_stderr": 0.1,
            "ended": 0.9,
        }
        samples = _answers()
    _lines(folder / "metrics.jsonl", metrics)
    _lines(folder / "samples.jsonl", samples)
    _json(folder / "summary.json", summary)
    return folder


def _quickstart(folder: Path) -> Path:
    _json(folder / "config.json", _config("quickstart"))
    for command in STAGES:
        _stage(folder / command, command)
    _json(folder / "summary.json", {"seconds": 366.0, "peak_rss_mib": 900})
    return folder


def _page(folder: Path) -> Page:
    return Page(write_report(folder).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished quickstart's report."""
    return write_report(_quickstart(tmp_path_factory.mktemp("runs") / "quickstart"))


def test_a_quickstart_is_reported_whole(report: Path) -> None:
    page = Page(report.read_text(encoding="utf-8"))
    assert report.parts[-2:] == ("quickstart", "report.html") and report.stat().st_size < 3_000_000
    for words in (
        "0% → 100%",
        "95% interval 91% to 100%",
        "Calibration",
        "Explained variance",
        "look for dropout",
        "1 min 1 s",
    ):
        assert words in page.text
    assert "Not there yet" not in page.text
    sections = [attrs["id"] for tag, attrs in page.tags if tag == "section"]
    assert sections[:4] == ["improved", "curves", "proxy", "reward"] and sections[-1] == "settings"
    assert all(page.count("a", href=f"#{name}") == 1 for name in sections)


def test_the_page_needs_nothing_from_outside(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    page = Page(text)
    assert not {"script", "link", "img", "image", "iframe", "object"} & {tag for tag, _ in page.tags}
    for _, attrs in page.tags:
        assert all(str(attrs[name]).startswith("#") for name in ("src", "href", "xlink:href") if name in attrs)
    assert "http:" not in text and "https:" not in text and "@import" not in text
    names = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(names) == len(set(names))
    assert all(attrs.get("aria-label") for tag, attrs in page.tags if tag == "svg")


@pytest.mark.parametrize("command", STAGES)
def test_every_stage_has_a_report_of_its_own(tmp_path: Path, command: str) -> None:
    page = _page(_stage(tmp_path / "run", command))
    assert "Not there yet" not in page.text and f"plaudit {command}" in page.text


@pytest.mark.parametrize("command", ("quickstart", *STAGES))
def test_a_run_that_has_only_begun_says_what_is_missing(tmp_path: Path, command: str) -> None:
    _json(tmp_path / "config.json", _config(command))
    text = _page(tmp_path).text
    assert "Not there yet" in text and "This run is not finished" in text


def test_a_stage_that_was_stopped_shows_its_curves(tmp_path: Path) -> None:
    _json(tmp_path / "config.json", _config("ppo"))
    _lines(tmp_path / "metrics.jsonl", [*_ppo_metrics(3), {"step": 4, "score": float("nan"), "kl": None}])
    page = _page(tmp_path)
    assert "Reward score" in page.text and "not finished" in page.text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    folder = _quickstart(tmp_path / "run")
    row = {
        "prompt": HOSTILE,
        "before": HOSTILE,
        "after": "x" * 5000 + "\ud800",
        f"{HOSTILE}_before": 0.1,
        f"{HOSTILE}_after": 0.2,
    }
    _lines(folder / "evaluate" / "samples.jsonl", [row, row])
    _json(folder / "evaluate" / "config.json", _config("evaluate") | {"judges": [HOSTILE]})
    _json(folder / "evaluate" / "summary.json", {f"{HOSTILE}_before": 0.1, f"{HOSTILE}_after": 0.2, "win_rate": 0.5})
    _json(folder / "reward" / "summary.json", {"sources": {HOSTILE: _source(0.7)}})
    _json(folder / "ppo" / "config.json", _config("ppo") | {"monitors": [HOSTILE], "model": HOSTILE})
    _lines(folder / "ppo" / "metrics.jsonl", [m | {HOSTILE: 0.1} for m in _ppo_metrics()])
    page = _page(folder)
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attrs in page.tags for name in attrs)
    assert HOSTILE in page.text and "5001 characters in all" in page.text


def test_twenty_prompts_are_drawn_at_random_and_stay_the_same(tmp_path: Path) -> None:
    def shown() -> list[int]:
        text = _page(tmp_path / "run").text
        return [i for i in range(40) if f"opening {i} number {i} " in text]

    _stage(tmp_path / "run", "evaluate")
    first = shown()
    assert len(first) == 20 and first != list(range(20)) and shown() == first
    _json(tmp_path / "run" / "config.json", _config("evaluate") | {"seed": 1})
    assert shown() != first


def test_answers_that_have_become_alike_are_marked(tmp_path: Path) -> None:
    page = _page(_stage(tmp_path / "run", "evaluate"))
    assert page.count("tr", **{"class": "watch"}) >= 4
    assert "“a moving and”" in page.text or "“moving and charming”" in page.text
    _lines(tmp_path / "run" / "samples.jsonl", [row | {"after": row["before"]} for row in _answers()])
    assert _page(tmp_path / "run").count("tr", **{"class": "watch"}) == 0


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    _stage(tmp_path / "run", "ppo")
    _lines(tmp_path / "run" / "metrics.jsonl", _ppo_metrics(4000))
    assert write_report(tmp_path / "run").stat().st_size < 1_000_000


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        write_report(tmp_path / "missing")
    with pytest.raises(RunError, match="is no run folder; it has no config.json"):
        write_report(tmp_path)
    _json(tmp_path / "config.json", {"model_type": "llama"})
    with pytest.raises(RunError, match="is no run folder; its config.json names no command"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    _stage(tmp_path / "run", "sft")
    (tmp_path / "run" / "report.html").mkdir()
    with pytest.raises(RunError, match="report.html: cannot be written"):
        write_report(tmp_path / "run")
    assert not list((tmp_path / "run").glob(".report*"))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match="metrics.jsonl: cannot be read"):
        write_report(tmp_path / "run")


def test_it_is_cheap_to_import_and_leaves_matplotlib_alone(report: Path) -> None:
    code = (
        "import sys, plaudit.report as r; assert not {'torch', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "r.write_report(sys.argv[1]); import matplotlib; now, usual = matplotlib.rcParams, matplotlib.rcParamsDefault\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "assert all(now[k] == usual[k] for k in ('svg.fonttype', 'svg.hashsalt', 'text.color', 'font.size'))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(report.parent)], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
