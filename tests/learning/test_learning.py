"""Each stage learns what it should, in seconds, on the tiny built-in model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import plaudit
from plaudit.config import (
    ArrangementConfig,
    CollectConfig,
    DPOConfig,
    EnsembleConfig,
    EvaluateConfig,
    KLConfig,
    OptimizerConfig,
    PPOConfig,
    RewardConfig,
    SamplingConfig,
    SFTConfig,
)
from plaudit.preferences.store import PreferenceStore
from plaudit.report import write_report
from plaudit.runs import read_jsonl
from plaudit.types import Answer, Comparison, Preference

FAST = OptimizerConfig(learning_rate=3e-3)


def _ppo(out, **changes) -> PPOConfig:
    settings = {
        "out": str(out),
        "model": "tiny",
        "reward": "plaudit.rewards.function:vowels",
        "prompts": "tiny/prompts",
        "iterations": 25,
        "sampling": SamplingConfig(max_new_tokens=12),
        "arrangement": ArrangementConfig(kind="separate"),
        "kl": KLConfig(coef=0.01),
        "truncation_penalty": 0.0,
        "minibatches": 2,
        "actor": FAST,
    }
    changed = settings | changes
    if changed["arrangement"].kind != "shared_trunk":  # there actor and critic step together, with the actor's rate
        changed = {"critic": FAST} | changed
    return PPOConfig(**changed)


@pytest.mark.parametrize("kind", ["separate", "shared_trunk", "frozen_trunk"])
def test_ppo_raises_the_reward(cache, tmp_path, kind: str):
    arrangement = ArrangementConfig(kind=kind, blocks=4)
    summary = plaudit.ppo(_ppo(tmp_path / "run", arrangement=arrangement, iterations=40))
    assert summary["score_last"] > summary["score_first"] + 0.1
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert max(line["first_log_ratio_max"] for line in lines) < 1e-4
    assert max(line["engine_gap_nats_per_token"] for line in lines) < 1e-4


def test_a_dear_kl_keeps_the_model_where_it_was(cache, tmp_path):
    free = plaudit.ppo(_ppo(tmp_path / "free", kl=KLConfig(coef=0.0)))
    dear = plaudit.ppo(_ppo(tmp_path / "dear", kl=KLConfig(coef=1.0)))
    assert dear["kl_last"] < free["kl_last"] / 2


def test_a_learning_rate_of_zero_changes_nothing(cache, tmp_path):
    """Dropout or a wrong temperature would show here as a ratio off 1 in later minibatches too."""
    still = OptimizerConfig(learning_rate=0.0, micro_batch_tokens=40)
    config = _ppo(tmp_path / "run", iterations=2, actor=still, critic=still, sampling=SamplingConfig(temperature=0.7))
    plaudit.ppo(config)
    for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert line["actor/log_ratio_max"] < 1e-4
        assert line["actor/clip_fraction"] == 0
        assert abs(line["kl"]) < 1e-4


def test_sft_learns_a_text_and_to_stop(cache, tmp_path):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "say", "completion": " yes"}) + "\n", encoding="utf-8")
    optimizer = OptimizerConfig(learning_rate=1e-2)
    config = SFTConfig(
        out=str(tmp_path / "run"),
        model="tiny",
        data=str(tmp_path / "data.jsonl"),
        train_blocks=0,
        epochs=60,
        optimizer=optimizer,
    )
    assert plaudit.sft(config)["nll_nats_per_token"] < 0.1
    (sample,) = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert sample["response"] == " yes"


def _store(path, count: int = 80) -> None:
    """Comparisons in which the answer with more of the letter e was preferred."""
    store = PreferenceStore(path, create=True)
    generator = torch.Generator().manual_seed(0)
    made, ranks = [], []
    for i in range(count):
        texts = ["".join("ex"[int(v)] for v in torch.randint(0, 2, (8,), generator=generator)) for _ in range(3)]
        made.append(Comparison(0, f"q{i}", tuple(Answer(t) for t in texts)))
        ranks.append(tuple(sum(other.count("e") > mine.count("e") for other in texts) for mine in texts))
    stored = store.add(made)
    store.record([Preference(c, r, "someone") for c, r in zip(stored, ranks, strict=True)])
    store.close()


REWARD_LOSSES = {
    "pairwise": {},
    "smoothed": {"label_smoothing": 0.1, "ties": "half", "centring": 0.01},
    "averaged_losers": {"loss": "averaged_losers"},
    "plackett_luce": {"loss": "plackett_luce"},
    "pick_best": {"loss": "pick_best"},
    "every_token": {"loss": "every_token"},
}


@pytest.mark.parametrize("name", REWARD_LOSSES)
def test_a_reward_model_learns_what_was_preferred(cache, tmp_path, name: str):
    _store(tmp_path / "store.sqlite")
    optimizer = OptimizerConfig(learning_rate=3e-3)
    config = RewardConfig(
        out=str(tmp_path / "run"),
        model="tiny",
        store=str(tmp_path / "store.sqlite"),
        epochs=6,
        optimizer=optimizer,
        **REWARD_LOSSES[name],
    )
    summary = plaudit.reward(config)
    assert summary["reward_model_accuracy"] > 0.85
    assert summary["reward_model_accuracy"] > summary["longer_wins"]


def test_dpo_learns_what_was_preferred(cache, tmp_path):
    """On pairs it has not seen the preferred answer gains more over the reference than the other does."""
    _store(tmp_path / "store.sqlite")
    config = DPOConfig(
        out=str(tmp_path / "run"),
        model="tiny",
        store=str(tmp_path / "store.sqlite"),
        epochs=4,
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )
    summary = plaudit.dpo(config)
    assert summary["accuracy"] > 0.8 and summary["loss"] < 0.6
    assert "Held-out pairs in the right order" in write_report(tmp_path / "run").read_text()
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()


def test_ppo_against_reward_models_together_and_token_by_token(cache, tmp_path):
    """An ensemble of two, and a dense reward: what the tokens are paid sums to the score."""
    _store(tmp_path / "store.sqlite")
    for seed in (0, 1):
        plaudit.reward(
            RewardConfig(
                out=str(tmp_path / f"reward{seed}"),
                model="tiny",
                store=str(tmp_path / "store.sqlite"),
                seed=seed,
                train_blocks=1,
                optimizer=FAST,
            )
        )
    models = [str(tmp_path / f"reward{seed}" / "model") for seed in (0, 1)]
    frozen = ArrangementConfig(kind="frozen_trunk", blocks=1)
    few = {"iterations": 2, "batch_size": 16, "arrangement": frozen, "reward": models[0]}
    alone = plaudit.ppo(_ppo(tmp_path / "alone", **few))
    lower = plaudit.ppo(_ppo(tmp_path / "lower", ensemble=EnsembleConfig(members=models[1:], combine="worst"), **few))
    assert lower["score_first"] < alone["score_first"]
    dense = plaudit.ppo(_ppo(tmp_path / "dense", dense_reward=True, **few))
    assert dense["score_first"] == pytest.approx(alone["score_first"], abs=1e-6)


def test_the_whole_way_on_the_tiny_model(cache, tmp_path):
    """SFT, collect, label, reward, PPO with four roles over one trunk, evaluation: each from the folder before it."""
    rows = "".join(
        json.dumps({"text": f"the {a} {b}."}) + "\n" for a in ("red", "old") for b in ("sea", "bird", "tree")
    )
    (tmp_path / "data.jsonl").write_text(rows, encoding="utf-8")
    at = {name: str(tmp_path / name) for name in ("sft", "collect", "reward", "ppo", "evaluate")}
    store = str(tmp_path / "store.sqlite")
    sft_model = at["sft"] + "/model"
    plaudit.sft(
        SFTConfig(out=at["sft"], model="tiny", data=str(tmp_path / "data.jsonl"), train_blocks=1, optimizer=FAST)
    )
    prompts = {"prompts": "tiny/prompts", "sampling": SamplingConfig(max_new_tokens=8)}
    plaudit.collect(CollectConfig(out=at["collect"], model=sft_model, count=30, k=3, store=store, **prompts))
    opened = PreferenceStore(store)
    asked = opened.unlabelled()
    vowels = [[sum(c in "aeiou" for c in a.text) for a in c.answers] for c in asked]
    labels = [Preference(c, tuple(max(v) - n for n in v), "counter") for c, v in zip(asked[:20], vowels, strict=False)]
    opened.record(labels)
    opened.close()
    plaudit.reward(RewardConfig(out=at["reward"], model=sft_model, store=store, train_blocks=1, optimizer=FAST))
    frozen = ArrangementConfig(kind="frozen_trunk", blocks=1)
    plaudit.ppo(_ppo(at["ppo"], model=sft_model, reward=at["reward"] + "/model", arrangement=frozen, iterations=3))
    summary = plaudit.evaluate(
        EvaluateConfig(
            out=at["evaluate"],
            model=at["ppo"] + "/model",
            reference=sft_model,
            reward=at["reward"] + "/model",
            judges=["plaudit.rewards.function:vowels"],
            **prompts,
        )
    )
    assert summary["n_eval"] == 50
    assert {"kl", "win_rate", "score_before", "score_after", "ended", "distinct2_ratio"} <= summary.keys()
    for out in at.values():
        names = {"config.json", "environment.json", "metrics.jsonl", "samples.jsonl", "summary.json", "tensorboard"}
        assert names <= {p.name for p in Path(out).iterdir()}
