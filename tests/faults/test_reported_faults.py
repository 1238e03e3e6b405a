"""Faults that users of RLHF toolkits have reported, each with its right answer; the numbers were computed by hand.

Kinds that have a test of their own elsewhere are not repeated here: rows and templates (test_data), columns, counts and
failures of reward functions (test_rewards), saved models and their scores (test_models), groups (ops/test_advantages),
micro-batches (invariance/test_learner), resuming (test_cli, test_ppo_pieces), collapse (test_health).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
import pytest
import torch
from families import build
from tiny_runs import config
from transformers import AutoModelForCausalLM

import plaudit
from plaudit import ops
from plaudit.algorithms import ppo
from plaudit.algorithms.dpo import Pairs, dpo_loss
from plaudit.algorithms.reward import ranking_loss
from plaudit.config import ArrangementConfig, DPOConfig, OptimizerConfig, PPOConfig, RewardConfig, SamplingConfig
from plaudit.errors import ModelError, NonFinite
from plaudit.learner import Learner, Scorer
from plaudit.models.arrangements import CriticStart, arrange
from plaudit.models.load import new_reward_model, save_reward_model
from plaudit.models.network import (
    LanguageHead,
    Network,
    scalar_head,
    text_scores,
    token_logprobs,
    token_policy,
    token_values,
)
from plaudit.models.stack import WholeStack
from plaudit.preferences.store import PreferenceStore
from plaudit.recipes.roles import turn
from plaudit.rollout.local import LocalEngine
from plaudit.rollout.pool import Pool
from plaudit.rollout.sampling import sample
from plaudit.runs import read_jsonl
from plaudit.types import Answer, Comparison, Experience, Preference, Prompt, RankedAnswers, Sequences

ENDED = torch.tensor([[True, True, True, False, False]])


def network(family: str) -> Network:
    model = build(family, seed=0)
    torch.manual_seed(1)
    head = scalar_head(torch.randn(1, model.config.hidden_size))
    return Network(WholeStack(model.base_model), LanguageHead(model), head)


def test_the_score_is_paid_at_the_end_token_not_at_padding():
    """Tokens [11, 12, END, PAD, PAD]; a full row that did not end; a row without a choice, whatever its score."""
    zero = torch.zeros(3, 5)
    mask = torch.cat([ENDED, torch.ones(1, 5, dtype=torch.bool), torch.zeros(1, 5, dtype=torch.bool)])
    made = [ops.token_rewards(torch.tensor([1.0, 1.0, empty]), zero, zero, mask, kl_coef=0.0) for empty in (0.0, 10.0)]
    assert made[0].tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [0] * 5]
    advantages = [ops.whiten(ops.gae(r, zero, mask)[0], mask) for r in made]
    assert torch.equal(advantages[0], advantages[1])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_padding_on_either_side_changes_no_number(family: str):
    """Absolute positions too: a row as (ids, attention_mask), padded left by 1 and 7, or right in a batch of 4."""
    ids = [[5, 9, 3, 8], [7, 2], [4, 4, 4, 8, 11], [6, 3]]
    net = network(family)

    def given(row: list[int], left: int, width: int) -> tuple[list[int], list[int]]:
        right = width - left - len(row)
        return [0] * left + row + [0] * right, [0] * left + [1] * len(row) + [0] * right

    alone = Sequences.from_padded(torch.tensor([ids[0]]), torch.ones(1, 4, dtype=torch.long))
    for read in (token_logprobs, token_values, text_scores):
        expected = Scorer(net).evaluate(alone, read)[0]
        for left in (1, 7):
            padded, seen = given(ids[0], left, left + 4)
            rows = Sequences.from_padded(torch.tensor([padded]), torch.tensor([seen]))
            assert torch.allclose(Scorer(net).evaluate(rows, read)[0], expected, atol=1e-5)
        batch = [given(row, 0, 6) for row in ids]
        rows = Sequences.from_padded(torch.tensor([b[0] for b in batch]), torch.tensor([b[1] for b in batch]))
        found = Scorer(net).evaluate(rows, read)[0]
        assert torch.allclose(found[:4] if found.dim() else found, expected, atol=1e-5)


def test_rows_with_gaps_are_no_padding():
    with pytest.raises(ValueError, match="row 1"):
        Sequences.from_padded(torch.zeros(2, 3, dtype=torch.long), torch.tensor([[1, 1, 0], [1, 0, 1]]))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_rollout_and_update_see_the_same_policy(family: str):
    """Rate 0, dropout 0.1 in the model's configuration, temperature 0.7, rollout in chunks of 8, micro-batches of 3."""
    model = build(family, seed=0)
    made = arrange(model, None, ArrangementConfig(kind="separate"), CriticStart("actor"))
    prompts = [Prompt("", tuple(range(2, 4 + i % 5))) for i in range(20)]
    engine = LocalEngine(model, [1], max_rows=8)
    rollout = engine.generate(prompts, SamplingConfig(temperature=0.7, max_new_tokens=8), seed=0)
    old = Scorer(made.actor).evaluate(rollout, lambda o, r: token_logprobs(o, r, 0.7))
    assert (old - rollout.logprobs)[rollout.mask].abs().max() < 1e-4
    cfg = PPOConfig(sampling=SamplingConfig(temperature=0.7))
    assert made.reference.language is not None
    loss = ppo.actor_loss(cfg, made.reference.language, ppo.State(), ppo.Own())
    rows = Experience.of(rollout, logprobs=old, values=old * 0, advantages=torch.ones_like(old), returns=old * 0)
    learner = Learner(made.actor, OptimizerConfig(learning_rate=0.0, micro_batch_tokens=3 * 14), 2)
    for _ in range(2):
        stats = learner.step(rows, loss)
        assert stats["log_ratio_max"] < 1e-4 and stats["clip_fraction"] == 0


def test_the_temperature_is_in_rollout_and_update_alike():
    """Logits [2, 1, 0], token 0, temperature ½: −0.142932; without it a false ratio of 0.767456."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    _, drawn = sample(logits / 0.5, torch.tensor([0.0]))
    assert drawn.item() == pytest.approx(-0.142932, abs=1e-6)
    net = network("llama")
    assert net.language is not None
    rows = Sequences.pack([[3, 0]], [[False, True]])
    outputs = net(rows)
    with torch.no_grad():
        net.language.linear.weight.zero_()
        hidden = outputs.hidden[0, 0]
        for token, logit in ((0, 2.0), (1, 1.0)):
            net.language.linear.weight[token] = hidden * logit / hidden.square().sum()
        net.language.linear.weight[3:] = -1e3 * hidden / hidden.square().sum()
        logprobs, _ = token_policy(net(rows), rows, 0.5)
    assert logprobs[0, 1].item() == pytest.approx(-0.142932, abs=1e-4)
    assert math.exp(-0.407606 + 0.142932) == pytest.approx(0.767456, abs=1e-5)


def test_two_answers_that_are_one_after_cutting_teach_nothing():
    """Kept on request as a tie: loss 0.693147, gradient 0, and a tie is not a correct answer."""
    net = network("llama")
    rows = RankedAnswers.pack(
        [[5, 6], [5, 6]], [[True] * 2] * 2, group=torch.tensor([0, 0]), rank=torch.tensor([0, 0]), ties=True
    )
    loss, stats = ranking_loss(RewardConfig(ties="half"))(net(rows), rows, rows.weights())
    loss.backward()
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert net.scalar is not None and net.scalar.weight.grad is not None
    assert net.scalar.weight.grad.abs().max() < 1e-6
    assert stats["accuracy"] == 0


@pytest.mark.parametrize("stage", ["reward", "dpo"])
def test_pairs_that_are_one_after_cutting_are_counted(cache, tmp_path, stage: str):
    """Texts lose their beginning: two that differ only there are one."""
    end = " and so on and so on and so on" * 3
    store = PreferenceStore(tmp_path / "store.sqlite", create=True)
    made = [("good", "bad", 0), ("great" + end, "poor" + end, 1), ("fine", "dull", 0)] * 4
    comparisons = [
        Comparison(0, f"{i}: ", (Answer(better), Answer(worse)), {"split": "train"})
        for i, (better, worse, _) in enumerate(made)
    ]
    store.record([Preference(c, (0, 1), "person") for c in store.add(comparisons)])
    store.close()
    keys = {"model": "tiny", "store": str(tmp_path / "store.sqlite"), "max_length": 20, "train_blocks": 1}
    config = (RewardConfig if stage == "reward" else DPOConfig)(out=str(tmp_path / "run"), **keys)
    summary = getattr(plaudit, stage)(config)
    assert summary["pairs_equal_after_cutting"] == sum(same for *_, same in made)


def test_a_pair_of_which_nobody_is_certain_teaches_nothing():
    net = network("llama")
    rows = [[5, 6, 7], [5, 9, 8]] * 2
    losses = []
    for certainty in (0.5, 0.8, 1.0):
        pairs = Pairs.pack(
            rows,
            [[False, True, True]] * 4,
            ref_answer_logprobs=token_logprobs(net(plain := Sequences.pack(rows, [[False, True, True]] * 4)), plain)
            .sum(1)
            .detach(),
            certainty=torch.full((4,), certainty),
        )
        net.zero_grad()
        loss, _ = dpo_loss(0.1)(net(pairs), pairs, pairs.weights())
        loss.backward()
        assert loss.item() == pytest.approx(0.693147, abs=1e-5)
        losses.append(next(p.grad.norm().item() for p in net.parameters() if p.grad is not None))
    assert losses[0] < 1e-6 < losses[1] < losses[2]


def test_whitening_hears_no_padding():
    x, mask = torch.tensor([[1.0, 2.0, 3.0, 99.0]]), torch.tensor([[True, True, True, False]])
    assert ops.whiten(x, mask)[0].tolist() == pytest.approx([-1.224745, 0, 1.224745, 0], abs=1e-5)
    assert ops.whiten(x, mask, unbiased=True)[0].tolist() == pytest.approx([-1, 0, 1, 0], abs=1e-5)
    for few in (1, 0):
        assert torch.isfinite(ops.whiten(x, torch.arange(4)[None] < few)).all()


def test_advantages_and_returns_pass_over_padding():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0]]), torch.full((1, 3), 0.5)
    for pad in (False, True):
        r = torch.cat([rewards, torch.zeros(1, 1)], 1) if pad else rewards
        v = torch.cat([values, torch.full((1, 1), 7.0)], 1) if pad else values
        mask = torch.arange(r.shape[1])[None] < 3
        advantages, returns = ops.gae(r, v, mask, gamma=1.0, lam=0.95)
        assert advantages[0, :3].tolist() == pytest.approx([0.45125, 0.475, 0.5])
        assert returns[0, :3].tolist() == pytest.approx([0.95125, 0.975, 1.0])


def test_kl_estimates_have_their_sign_and_their_name():
    new, ref = torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.0])
    assert ops.kl_estimate(new, ref, "k1").tolist() == [0.5, -1.0]
    assert ops.kl_estimate(new, ref, "k3").tolist() == pytest.approx([0.106531, 0.718282], abs=1e-6)


def test_the_adaptive_coefficient():
    assert ops.adaptive_kl_coef(0.2, 12.0, target=6.0, horizon=10000.0, n=256) == pytest.approx(0.201024)
    assert ops.adaptive_kl_coef(0.2, 3.0, target=6.0, horizon=10000.0, n=256) == pytest.approx(0.198976)
    with pytest.raises(ValueError, match="positive"):
        ops.adaptive_kl_coef(0.2, 3.0, target=0.0, horizon=1.0, n=1)


def test_clipped_losses():
    advantage, ratio = torch.tensor([1.0, -1.0, 1.0, -1.0]), torch.tensor([1.5, 1.5, 0.5, 0.5])
    losses = ops.policy_loss(ratio.log(), torch.zeros(4), advantage, 0.2)
    assert losses.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8])
    one, two, zero = torch.tensor([1.0]), torch.tensor([2.0]), torch.tensor([0.0])
    assert ops.value_loss(one, zero, two, 0.2).item() == pytest.approx(1.62)


def test_logits_that_become_nan_stop_the_run_and_lose_nothing(cache, tmp_path, monkeypatch):
    """At iteration 3 the actor's weights are broken: the run says where, and iteration 2 is on disk."""
    real = ppo.ppo_iteration

    def breaking(cfg, roles, state, *prompts):
        if state.iteration == 2:
            with torch.no_grad():
                next(iter(roles.updates[0].learner.named.values())).fill_(math.nan)
            roles.engine.load(state.version)
        return real(cfg, roles, state, *prompts)

    monkeypatch.setattr(ppo, "ppo_iteration", breaking)
    with pytest.raises(NonFinite, match="iteration 3.*not finite"):
        plaudit.ppo(config(tmp_path / "run", iterations=4, checkpoint_every=1))
    kept = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept[-1] == "step-000002"
    assert all(math.isfinite(v) for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") for v in line.values())


@pytest.mark.parametrize("count", [1, 5, 17])
def test_every_prompt_is_used_once_an_epoch_whatever_the_batch(count: int):
    """17 prompts in batches of 4: after 17 iterations each has been asked 4 times; one prompt serves a batch of 4."""
    asked: list[int] = []
    for number in range(count):
        asked += turn(count, 4, number, 0)
    assert all(asked.count(i) == 4 for i in range(count))
    for epoch in range(4):
        assert len(set(asked[epoch * count : (epoch + 1) * count])) == count


def test_building_a_run_leaves_the_global_random_state_alone(cache, tmp_path):
    torch.manual_seed(7)
    numpy.random.seed(7)
    before, others = torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    plaudit.ppo(config(tmp_path / "run", iterations=1, critic_head="random"))
    assert torch.equal(before, torch.get_rng_state())
    assert others == numpy.random.get_state()[1].tolist()


def two_each(prompts, responses):
    return [2.0] * len(prompts)


@pytest.mark.parametrize(("how", "unended"), [("subtract", 1.0), ("replace", -1.0)])
def test_an_end_token_inside_the_prompt_ends_nothing_and_the_penalty_fires(cache, tiny, tmp_path, how, unended):
    """Each answer scores 2: an ended one is paid 2, an unended one 1 (the penalty taken off) or −1 (in its place)."""
    _, tokenizer = tiny
    end = tokenizer.inner.convert_ids_to_tokens(tokenizer.end_ids[0])
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": f"one{end}two"}) + "\n", encoding="utf-8")
    assert tokenizer.end_ids[0] in tokenizer.prompt(f"one{end}two").ids[1:]
    reward = f"{Path(__file__)}:two_each"
    plaudit.ppo(config(tmp_path / "run", prompts=str(tmp_path / "prompts.jsonl"), reward=reward, truncation=how))
    for line in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        assert line["score_paid"] == pytest.approx(2 * line["ended"] + unended * line["truncated"])
        assert line["truncated"] > 0


def test_a_reward_model_with_another_vocabulary_is_refused_before_anything_is_scored(cache, tiny, tmp_path):
    """The same size, the ids of two tokens exchanged: its scores would be of other texts."""
    _, tokenizer = tiny
    model = new_reward_model("tiny", tokenizer)
    head = scalar_head(torch.ones(1, model.config.hidden_size))
    save_reward_model(model, head, tokenizer, tmp_path / "reward", mean=0.0, deviation=1.0)
    file = tmp_path / "reward" / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    one, two = list(vocabulary)[5:7]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError, match="vocabulary"):
        plaudit.ppo(config(tmp_path / "run", reward=str(tmp_path / "reward")))


def test_what_was_computed_for_a_row_stays_with_it():
    """Three epochs of shuffled minibatches, cut into length-sorted micro-batches: every advantage with its own row."""
    lengths = [3, 7, 2, 5, 4, 6, 8]
    rows = Sequences.pack([[n] * n for n in lengths], [[True] * n for n in lengths])
    own = rows.tokens.float()
    zero = torch.zeros_like(own)
    experience = Experience(
        **{f: getattr(rows, f) for f in ("tokens", "mask", "lengths", "features")},
        **{f: zero for f in ("logprobs", "ref_logprobs", "importance", "values", "returns")},
        value_mask=rows.mask,
        advantages=own,
        ref_hidden=zero[:, :, None][:, :, :0],
        version=torch.zeros(len(rows), dtype=torch.long),
        number=torch.arange(len(rows)),
    )
    pool = Pool()
    pool.add(experience, 0)
    seen = []
    for minibatch in pool.minibatches(3, 2, torch.Generator().manual_seed(0)):
        for index in minibatch.micro_batches(12):
            part = minibatch.take(index).trim()
            assert torch.equal(part.advantages, part.tokens.float())
            seen += part.lengths.tolist()
    assert sorted(seen) == sorted(3 * lengths)


def test_fewer_prompts_than_a_batch_and_an_answer_that_is_only_an_end(cache, tmp_path):
    """17 prompts in batches of 32 run; an answer of one token has length 1 and a finite loss."""
    run = tmp_path / "run"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} a"}) + "\n" for i in range(17)), encoding="utf-8")
    plaudit.ppo(config(run, prompts=str(prompts), batch_size=32, iterations=1, sampling__max_new_tokens=1))
    (line,) = read_jsonl(run / "metrics.jsonl")
    assert line["response_tokens"] == 1 and line["updates"] == 4
    assert math.isfinite(line["actor/policy_loss"])


def test_the_last_steps_are_saved_whatever_the_interval_of_checkpoints(cache, tmp_path):
    """Seven iterations with a checkpoint every five leave the model of the seventh."""
    models = []
    for every in (5, 7):
        out = tmp_path / f"every{every}"
        assert plaudit.ppo(config(out, iterations=7, checkpoint_every=every))["iterations"] == 7
        loaded, info = AutoModelForCausalLM.from_pretrained(out / "model", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        models.append(loaded.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(models[0].values(), models[1].values(), strict=True))
