"""Every piece of the PPO step that a configuration can ask for, through ``plaudit.ppo`` on the tiny model."""

from __future__ import annotations

import json
import math
import sys
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import config
from transformers import AutoModelForCausalLM

import plaudit
from plaudit.config import PPOConfig
from plaudit.conventions import PRESETS
from plaudit.errors import ConfigError, PlauditError
from plaudit.models import builtin
from plaudit.runs import read_jsonl
from plaudit.schema import read


def metrics(cfg: PPOConfig) -> list[dict[str, float]]:
    plaudit.ppo(cfg)
    return read_jsonl(Path(cfg.out) / "metrics.jsonl")


def weights(out: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32).state_dict()


def begin() -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(builtin.folder("tiny"), dtype=torch.float32).state_dict()


PLAIN: dict[str, Path] = {}


def plain_run(folders: pytest.TempPathFactory, **keys: Any) -> Path:
    """A run of the defaults with these keys; each is made once."""
    name = json.dumps(keys, sort_keys=True)
    if name not in PLAIN:
        PLAIN[name] = folders.mktemp("plain") / "run"
        plaudit.ppo(config(PLAIN[name], **keys))
    return PLAIN[name]


def same(a: Path, b: Path) -> bool:
    one, two = weights(a), weights(b)
    return all(torch.equal(one[k], two[k]) for k in one)


#: long enough for some answers to end before the limit
LONG = {"sampling__max_new_tokens": 24, "batch_size": 64, "reward_normalise": True}
ENDING = {"sampling__max_new_tokens": 24, "batch_size": 64}
PIECES = {
    "kl_k2": {"kl__estimator": "k2"},
    "kl_k3": {"kl__estimator": "k3"},
    "kl_abs": {"kl__estimator": "abs"},
    "kl_full": {"kl__estimator": "full"},
    "kl_in_loss": {"kl__place": "loss"},
    "kl_full_in_loss": {"kl__place": "loss", "kl__estimator": "full"},
    "n_step": {"estimator": "n_step", "n_steps": 3},
    "reinforce": {"estimator": "reinforce"},
    "reinforce++": {"estimator": "reinforce++"},
    "rloo": {"estimator": "rloo", "samples_per_prompt": 2},
    "grpo": {"estimator": "grpo", "samples_per_prompt": 2},
    "discounted_sum": {"value_target": "discounted_sum"},
    "bootstrap": {"bootstrap_truncated": True},
    "asymmetric": {"clip_range_above": 0.3, "dual_clip": 3.0},
    "entropy": {"entropy_coef": 0.01},
    "whitened": {"whiten_rewards": True},
    "clip": {"reward_clip": 0.1, "reward_normalise": True},
    "penalties": {"truncation": "replace", "length_penalty": 0.01},
    "reduction": {"loss_reduction": "seq-mean-token-sum"},
    "adafactor": {"actor__optimizer": "adafactor"},
    "cosine": {"actor__schedule": "cosine", "actor__schedule_per": "rollout", "actor__warmup_fraction": 0.1},
    "eps": {"actor__eps_corrected": False},
    "importance": {"pool__importance_cap": 2.0},
    "random_head": {"critic_head": "random"},
    "fixed_length": {"sampling__fixed_length": True, "truncation_penalty": 0.0, **LONG},
    "separate": {"arrangement__kind": "separate", "estimator": "rloo", "samples_per_prompt": 2},
    "shared": {"arrangement__kind": "shared_trunk", "estimator": "reinforce"},
    **{f"preset_{name}": {"conventions__preset": name} for name in PRESETS},
    "deviation_position": {"conventions__score_position": "after_end", **LONG},
    "deviation_kl": {"conventions__kl_over": "one_after", **LONG},
    "deviation_values": {"conventions__values_over": "one_after", "conventions__credit_over": "one_after", **LONG},
    "deviation_value_loss": {"conventions__value_loss_over": "one_after", **LONG},
    "deviation_row": {"conventions__kl_over": "row", "conventions__score_position": "row_end", **LONG},
    "deviation_clamp": {"conventions__ratio_clamp": 0.1},
}


@pytest.mark.parametrize("name", PIECES)
def test_each_piece_runs_and_is_felt(cache, tmp_path, tmp_path_factory, name: str):
    """It trains, its numbers are finite, its first ratio is 1; and it makes another model than the default does."""
    lines = metrics(config(tmp_path / "run", **PIECES[name]))
    assert len(lines) == 2
    assert all(math.isfinite(v) for line in lines for v in line.values())
    assert all(line["first_log_ratio_max"] < 1e-4 for line in lines)
    assert all(line["actor/entropy_nats_per_token"] >= 0 for line in lines)
    shape = ("arrangement__kind", "sampling__max_new_tokens", "batch_size", "reward_normalise")
    plain = {key: value for key, value in PIECES[name].items() if key in shape}
    default = plain_run(tmp_path_factory, **plain)
    exactly_plaudit = name in ("preset_plaudit", "importance", "random_head")
    if not exactly_plaudit:
        assert not same(tmp_path / "run", default)


def test_the_exact_kl_is_what_the_estimates_estimate(cache, tmp_path):
    keys = {"batch_size": 48, "kl__coef": 0.0, "actor__learning_rate": 3e-3, "iterations": 4}
    full = metrics(config(tmp_path / "full", kl__estimator="full", **keys))
    k3 = metrics(config(tmp_path / "k3", kl__estimator="k3", **keys))
    assert full[-1]["kl"] == pytest.approx(k3[-1]["kl"], rel=0.35) and full[-1]["kl"] > 0.1


def test_a_pool_serves_older_rollouts_and_the_ratio_is_to_the_policy_that_sampled(cache, tmp_path):
    keys = {"pool__size": 2, "pool__max_age": 1, "pool__refresh_every": 2, "iterations": 4}
    lines = metrics(config(tmp_path / "run", **keys))
    # the second iteration is sampled by the first one's weights, and its old log-probabilities are theirs
    assert lines[0]["first_log_ratio_max"] < 1e-4 < lines[1]["first_log_ratio_max"]
    assert max(line["engine_gap_nats_per_token"] for line in lines) < 1e-4


@pytest.mark.parametrize(
    "keys",
    [
        {"pool__size": 2, "pool__max_age": 1, "pool__refresh_every": 2},
        {"ema_decay": 0.5, "reward_normalise": True},
        {"ptx__coef": 0.5, "ptx__data": "texts.jsonl", "kl__controller": "adaptive"},
    ],
)
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_not(cache, tmp_path, monkeypatch, keys):
    monkeypatch.chdir(tmp_path)
    Path("texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in ("a red sea.", "an old tree.")))
    plaudit.ppo(config(Path("whole"), iterations=4, **keys))
    cfg = config(Path("cut"), iterations=4, checkpoint_every=2, **keys)
    from plaudit.algorithms import ppo as algorithm

    once, real = [], algorithm.ppo_iteration

    def killed(c, roles, state, *prompts):
        if state.iteration == 3 and not once:
            once.append(1)
            raise KeyboardInterrupt
        return real(c, roles, state, *prompts)

    monkeypatch.setattr(algorithm, "ppo_iteration", killed)
    with pytest.raises(KeyboardInterrupt):
        plaudit.ppo(cfg)
    plaudit.ppo(cfg, resume=True)
    assert same(Path("whole"), Path("cut"))


OVERLAPPED = {"pool__overlap": True, "iterations": 4, "actor__learning_rate": 5e-3, "checkpoint_every": 2}


@pytest.mark.parametrize("kind", ["frozen_trunk", "separate", "shared_trunk"])
def test_answers_sampled_ahead_are_those_of_the_policy_before_the_update(cache, tmp_path, kind: str, monkeypatch):
    """Beside the update or before it, the same run: what samples shares nothing with what is improved."""
    keys = OVERLAPPED | {"arrangement__kind": kind}
    beside = metrics(config(tmp_path / "beside", **keys))

    class AtOnce:
        def __init__(self, _threads: int):
            pass

        def submit(self, work):
            made: Future = Future()
            made.set_result(work())
            return made

    monkeypatch.setattr(sys.modules["plaudit.recipes.roles"], "ThreadPoolExecutor", AtOnce)
    before = metrics(config(tmp_path / "before", **keys))
    for mine, theirs in zip(beside, before, strict=True):
        assert without_times(mine) == without_times(theirs)
    # the first two are of the policy they improve and of the one before; the ratio is to the policy that sampled
    assert beside[0]["first_log_ratio_max"] < 1e-4 < beside[1]["first_log_ratio_max"]
    assert all(line["engine_gap_nats_per_token"] < 1e-4 for line in beside)


def without_times(line: dict[str, float]) -> dict[str, float]:
    return {k: v for k, v in line.items() if not k.startswith("seconds")}


def test_a_run_that_samples_ahead_is_resumed_exactly(cache, tmp_path, monkeypatch):
    whole = metrics(config(tmp_path / "whole", **OVERLAPPED))
    recipe = sys.modules["plaudit.recipes.ppo"]
    real = recipe.algorithm.ppo_iteration

    def stopping(cfg, roles, state, *prompts):
        if state.iteration == 2:
            raise KeyboardInterrupt
        return real(cfg, roles, state, *prompts)

    monkeypatch.setattr(recipe.algorithm, "ppo_iteration", stopping)
    made = config(tmp_path / "run", **OVERLAPPED)
    with pytest.raises(KeyboardInterrupt):
        plaudit.ppo(made)
    monkeypatch.setattr(recipe.algorithm, "ppo_iteration", real)
    plaudit.ppo(made, resume=True)
    resumed = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    for mine, theirs in zip(resumed, whole, strict=True):
        assert without_times(mine) == without_times(theirs)


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_an_engine_that_rounds_is_measured_and_corrected_and_leaves_the_ratio_alone(cache, tmp_path, weights: str):
    made = config(tmp_path / "run", engine__weights=weights)
    assert made.pool.importance_cap == 2.0
    for line in metrics(made):
        assert line["engine_gap_nats_per_token"] > 1e-5 and line["first_log_ratio_max"] < 1e-4
    assert config(tmp_path / "other").pool.importance_cap == 0


def test_a_critic_may_warm_up_alone(cache, tmp_path):
    lines = metrics(config(tmp_path / "run", critic_warmup=1))
    assert "actor/policy_loss" not in lines[0] and lines[0]["critic/value_loss"] > 0
    assert lines[1]["kl"] == pytest.approx(0, abs=1e-5) and "actor/policy_loss" in lines[1]


def test_updates_stop_once_the_policy_has_moved_far_enough(cache, tmp_path):
    free = metrics(config(tmp_path / "free", epochs=4))
    held = metrics(config(tmp_path / "held", epochs=4, stop_kl=1e-9))
    assert free[0]["updates"] == 8 and held[0]["updates"] == 2


def test_a_minibatch_out_of_bounds_is_left_out(cache, tmp_path):
    """Steps so large that the mean ratio leaves 1: some minibatches are left out, and the run says how many."""
    keys = {"conventions__skip_above_mean_ratio": 1.02, "actor__learning_rate": 0.05, "epochs": 4, "iterations": 1}
    (line,) = metrics(config(tmp_path / "run", **keys))
    assert 0 < line["actor/vetoed"] < 1


def test_several_sources_are_weighed_apart_and_together(cache, tmp_path):
    (tmp_path / "mine.py").write_text("def length(prompts, responses): return [float(len(r)) for r in responses]\n")
    extra = {"source": f"{tmp_path}/mine.py:length", "weight": -0.5, "clip": 3.0}
    lines = metrics(config(tmp_path / "run", reward_weight=2.0, extra_rewards=[extra]))
    for line in lines:
        assert line["score/extra1"] > 3
        assert line["score"] == pytest.approx(2 * line["score/reward"] - 0.5 * 3.0, abs=0.3)


def test_own_functions_take_the_place_of_ours(cache, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom plaudit import ops\n"
        "def rewards(rewards, rollout): return rewards * 0 + rollout.mask\n"
        "def advantages(rewards, values, mask):\n"
        "    returns = ops.discounted_sums(rewards, mask)\n    return returns - values * mask, returns\n"
        "def loss(new, old, advantages): return -torch.exp(new - old) * advantages\n"
        "said = []\ndef told(verb, state, record): open('said', 'a').write(verb + ' ')\n"
    )
    mine = f"{tmp_path}/mine.py"
    lines = metrics(
        config(
            tmp_path / "run",
            functions__token_rewards=f"{mine}:rewards",
            functions__advantages=f"{mine}:advantages",
            functions__policy_loss=f"{mine}:loss",
        )
    )
    assert all(math.isfinite(v) for line in lines for v in line.values())


@pytest.mark.parametrize(
    ("body", "said"),
    [("return rewards[:1]", "return a tensor of"), ("return rewards / 0 * 0", "not finite"), ("return 3", "int")],
)
def test_an_own_function_that_returns_nonsense_is_named(cache, tmp_path, body: str, said: str):
    (tmp_path / "mine.py").write_text(f"def f(rewards, rollout):\n    {body}\n")
    with pytest.raises(PlauditError, match=said) as error:
        plaudit.ppo(config(tmp_path / "run", functions__token_rewards=f"{tmp_path}/mine.py:f"))
    assert "mine.py:f" in str(error.value)


@pytest.mark.parametrize("what", ["raise ValueError('no')", "1 / 0", "raise SystemExit(0)"])
@pytest.mark.parametrize("place", ["token_rewards", "advantages", "policy_loss", "callbacks"])
def test_an_own_function_that_fails_is_named(cache, tmp_path, place: str, what: str):
    (tmp_path / "mine.py").write_text(f"def f(*args):\n    {what}\n")
    spec = f"{tmp_path}/mine.py:f"
    with pytest.raises(PlauditError, match="mine.py:f raised"):
        plaudit.ppo(config(tmp_path / "run", **{f"functions__{place}": [spec] if place == "callbacks" else spec}))


def test_an_own_policy_loss_is_per_token(cache, tmp_path):
    (tmp_path / "mine.py").write_text("def f(new, old, advantages): return (new * advantages).mean()\n")
    with pytest.raises(PlauditError, match="return a tensor of"):
        plaudit.ppo(config(tmp_path / "run", functions__policy_loss=f"{tmp_path}/mine.py:f"))


def test_a_score_lands_where_it_is_said_whatever_the_neighbours_are(cache, tmp_path):
    """Paid after the end: in every row whose answer is shorter than the limit, the longest of the batch too."""
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom plaudit import ops\n"
        "def f(rewards, rollout):\n"
        "    at = rewards.abs().argmax(1)\n"
        "    short = rollout.terminated & (rollout.response_lengths() < 24)\n"
        "    assert torch.equal(at[short], rollout.lengths[short]), (at, rollout.lengths)\n"
        "    return rewards\n"
    )
    keys = {"conventions__score_position": "after_end", "kl__coef": 0.0, "reward": f"{tmp_path}/mine.py:one"}
    with (tmp_path / "mine.py").open("a") as file:
        file.write("def one(prompts, responses): return [5.0] * len(prompts)\n")
    metrics(config(tmp_path / "run", functions__token_rewards=f"{tmp_path}/mine.py:f", **keys, **ENDING))


def test_callbacks_hear_the_five_verbs(cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def told(verb, state, record): open('said', 'a').write(verb + ' ')\n")
    plaudit.ppo(config(tmp_path / "run", functions__callbacks=["mine.py:told"]))
    assert Path("said").read_text().split() == ["act", "judge", "assign_credit", "improve", "publish"] * 2


def test_ptx_learns_its_texts_besides(cache, tmp_path):
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": "zzzzzz"}) + "\n")
    keys = {"ptx__coef": 5.0, "ptx__data": f"{tmp_path}/texts.jsonl", "iterations": 6}
    lines = metrics(config(tmp_path / "run", actor__learning_rate=3e-3, **keys))
    assert lines[-1]["actor/ptx_nll_nats_per_token"] < 0.8 * lines[0]["actor/ptx_nll_nats_per_token"]


def test_an_average_of_the_weights_lies_between_start_and_end(cache, tmp_path):
    plaudit.ppo(config(tmp_path / "last"))
    plaudit.ppo(config(tmp_path / "average", ema_decay=0.9))
    start = begin()
    last, average = weights(tmp_path / "last"), weights(tmp_path / "average")

    def far(w) -> float:
        return sum(float((w[k] - start[k]).norm()) for k in start)

    assert 0 < far(average) < far(last)


def test_validation_keeps_the_best_and_stops(cache, tmp_path):
    """A judge that likes the reverse of the reward: every step is worse, so the first validated model is kept."""
    (tmp_path / "mine.py").write_text(
        "from plaudit.rewards.function import vowels\n"
        "def against(prompts, responses, **_): return [-v for v in vowels(prompts, responses)]\n"
    )
    keys = {
        "iterations": 30,
        "batch_size": 32,
        "actor__learning_rate": 3e-3,
        "validation__prompts": "tiny/prompts",
        "validation__judge": f"{tmp_path}/mine.py:against",
        "validation__every": 1,
        "validation__patience": 3,
    }
    cfg = config(tmp_path / "run", **keys)
    summary = plaudit.ppo(cfg)
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert summary["iterations"] == len(lines) < 30
    best = max(lines, key=lambda line: line["validation"])
    assert best["step"] == summary["validation_best_at"] == len(lines) - 3
    assert not (tmp_path / "run" / "best").exists() and (tmp_path / "run" / "model").is_dir()


def test_warnings_say_what_to_do_and_are_said_once(cache, tmp_path):
    """A reward of minus the length: answers vanish, and the run says so while some are left."""
    (tmp_path / "mine.py").write_text("def short(prompts, responses, **_): return [-len(r) for r in responses]\n")
    keys = {
        "reward": f"{tmp_path}/mine.py:short",
        "arrangement__kind": "separate",
        "iterations": 25,
        "batch_size": 32,
        "actor__learning_rate": 5e-3,
        "critic__learning_rate": 5e-3,
        "kl__coef": 0.0,
        "truncation_penalty": 0.0,
        "sampling__max_new_tokens": 12,
    }
    lines = metrics(config(tmp_path / "run", **keys))
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    (collapse,) = [e for e in events if e["sign"] == "collapse"]
    assert "kl.coef" in collapse["message"]
    assert lines[int(collapse["step"]) - 1]["empty"] < 1


IMPOSSIBLE = [
    (["kl.controller=adaptive", "kl.target=0.0"], "kl.target"),
    (["clip_range=0.0"], "clip_range"),
    (["estimator=grpo"], "samples_per_prompt"),
    (["estimator=rloo"], "samples_per_prompt"),
    (["ptx.coef=0.1"], "ptx.data"),
    (["whiten_rewards=true", "batch_size=1", "minibatches=1"], "whiten_rewards"),
    (["dual_clip=0.5"], "dual_clip"),
    (["samples_per_prompt=0"], "samples_per_prompt"),
    (["estimator=reinforce", "critic_warmup=1"], "critic_warmup"),
    (["estimator=rloo", "samples_per_prompt=2", "bootstrap_truncated=true"], "bootstrap_truncated"),
    (["pool.size=3"], "pool.max_age"),
    (["critic_warmup=99"], "critic_warmup"),
    (["arrangement.kind=shared_trunk", "critic_warmup=1"], "critic_warmup"),
    (["dense_reward=true", "reward_normalise=true"], "dense_reward"),
    (["validation.prompts=reviews/validation"], "validation"),
    (["validation.prompts=reviews/validation", "validation.judge=gold"], "gold"),
    (["actor.optimizer=adafactor", "actor.eps_corrected=false"], "eps_corrected"),
    (["kl.place=loss", "kl.controller=adaptive", "kl.coef=0.0"], "kl.coef"),
    (["conventions.tempered_logprobs=false", "pool.importance_cap=2.0"], "importance_cap"),
    (["estimator=grpo", "samples_per_prompt=4", "kl.place=reward"], "kl.place"),
    (["n_steps=3"], "n_steps"),
    (["estimator=reinforce", "value_target=discounted_sum"], "value_target"),
    (["stop_kl=0.1", "pool.refresh_every=2"], "stop_kl"),
    (["sampling.fixed_length=true"], "truncation_penalty"),
    (["kl.controller=adaptive", "kl.coef=0.0"], "kl.coef"),
    (["conventions.skip_above_mean_ratio=0.5"], "skip_above_mean_ratio"),
    (["conventions.kl_clamp.only=K1"], "only"),
    (["reward_weight=inf"], "reward_weight"),
    (["conventions.preset=[1]"], "preset"),
    (["sampling.top_p=0.9"], "top_p"),
    (["sampling.top_k=40"], "top_k"),
]


@pytest.mark.parametrize(("keys", "named"), IMPOSSIBLE)
def test_what_cannot_be_is_refused_before_anything_loads(keys: list[str], named: str):
    with pytest.raises(ConfigError) as error:
        read(PPOConfig, None, keys)
    assert named in str(error.value)
