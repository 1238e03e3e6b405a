"""Signs of trouble from a run's numbers: seen when they are there, silent when a run goes well."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny_runs import config

import plaudit
from plaudit.inspection.health import signs
from plaudit.runs import read_jsonl


def run(n: int, **series) -> list[dict[str, float]]:
    """``n`` iterations of a run that goes well, with some series replaced; a series is a function of t from 0 to 1."""
    noise = random.Random(0)
    good = {
        "score": lambda t: 2 * t,
        "gold": lambda t: 0.55 + 0.4 * t,
        "kl": lambda t: 12 * t,
        "response_tokens": lambda t: 22 - 4 * t,
        "empty": lambda t: 0.0,
        "distinct2": lambda t: 0.9 - 0.15 * t,
        "repeated3": lambda t: 0.01,
        "score_length": lambda t: 0.1,
        "explained_variance": lambda t: 0.5,
        "actor/entropy_nats_per_token": lambda t: 2.5 - t,
        "actor/clip_fraction": lambda t: 0.1,
        "score_std": lambda t: 1.2,
        "kl_coef": lambda t: 0.06,
        "first_log_ratio_max": lambda t: 1e-6,
    }
    made = good | series
    return [
        {"step": i + 1} | {k: f(i / (n - 1)) * (1 + noise.uniform(-0.03, 0.03)) for k, f in made.items()}
        for i in range(n)
    ]


def seen(lines) -> set[str]:
    return {s.kind for i in range(1, len(lines) + 1) for s in signs(lines[:i], ["gold"])}


def test_a_run_that_goes_well_is_left_in_peace():
    assert seen(run(30)) == set()


@pytest.mark.parametrize(
    ("kind", "series"),
    [
        ("collapse", {"response_tokens": lambda t: 22 - 20 * t}),
        ("collapse", {"empty": lambda t: t}),
        ("length", {"response_tokens": lambda t: 20 + 25 * t, "score_length": lambda t: 0.7}),
        ("length", {"response_tokens": lambda t: 20 + 60 * t, "score_length": lambda t: 0.0}),
        ("diversity", {"distinct2": lambda t: 0.9 - 0.6 * t}),
        ("repetition", {"repeated3": lambda t: 0.01 + 0.4 * t}),
        ("kl_spent", {"score": lambda t: min(2.0, 5 * t), "kl": lambda t: 40 * t}),
        ("kl_runaway", {"kl": lambda t: 60 * t**4}),
        ("reward_scale", {"score_std": lambda t: 0.005}),
        ("reward_scale", {"score_std": lambda t: 400.0}),
        ("first_ratio", {"first_log_ratio_max": lambda t: 0.02}),
        ("clipping", {"actor/clip_fraction": lambda t: 0.6}),
        ("critic", {"explained_variance": lambda t: -0.4}),
        ("entropy", {"actor/entropy_nats_per_token": lambda t: 2.5 - 2.4 * t}),
        ("parted_gold", {"gold": lambda t: 0.55 + 0.4 * min(t, 0.5) - 0.5 * max(0.0, t - 0.5)}),
    ],
)
def test_each_sign_is_seen_and_says_what_to_do(kind: str, series):
    lines = run(30, **series)
    assert kind in seen(lines)
    sign = next(s for i in range(1, 31) for s in signs(lines[:i], ["gold"]) if s.kind == kind)
    assert sign.why and sign.advice
    assert sign.message.startswith(f"iteration {sign.iteration}: ") and any(c.isdigit() for c in sign.seen + sign.kind)


def test_the_collapse_is_seen_before_all_answers_are_empty():
    lines = run(30, response_tokens=lambda t: 22 * (1 - t) + 1)
    first = next(i for i in range(1, 31) if any(s.kind == "collapse" for s in signs(lines[:i])))
    assert lines[first - 1]["response_tokens"] > 5


def test_a_noisy_judge_is_believed_only_where_it_falls_by_more_than_its_noise():
    def told(course) -> int:
        """In how many of 200 runs the judge, with noise of 0.08 about its course, parts from a score that rises."""
        noise = random.Random(0)
        runs = (
            [{"score": i / 15 + noise.gauss(0, 0.2), "vader": course(i / 29) + noise.gauss(0, 0.08)} for i in range(30)]
            for _ in range(200)
        )
        return sum(any(signs(r[:i], ["vader"]) for i in range(1, 31)) for r in runs)

    assert told(lambda t: 0.3 + 0.3 * t) <= 4
    assert told(lambda t: 0.5) <= 20
    assert told(lambda t: 0.5 + 0.3 * min(t, 0.5) - 0.8 * max(0.0, t - 0.5)) >= 180


def test_a_policy_that_samples_from_older_weights_has_another_first_ratio_and_that_is_no_sign():
    lines = run(30, first_log_ratio_max=lambda t: 0.5)
    assert not signs(lines, on_policy=False)


# --- real runs that go wrong, and that go well ------------------------------------------------------------------------

REWARDS = """
def shorter(prompts, responses):
    return [-len(r) / 2 for r in responses]

def flat(prompts, responses):
    return [1e-4 * sum(c in "aeiou" for c in r) for r in responses]

def steep(prompts, responses):
    return [1e4 * sum(c in "aeiou" for c in r) for r in responses]
"""
WRONG = {
    "reward_scale": {"reward": "flat"},
    "reward_scale too": {"reward": "steep"},
    "collapse": {"reward": "shorter", "iterations": 15, "actor__learning_rate": 1e-2, "truncation_penalty": 0.0},
    "kl_runaway": {"iterations": 15, "kl__coef": 0.0, "actor__learning_rate": 2e-2},
    "clipping": {"actor__learning_rate": 0.1, "epochs": 6},
}
SMALL = {"arrangement__kind": "separate", "sampling__max_new_tokens": 8, "batch_size": 16, "trace__answers": 0}


def warned(out: Path) -> list[str]:
    return [line["sign"] for line in read_jsonl(out / "events.jsonl") if line["kind"] == "warning"]


@pytest.mark.parametrize("name", WRONG)
def test_a_run_that_goes_wrong_says_so(cache, tmp_path, name):
    (tmp_path / "mine.py").write_text(REWARDS)
    keys = SMALL | {"iterations": 4} | WRONG[name]
    if "reward" in keys:
        keys["reward"] = f"{tmp_path}/mine.py:{keys['reward']}"
    plaudit.ppo(config(tmp_path / "run", **keys))
    assert name.split()[0] in warned(tmp_path / "run")


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_goes_well_says_nothing(cache, tmp_path, seed):
    out = tmp_path / "run"
    plaudit.ppo(config(out, seed=seed, iterations=12, truncation_penalty=0.0, **SMALL))
    assert warned(out) == []


def test_no_numbers_no_signs():
    assert signs([]) == []
    assert signs([{"step": 1}]) == []
