"""What every rollout engine promises; run for the local engine on several families of models."""

from __future__ import annotations

import math

import pytest
import torch
from families import FAMILIES, build

from plaudit.config import SamplingConfig
from plaudit.errors import ConfigError
from plaudit.learner import Scorer
from plaudit.models.network import LanguageHead, Network, token_logprobs
from plaudit.models.stack import WholeStack
from plaudit.rollout.local import LocalEngine
from plaudit.rollout.sampling import sample
from plaudit.types import Prompt

PROMPTS = [Prompt("", (5, 9, 3)), Prompt("", (7, 2)), Prompt("", (4, 4, 4, 8, 11)), Prompt("", (6,))]


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param, seed=0)


def test_greedy_answers_are_those_of_transformers(model):
    engine = LocalEngine(model, [10**6])
    rollout = engine.generate(PROMPTS, SamplingConfig(temperature=0.0, max_new_tokens=8), seed=0)
    model.generation_config.eos_token_id = None
    for i, prompt in enumerate(PROMPTS):
        expected = model.generate(torch.tensor([prompt.ids]), max_new_tokens=8, do_sample=False)[0, len(prompt.ids) :]
        assert rollout.response_ids(i) == expected.tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_log_probabilities_are_the_scorers_at_the_sampling_temperature(model, temperature: float):
    rollout = LocalEngine(model, [1, 2]).generate(
        PROMPTS * 3, SamplingConfig(temperature=temperature, max_new_tokens=12), seed=1
    )
    network = Network(WholeStack(model.base_model), LanguageHead(model))
    scored = Scorer(network, token_budget=20).evaluate(
        rollout, lambda out, rows: token_logprobs(out, rows, temperature)
    )
    assert torch.allclose(scored, rollout.logprobs, atol=1e-4)


def test_terminated_and_truncated_are_told_apart():
    model = build("llama", seed=0)
    rollout = LocalEngine(model, range(0, 16)).generate(PROMPTS * 8, SamplingConfig(max_new_tokens=3), seed=2)
    assert rollout.terminated.any() and not rollout.terminated.all()
    for i in range(len(rollout)):
        chosen = rollout.tokens[i][rollout.mask[i]].tolist()
        ends = [token < 16 for token in chosen]
        assert not any(ends[:-1])
        assert ends[-1] == bool(rollout.terminated[i])
        assert len(chosen) == 3 or ends[-1]


def test_rows_keep_the_order_of_the_prompts_and_the_prompt_is_no_choice():
    rollout = LocalEngine(build("llama", seed=0), [1], max_rows=3).generate(
        PROMPTS, SamplingConfig(max_new_tokens=4), seed=0
    )
    for i, prompt in enumerate(PROMPTS):
        assert tuple(rollout.tokens[i, : len(prompt.ids)].tolist()) == prompt.ids
        assert not rollout.mask[i, : len(prompt.ids)].any()
        assert rollout.prompts[i] is prompt


def test_an_end_token_inside_the_prompt_ends_nothing():
    engine = LocalEngine(build("llama", seed=0), [5])
    rollout = engine.generate([Prompt("", (5, 5, 9))], SamplingConfig(temperature=0.0, max_new_tokens=4), seed=0)
    assert rollout.mask.sum() >= 1


def test_a_row_does_not_depend_on_its_neighbours(model):
    engine = LocalEngine(model, [1, 2, 3, 4])
    sampling = SamplingConfig(max_new_tokens=10)
    together = engine.generate(PROMPTS, sampling, seed=5)
    alone = engine.generate(PROMPTS[:1], sampling, seed=5)
    assert together.response_ids(0) == alone.response_ids(0)


def test_the_same_seed_gives_the_same_answers_and_leaves_the_global_stream_alone():
    engine = LocalEngine(build("llama", seed=0), [1])
    before = torch.random.get_rng_state()
    first = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=8), seed=7)
    second = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=8), seed=7)
    other = engine.generate(PROMPTS, SamplingConfig(max_new_tokens=8), seed=8)
    assert torch.equal(first.tokens, second.tokens)
    assert first.tokens.shape != other.tokens.shape or not torch.equal(first.tokens, other.tokens)
    assert torch.equal(before, torch.random.get_rng_state())


def test_answers_carry_the_version_of_the_weights():
    engine = LocalEngine(build("llama", seed=0), [1])
    engine.load(4)
    assert engine.generate(PROMPTS, SamplingConfig(max_new_tokens=2), seed=0).version.tolist() == [4] * 4


def follows_an_update(model, **how) -> None:
    """After ``load`` the engine answers as one does that is made with the new weights, and not as before."""
    engine, sampling = LocalEngine(model, [1], **how), SamplingConfig(temperature=0.0, max_new_tokens=8)
    before = engine.generate(PROMPTS, sampling, seed=0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    engine.load(1)
    after = engine.generate(PROMPTS, sampling, seed=0)
    fresh = LocalEngine(model, [1], **how).generate(PROMPTS, sampling, seed=0)
    assert torch.equal(after.tokens, fresh.tokens)
    assert before.tokens.shape != after.tokens.shape or not torch.equal(before.tokens, after.tokens)


def test_new_weights_are_answered_with_after_load(model):
    follows_an_update(model)


@pytest.mark.parametrize("vocabulary", [8, 256, 300, 1024])
def test_sampling_follows_the_distribution(vocabulary: int):
    """Chi-square over 20,000 draws: within 3.5 standard deviations above its mean, the degrees of freedom."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary)).repeat(20000, 1)
    uniform = torch.rand(20000, generator=torch.Generator().manual_seed(0))
    tokens, logprobs = sample(logits / 0.7, uniform)
    expected = torch.softmax(logits[0] / 0.7, -1)
    counts = torch.bincount(tokens, minlength=vocabulary)
    freedom = vocabulary - 1
    statistic = ((counts - 20000 * expected) ** 2 / (20000 * expected)).sum()
    assert statistic < freedom + 3.5 * (2 * freedom) ** 0.5
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-5)


@pytest.mark.parametrize("vocabulary", [5, 256, 513])
def test_an_impossible_token_is_never_drawn(vocabulary: int):
    logits = torch.full((1, vocabulary), float("-inf"))
    logits[0, [1, 3]] = 0.0
    tokens, _ = sample(logits.repeat(4, 1), torch.tensor([0.0, 0.5, 0.9999999, 1.0]))
    assert set(tokens.tolist()) <= {1, 3}


@pytest.mark.parametrize(("keys", "most"), [({"top_k": 2}, 2), ({"top_p": 1e-6}, 1)])
def test_only_the_likeliest_tokens_are_drawn_where_that_is_asked_for(model, keys, most: int):
    sampling = SamplingConfig(temperature=1.5, max_new_tokens=1, **keys)
    rollout = LocalEngine(model, [10**6]).generate(PROMPTS[:1] * 40, sampling, seed=0)
    drawn = {rollout.response_ids(i)[0] for i in range(40)}
    network = Network(WholeStack(model.base_model), LanguageHead(model))
    with torch.no_grad():
        logits = network.language(network(rollout.take([0])).hidden[0, len(PROMPTS[0].ids) - 1])
    assert drawn == set(logits.topk(most).indices.tolist())


def many(count: int) -> list[Prompt]:
    """Prompts of 1 to 7 tokens, each of them asked three times."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i in range(count):
        size = 1 + i % 7
        made.append(Prompt("", tuple(torch.randint(5, 60, (size,), generator=generator).tolist())))
    return [prompt for prompt in made for _ in range(3)]


@pytest.mark.parametrize("rows", [1, 5, 16])
def test_new_prompts_take_the_places_of_answers_that_have_ended(model, rows: int):
    """However few rows are in flight at once, and however often the memory is tidied up, the answers are the same."""
    prompts, sampling = many(9), SamplingConfig(max_new_tokens=9)
    ends = range(0, 12)
    few = LocalEngine(model, ends, max_rows=rows).generate(prompts, sampling, seed=3)
    all_at_once = LocalEngine(model, ends, max_rows=99).generate(prompts, sampling, seed=3)
    assert 0.2 < float(few.terminated.float().mean()) < 1
    assert torch.equal(few.tokens, all_at_once.tokens) and torch.equal(few.terminated, all_at_once.terminated)
    assert torch.allclose(few.logprobs, all_at_once.logprobs, atol=1e-4)


def test_answers_to_one_prompt_are_different_draws():
    rollout = LocalEngine(build("llama", seed=0), [1]).generate(
        [Prompt("", (5, 9, 3))] * 8, SamplingConfig(max_new_tokens=8), seed=0
    )
    assert len({tuple(row) for row in rollout.tokens.tolist()}) > 4


def test_progress_counts_every_answer_once():
    said: list[int] = []
    engine = LocalEngine(build("llama", seed=0), range(0, 12), max_rows=4)
    engine.generate(many(5), SamplingConfig(max_new_tokens=6), seed=0, progress=said.append)
    assert said == sorted(set(said)) and said[-1] == 15


def letters(ids: list[int]) -> str:
    return "".join(chr(97 + i % 26) for i in ids)


def test_a_stop_string_ends_an_answer_and_stays_in_its_text():
    """Over many draws: the string stands at the end of every stopped answer, and in no answer anywhere else."""
    engine = LocalEngine(build("llama", seed=0), [1], text_of=letters)
    sampling = SamplingConfig(max_new_tokens=20, stop=["e", "cd"])
    rollout = engine.generate(many(30), sampling, seed=0)
    assert 5 < int(rollout.stopped.sum()) < len(rollout)
    for i in range(len(rollout)):
        text = letters(rollout.response_ids(i))
        assert rollout.stopped[i] == text.endswith(("e", "cd"))
        assert "e" not in text[:-1] and "cd" not in text[:-1]
        if rollout.stopped[i]:
            assert rollout.terminated[i] and len(text) == int(rollout.mask[i].sum())


def test_a_stop_string_within_the_prompt_ends_nothing():
    engine = LocalEngine(build("llama", seed=0), [10**6], text_of=letters)
    prompt = Prompt("", (4, 2, 3))
    free = engine.generate([prompt], SamplingConfig(max_new_tokens=6), seed=0)
    stop = letters([*prompt.ids, *free.response_ids(0)])[:4]
    assert torch.equal(
        engine.generate([prompt], SamplingConfig(max_new_tokens=6, stop=[stop]), seed=0).tokens, free.tokens
    )


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that nobody has written yet holds nan."""
    real = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *size, **kind: real(self, *size, **kind).fill_(math.nan)
    )


def test_memory_that_nobody_has_written_is_never_read(model, poisoned):
    """Prompts so different in length that they are read apart: the short ones begin late in the memory."""
    prompts = [Prompt("", (7,) * 60)] * 3 + [Prompt("", tuple(range(20, 80)))] * 3 + many(4)
    prompts += [Prompt("", (i, *range(30, 88))) for i in range(5, 9)]
    rollout = LocalEngine(model, range(0, 12)).generate(prompts, SamplingConfig(max_new_tokens=9), seed=3)
    assert torch.isfinite(rollout.logprobs).all()


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_rounded_weights_sample_from_nearly_the_same_policy(weights: str):
    model = build("llama", seed=0)
    rollout = LocalEngine(model, [1], weights=weights).generate(many(10), SamplingConfig(max_new_tokens=12), seed=0)
    network = Network(WholeStack(model.base_model), LanguageHead(model))
    scored = Scorer(network).evaluate(rollout, lambda out, rows: token_logprobs(out, rows, 1.0))
    gap = (scored - rollout.logprobs)[rollout.mask].abs().mean()
    assert 1e-5 < gap < 0.15


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_rounded_weights_follow_an_update(weights: str):
    follows_an_update(build("llama", seed=0), weights=weights)


def test_only_what_an_update_changed_is_quantised_again():
    model = build("llama", seed=0)
    model.requires_grad_(False)
    model.model.layers[-1].requires_grad_(True)
    engine = LocalEngine(model, [1], weights="int8")
    before = [block.qkv.weight for block in engine.decoder.upper]
    engine.load(1)
    kept = [block.qkv.weight is old for block, old in zip(engine.decoder.upper, before, strict=True)]
    assert kept == [True, True, False]


def test_a_family_with_a_forward_of_its_own_is_not_rounded():
    with pytest.raises(ConfigError, match=r"engine\.weights=int8"):
        LocalEngine(build("gpt2", seed=0), [1], weights="int8")
