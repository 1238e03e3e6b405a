"""vLLM as an engine, for real: what every engine promises, and a run of PPO. `make verify-vllm` runs this."""

from __future__ import annotations

import pytest
import torch
from tiny_runs import VOWELS

import plaudit
from plaudit.config import EvaluateConfig, PPOConfig, SamplingConfig
from plaudit.learner import Scorer
from plaudit.models.load import load_language_model, locate
from plaudit.models.network import LanguageHead, Network, token_logprobs
from plaudit.models.stack import WholeStack
from plaudit.rollout.local import LocalEngine
from plaudit.runs import read_jsonl
from plaudit.schema import build

pytestmark = pytest.mark.vllm
MODEL = "smollm2"


@pytest.fixture(scope="module")
def made():
    from plaudit.rollout.vllm import VLLMEngine

    model, tokenizer = load_language_model(MODEL)
    engine = VLLMEngine(model, locate(MODEL), tokenizer.end_ids, context=256)
    texts = ["the actors are", "a film that", "one of the most tedious and", "it", "for all its faults this"]
    return model, tokenizer, engine, [tokenizer.prompt(text) for text in texts]


def test_greedy_answers_are_those_of_the_local_engine(made):
    model, tokenizer, engine, prompts = made
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=16)
    mine = engine.generate(prompts, sampling, seed=0)
    local = LocalEngine(model, tokenizer.end_ids).generate(prompts, sampling, seed=0)
    assert torch.equal(mine.tokens, local.tokens)
    assert torch.equal(mine.mask, local.mask) and torch.equal(mine.terminated, local.terminated)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_log_probabilities_are_the_scorers_at_the_sampling_temperature(made, temperature: float):
    model, _, engine, prompts = made
    rollout = engine.generate(prompts * 4, SamplingConfig(temperature=temperature, max_new_tokens=12), seed=1)
    network = Network(WholeStack(model.base_model), LanguageHead(model))
    scored = Scorer(network).evaluate(rollout, lambda out, rows: token_logprobs(out, rows, temperature))
    assert torch.allclose(scored, rollout.logprobs, atol=1e-3)


def test_the_same_seed_gives_the_same_answers_and_a_row_does_not_depend_on_its_neighbours(made):
    _, _, engine, prompts = made
    sampling = SamplingConfig(max_new_tokens=8)
    first, second, other = (engine.generate(prompts, sampling, seed=s) for s in (7, 7, 8))
    assert torch.equal(first.tokens, second.tokens)
    assert first.tokens.shape != other.tokens.shape or not torch.equal(first.tokens, other.tokens)
    alone = engine.generate(prompts[:1], sampling, seed=7)
    assert alone.response_ids(0) == first.response_ids(0)


def test_terminated_and_truncated_are_told_apart_and_the_limit_holds(made):
    _, tokenizer, engine, prompts = made
    rollout = engine.generate(prompts * 6, SamplingConfig(max_new_tokens=6), seed=0)
    sizes = rollout.response_lengths()
    assert int(sizes.max()) <= 6
    for i in range(len(rollout)):
        chosen = rollout.tokens[i][rollout.mask[i]].tolist()
        assert (chosen[-1] in tokenizer.end_ids) == bool(rollout.terminated[i])
        assert rollout.terminated[i] or len(chosen) == 6
    full = engine.generate(prompts, SamplingConfig(max_new_tokens=6, fixed_length=True), seed=0)
    assert full.response_lengths().tolist() == [6] * len(prompts)


def test_a_stop_string_ends_an_answer_and_stays_in_its_text(made):
    _, tokenizer, engine, prompts = made
    rollout = engine.generate(prompts * 4, SamplingConfig(max_new_tokens=24, stop=[" the"]), seed=0)
    assert rollout.stopped.any()
    for i in range(len(rollout)):
        text = tokenizer.decode(rollout.response_ids(i))
        assert (" the" in text) == bool(rollout.stopped[i])


def test_new_weights_are_answered_with_after_load(made):
    """The next greedy answers are transformers' own, with the changed weights."""
    model, tokenizer, engine, prompts = made
    sampling = SamplingConfig(temperature=0.0, max_new_tokens=12)
    before = engine.generate(prompts, sampling, seed=0)
    kept = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.model.layers[-1].parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * p.std() * 0.2)
    engine.load(3)
    after = engine.generate(prompts, sampling, seed=0)
    model.generation_config.eos_token_id = None
    assert not torch.equal(before.tokens, after.tokens) and after.version.tolist() == [3] * len(prompts)
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt.ids])
        out = model.generate(ids, max_new_tokens=len(after.response_ids(i)), do_sample=False, pad_token_id=0)
        assert after.response_ids(i) == out[0, len(prompt.ids) :].tolist()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(kept[name])
    engine.load(0)


def test_three_iterations_of_ppo_and_an_evaluation(made, tmp_path):
    config = build(
        PPOConfig,
        {
            "out": str(tmp_path / "run"),
            "model": MODEL,
            "reward": VOWELS,
            "prompts": "reviews/prompts",
            "engine": {"kind": "vllm"},
            "iterations": 3,
            "batch_size": 8,
            "minibatches": 2,
            "sampling": {"max_new_tokens": 8},
        },
    )
    plaudit.ppo(config)
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(lines) == 3
    for line in lines:
        assert line["engine_gap_nats_per_token"] < 1e-3 and line["first_log_ratio_max"] < 1e-4
    judged = [
        plaudit.evaluate(
            build(
                EvaluateConfig,
                {
                    "out": str(tmp_path / kind),
                    "model": str(tmp_path / "run" / "model"),
                    "reference": MODEL,
                    "count": 8,
                    "engine": {"kind": kind},
                    "sampling": {"temperature": 0.0, "max_new_tokens": 8},
                },
            )
        )
        for kind in ("vllm", "local")
    ]
    assert judged[0]["kl"] == pytest.approx(judged[1]["kl"], abs=1e-3)
    for key in ("gold_before", "gold_after", "vader_before", "vader_after"):
        assert judged[0][key] == judged[1][key]
