"""A trace shows the numbers that the update used: they add up to the run's own metrics, and each to its sum."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
from tiny_runs import config

import plaudit
from plaudit.cli import main
from plaudit.inspection import trace
from plaudit.presets import PRESETS
from plaudit.runs import Run, read_jsonl, trace_place, traced_steps
from plaudit.web.trace import trace_page
from plaudit.web.words import sum_words

KINDS: dict[str, dict] = {
    "default": {},
    "every convention of the row": {"conventions__score_position": "row_end", "conventions__kl_over": "row"},
    "score at the end of the row": {"conventions__score_position": "row_end"},
    "score after the end": {"conventions__score_position": "after_end"},
    "KL in the loss": {"kl__place": "loss"},
    "exact KL": {"kl__estimator": "full"},
    "whitened rewards": {"whiten_rewards": True},
    "padding whitened too": {"whiten_rewards": True, "conventions__preset": "trl-0.7"},
    "bootstrapped": {"bootstrap_truncated": True},
    "rewards summed": {"value_target": "discounted_sum", "gamma": 0.9},
    "one trunk": {"arrangement__kind": "shared_trunk"},
    "everything trained": {"arrangement__kind": "separate"},
    "rloo": {"estimator": "rloo", "samples_per_prompt": 2, "batch_size": 4},
    "n steps": {"estimator": "n_step", "n_steps": 2},
    "reinforce++": {"estimator": "reinforce++"},
    "lagging": {"pool__refresh_every": 2, "iterations": 2},
    "two clips": {"clip_range": 0.01, "clip_range_above": 0.02, "actor__learning_rate": 1e-2},
    "limited KL": {"conventions__kl_clamp__estimate": 0.01, "actor__learning_rate": 1e-2},
    "limited ratio": {"conventions__ratio_clamp": 0.01, "actor__learning_rate": 1e-2},
    "fixed length": {"sampling__fixed_length": True, "truncation_penalty": 0.0},
}
KINDS |= {f"as {name}": {"conventions__preset": name} for name in PRESETS if name != "plaudit"}
#: answers of different lengths: the tiny model ends with one of these often
STOPS = {"sampling__max_new_tokens": 8, "sampling__stop": list("aeiou0123456789")}


def traced(out: Path, **keys) -> tuple[list[trace.Found], dict[str, float]]:
    """All answers of a run's last iteration, and that iteration's metrics."""
    if not keys.get("sampling__fixed_length") and keys.get("conventions__preset") != "ziegler19":
        keys = STOPS | keys
    plaudit.ppo(config(out, **{"trace__answers": 8} | keys))
    made = trace.read(out, traced_steps(out)[-1])
    return [trace.Found(made.step, made.rules, a) for a in made.answers], read_jsonl(out / "metrics.jsonl")[-1]


def close(a: float, b: float, places: float = 1e-5) -> bool:
    return math.isclose(a, b, rel_tol=1e-4, abs_tol=places)


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("traced") / "run"
    return traced(out, **KINDS[request.param])


def test_the_tokens_of_a_trace_add_up_to_the_metrics_of_its_iteration(run):
    answers, metrics = run
    tokens = [t for a in answers for t in a.trace.tokens]
    steps = [s for t in tokens for s in t.steps]
    assert sum(t.chosen for t in tokens) == pytest.approx(metrics["response_tokens"] * len(answers))
    assert sum(a.trace.score for a in answers) / len(answers) == pytest.approx(metrics["score"], abs=1e-6)
    assert sum(t.kl for t in tokens if t.kl_charged) / len(answers) == pytest.approx(metrics["kl"], abs=1e-5)

    def mean(name: str, of_policy: bool) -> float:
        """Means over each step's tokens, then over the steps, as the run has them."""
        updates = sorted({s.update for s in steps})
        means = []
        for update in updates:
            found = [
                getattr(s, name) for t in tokens for s in t.steps if s.update == update and (t.chosen or not of_policy)
            ]
            found = [float(x) for x in found if x is not None]
            means.append(sum(found) / len(found))
        return sum(means) / len(means)

    assert mean("policy_loss", True) == pytest.approx(metrics["actor/policy_loss"], rel=1e-4, abs=1e-5)
    assert mean("clipped", True) == pytest.approx(metrics["actor/clip_fraction"], abs=1e-6)
    assert mean("entropy", True) == pytest.approx(metrics["actor/entropy_nats_per_token"], rel=1e-5)


def test_every_number_is_its_sum(run):
    answers, _ = run
    for found in answers:
        rules, answer = found.rules, found.trace
        assert close(sum(t.score + t.dense for t in answer.tokens), answer.paid)
        counted = [t for t in answer.tokens if t.counted]
        for token, following in zip(counted, [*counted[1:], None], strict=True):
            charged = rules.kl_coef * token.kl if token.kl_charged and rules.kl_place == "reward" else 0.0
            assert close(token.reward, token.score + token.dense - charged)
            if token.chosen:
                assert close(token.advantage, scaled(rules.advantages, token.raw_advantage))
                assert close(token.whitened_reward, scaled(rules.rewards, token.reward))
            if rules.estimator == "gae":
                then, later = (following.value, following.raw_advantage) if following else (answer.bootstrap, 0.0)
                delta = token.whitened_reward + rules.gamma * then - token.value
                assert close(token.raw_advantage, delta + rules.gamma * rules.lam * later)
                if rules.value_target == "lambda_return" and token.chosen:
                    assert close(token.returns, token.raw_advantage + token.value)
            own = [a.logprob for a in token.alternatives if a.id == token.id]
            assert all(close(p, token.logprob, 1e-4) for p in own)
            likely = [a.logprob for a in token.alternatives]
            assert likely == sorted(likely, reverse=True) and len(likely) == (5 if token.chosen else 0)


def test_every_printed_sum_comes_out(run):
    """Each `… = x` in numbers alone is reckoned again, as far as its rounded terms allow."""
    answers, _ = run
    reckoned = 0
    for found in answers:
        for place in range(len(found.trace.tokens)):
            for text in sums(found, place).values():
                for clause in re.split(r";|, beyond", text):
                    *_, left, right = ["", "", *clause.replace("−", "-").replace("×", "*").split(" = ")]
                    left = re.sub(r"score|step \d+:|whitened:", "", left).replace("exp", "math.exp")
                    if re.fullmatch(r"[-+*/(). 0-9e]*", left.replace("math.exp", "")) and re.search(r"\d", left):
                        assert eval(left) == pytest.approx(float(right), abs=0.02, rel=0.05), text
                        reckoned += 1
    assert reckoned > 50


def test_what_the_policy_did_not_choose_has_no_ratio(run):
    answers, _ = run
    tokens = [t for a in answers for t in a.trace.tokens]
    assert any(t.chosen for t in tokens)
    for token in tokens:
        if not token.chosen:
            assert all(s.ratio is None and s.policy_loss is None for s in token.steps) and not token.alternatives
        assert (token.logprob is None) == (token.id is None)
    for found in answers:
        assert sum(t.score != 0 for t in found.trace.tokens) <= 1
        assert found.trace.paid == 0 or close(sum(t.score + t.dense for t in found.trace.tokens), found.trace.paid)


def test_conventions_that_look_beyond_an_answer_show_places_beyond_it(tmp_path):
    for name, keys in {"one": {"conventions__preset": "trl-1"}, "row": KINDS["score at the end of the row"]}.items():
        answers, _ = traced(tmp_path / name, **keys)
        assert any(not t.chosen for a in answers for t in a.trace.tokens)


def test_a_step_that_was_refused_is_told_from_one_that_was_taken(tmp_path):
    keys = {"conventions__skip_above_mean_ratio": 1.0001, "actor__learning_rate": 0.05, "epochs": 3}
    answers, metrics = traced(tmp_path / "run", **keys)
    steps = [s for a in answers for t in a.trace.tokens for s in t.steps]
    assert metrics["actor/skipped"] > 0
    refused = {s.update for s in steps if not s.taken}
    assert len(refused) == round(metrics["actor/skipped"] * metrics["updates"])
    for found in answers:
        for token in found.trace.tokens:
            last = trace.last_step(token)
            assert last is None or last.update not in refused


def sums(found: trace.Found, place: int) -> dict[str, str]:
    return trace.sums(found, place, sum_words("en"))


def scaled(scale: trace.Scaling | None, x: float) -> float:
    return x if scale is None else (x - scale.shift) / scale.deviation


def test_the_first_step_sees_the_policy_that_sampled(tmp_path):
    answers, _ = traced(tmp_path / "run")
    first = [s.ratio for a in answers for t in a.trace.tokens for s in t.steps if s.update == 1]
    assert first and all(abs(ratio - 1) < 1e-5 for ratio in first)


def test_a_sum_says_what_the_score_cost_and_what_a_clip_does(tmp_path):
    answers, _ = traced(tmp_path / "run", **KINDS["two clips"])
    last = len(answers[0].trace.tokens) - 1
    text = sums(answers[0], last)["reward"]
    assert re.search(r"−0\.06 × .* \+ score .* = ", text) and "1.000 for penalties" in text
    every = [sums(a, i).get("ratio", "") for a in answers for i in range(len(a.trace.tokens))]
    assert any("beyond 1.02: clipped" in t for t in every) or any("beyond 0.99: clipped" in t for t in every)


def test_a_users_own_functions_are_named_in_the_sums(tmp_path):
    (tmp_path / "mine.py").write_text("def halved(rewards, rollout):\n    return rewards / 2\n")
    answers, _ = traced(tmp_path / "run", functions__token_rewards=f"{tmp_path}/mine.py:halved")
    token = answers[0].trace.tokens[-1]
    assert "functions.token_rewards makes" in sums(answers[0], len(answers[0].trace.tokens) - 1)["reward"]
    assert close(token.reward, (token.score - answers[0].rules.kl_coef * token.kl) / 2)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("made") / "run"
    plaudit.ppo(config(out))
    return out


@pytest.fixture
def out(made, tmp_path) -> Path:
    """A run of one's own, to look at or to meddle with."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def test_the_command_prints_the_answer_and_writes_the_page(out, capsys):
    assert main(["trace", str(out), "--row", "2", "--iteration", "1"]) == 0
    said = capsys.readouterr().out
    answer = trace.read(out, 1).answers[2]
    assert "iteration 1, answer 2" in said and answer.prompt in said and "trace.html" in said
    for token in answer.tokens:
        assert f"{token.logprob:.2f}".replace("-", "−") in said
    page = (out / "trace.html").read_text(encoding="utf-8")
    assert "http" not in page and page.count('<button type="button" class="token') == len(answer.tokens)


def test_an_answer_is_found_by_its_prompt(out):
    wanted = trace.read(out, 1).answers[3].prompt
    assert trace.find(out, prompt=wanted.upper()[:5]).trace.prompt.startswith(wanted[:5])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--iteration", "9"], r"iteration 9 is not traced; traced are 1, 2"),
        (["--row", "40"], r"no traced row 40, only 0 to 3; a run with trace.answers=41"),
        (["--prompt", "nowhere"], r"no traced answer has 'nowhere'"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(out, capsys, words, message):
    assert main(["trace", str(out), *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_other_folders_and_torn_files_are_named(tmp_path, capsys):
    assert main(["trace", str(tmp_path / "none")]) == 2
    assert "is no run folder" in capsys.readouterr().err
    out = tmp_path / "run"
    plaudit.ppo(config(out, trace__answers=0))
    assert not (out / "traces").exists()
    assert main(["trace", str(out)]) == 2
    assert "holds no traces" in capsys.readouterr().err
    (out / "traces").mkdir()
    (out / "traces" / "iteration-000001.json").write_text("{")
    assert main(["trace", str(out)]) == 2
    assert "cannot be read as a trace" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t["answers"][0]["tokens"][0].update(logprob=float("nan")), "NaN"),
        (lambda t: t["answers"][0].update(tokens=[]), "without a token"),
        (lambda t: t["rules"].pop("gamma"), "another version"),
    ],
)
def test_a_trace_that_was_meddled_with_is_named(out, capsys, change, why):
    file = out / trace_place(2)
    made = json.loads(file.read_text())
    change(made)
    file.write_text(json.dumps(made))
    assert main(["trace", str(out)]) == 2
    assert why in capsys.readouterr().err


def test_traces_of_iterations_that_a_resumed_run_makes_again_are_dropped(out):
    assert traced_steps(out) == [1, 2]
    Run(out, "ppo").forget_after(1)
    assert traced_steps(out) == [1]


def test_a_hostile_answer_is_text_on_the_page(out):
    found = trace.find(out)
    evil = dataclasses.replace(found.trace.tokens[0], text="<script>alert(1)</script>\u202e")
    found = dataclasses.replace(
        found, trace=dataclasses.replace(found.trace, prompt="<img src=x>", tokens=(evil, *found.trace.tokens[1:]))
    )
    for language in ("en", "zh"):
        page = trace_page(found, language)
        assert "<script>alert" not in page and "<img" not in page and "\u202e" not in page
