"""Signs of trouble from a run's numbers: seen when they are there, silent when a run goes well."""

from __future__ import annotations

import random

import pytest

from plaudit.inspection.health import signs


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
        ("diversity", {"distinct2": lambda t: 0.9 - 0.6 * t}),
        ("repetition", {"repeated3": lambda t: 0.01 + 0.4 * t}),
        ("kl_spent", {"score": lambda t: min(2.0, 5 * t), "kl": lambda t: 40 * t}),
        ("clipping", {"actor/clip_fraction": lambda t: 0.6}),
        ("critic", {"explained_variance": lambda t: -0.4}),
        ("entropy", {"actor/entropy_nats_per_token": lambda t: 2.5 - 2.4 * t}),
        ("parted_gold", {"gold": lambda t: 0.55 + 0.4 * min(t, 0.5) - 0.5 * max(0.0, t - 0.5)}),
    ],
)
def test_each_sign_is_seen_and_says_what_to_do(kind: str, series):
    lines = run(30, **series)
    assert kind in seen(lines)
    message = next(s.message for i in range(1, 31) for s in signs(lines[:i], ["gold"]) if s.kind == kind)
    assert message.startswith("iteration ") and any(c.isdigit() for c in message)


def test_the_collapse_is_seen_before_all_answers_are_empty():
    lines = run(30, response_tokens=lambda t: 22 * (1 - t) + 1)
    first = next(i for i in range(1, 31) if any(s.kind == "collapse" for s in signs(lines[:i])))
    assert lines[first - 1]["response_tokens"] > 5


def test_no_numbers_no_signs():
    assert signs([]) == []
    assert signs([{"step": 1}]) == []
