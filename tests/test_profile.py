"""What a profile says of an iteration's time."""

from __future__ import annotations

import pytest
from tiny_runs import config

import plaudit
from plaudit.report import write_report
from plaudit.runs import read_jsonl


@pytest.mark.parametrize("kind", ["frozen_trunk", "separate", "shared_trunk"])
def test_phases_add_up_to_the_iteration(cache, tmp_path, kind: str):
    plaudit.ppo(config(tmp_path / "run", profile=True, arrangement__kind=kind))
    for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        phases = {key.removeprefix("seconds/"): v for key, v in line.items() if key.startswith("seconds/")}
        assert {"generate", "read", "judge", "improve", "publish", "trace"} <= set(phases)
        assert 0.5 * line["seconds"] < sum(phases.values()) < line["seconds"]
        for phase in ("generate", "read", "improve"):
            tokens = line["response_tokens"] * 8
            assert line[f"tokens_per_second/{phase}"] == pytest.approx(tokens / phases[phase])
            assert 0 < line[f"share_of_limit/{phase}"] < 3
    assert "Where an iteration" in write_report(tmp_path / "run").read_text()


def test_without_being_asked_phases_have_their_seconds_and_no_rates(cache, tmp_path):
    plaudit.ppo(config(tmp_path / "run"))
    line = read_jsonl(tmp_path / "run" / "metrics.jsonl")[0]
    assert 0 < line["seconds/improve"] < line["seconds"]
    assert not any(key.startswith(("tokens_per_second", "share_of_limit")) for key in line)
    page = write_report(tmp_path / "run").read_text()
    assert "Where an iteration" in page and "Of the rate of" not in page
