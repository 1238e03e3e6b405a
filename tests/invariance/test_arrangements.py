"""How roles share weights changes memory and time, never a number (before the first update)."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from families import FAMILIES, build

from plaudit.algorithms import ppo
from plaudit.config import ArrangementConfig, OptimizerConfig, PPOConfig, SamplingConfig
from plaudit.errors import ModelError
from plaudit.learner import Learner, Scorer
from plaudit.models.arrangements import CriticStart, RewardParts, arrange
from plaudit.models.network import scalar_head, text_scores, token_logprobs, token_values
from plaudit.models.stack import blocks_of
from plaudit.rollout.local import LocalEngine
from plaudit.types import Experience, Prompt

PROMPTS = [Prompt("", (5, 9, 3)), Prompt("", (7, 2)), Prompt("", (4, 4, 4, 8, 11)), Prompt("", (6,))]
KINDS = ("separate", "shared_trunk", "frozen_trunk")


def _reward(model) -> RewardParts:
    torch.manual_seed(3)
    return RewardParts(copy.deepcopy(model.base_model), scalar_head(torch.randn(1, model.config.hidden_size), 0.3))


def _made(family: str, kind: str, critic_from: str = "actor"):
    model = build(family, seed=0)
    config = ArrangementConfig(kind=kind, blocks=1)
    return model, arrange(model, _reward(model), config, CriticStart(critic_from))


def _actor_loss(made):
    return ppo.actor_loss(PPOConfig(), made.reference.language, ppo.State(), ppo.Own())


def _judged(family: str, kind: str) -> dict[str, torch.Tensor]:
    """What every role makes of one rollout, and the losses of a first update."""
    model, made = _made(family, kind)
    with torch.no_grad():
        made.critic.scalar.weight.copy_(torch.linspace(-1, 1, made.critic.scalar.weight.numel())[None])
    engine = LocalEngine(model, [1], trunk=made.trunk, head=made.head)
    rollout = made.prepare(engine.generate(PROMPTS, SamplingConfig(max_new_tokens=6), seed=0))
    logprobs = Scorer(made.actor).evaluate(rollout, token_logprobs)
    values = Scorer(made.critic).evaluate(rollout, token_values)
    advantages = torch.where(rollout.mask, torch.sin(torch.arange(rollout.mask.numel()).view_as(values) + 1.0), 0.0)
    experience = Experience.of(rollout, logprobs=logprobs, values=values, advantages=advantages, returns=advantages)
    out = {
        "tokens": rollout.tokens.float(),
        "logprobs": logprobs,
        "ref_logprobs": Scorer(made.reference).evaluate(rollout, token_logprobs),
        "values": values,
        "scores": Scorer(made.reward).evaluate(rollout, text_scores),
    }
    for name, network, loss in (
        ("policy", made.actor, _actor_loss(made)),
        ("value", made.critic, ppo.critic_loss(PPOConfig(), ppo.State())),
    ):
        out[f"{name}_loss"] = loss(network(experience), experience, experience.weights())[0].detach()
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_all_arrangements_give_the_same_numbers(family: str):
    first = _judged(family, "separate")
    for kind in KINDS[1:]:
        for name, value in _judged(family, kind).items():
            assert torch.allclose(value, first[name], atol=1e-5), (kind, name)


def test_frozen_trunk_trains_exactly_the_top_blocks():
    model, made = _made("llama", "frozen_trunk", critic_from="reward")
    before = copy.deepcopy(model.state_dict())
    reference = copy.deepcopy(made.reference.state_dict())
    rollout = made.prepare(LocalEngine(model, [1]).generate(PROMPTS, SamplingConfig(max_new_tokens=6), seed=0))
    noise = torch.randn(rollout.mask.shape, generator=torch.Generator().manual_seed(0))
    experience = Experience.of(rollout, logprobs=noise, values=noise, advantages=noise, returns=noise)
    Learner(made.actor, OptimizerConfig(learning_rate=0.1), 1).step(experience, _actor_loss(made))
    value_loss = ppo.critic_loss(PPOConfig(), ppo.State())
    Learner(made.critic, OptimizerConfig(learning_rate=0.1), 1).step(experience, value_loss)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    last = len(blocks_of(model.base_model)[1]) - 1
    assert changed and all(f"layers.{last}." in name for name in changed)
    assert all(torch.equal(v, reference[k]) for k, v in made.reference.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_the_actor_leaves_the_reference_and_the_reward_model(kind: str):
    model, made = _made("llama", kind)
    rollout = made.prepare(LocalEngine(model, [1]).generate(PROMPTS, SamplingConfig(max_new_tokens=6), seed=0))
    noise = torch.randn(rollout.mask.shape, generator=torch.Generator().manual_seed(0))
    experience = Experience.of(rollout, logprobs=noise, values=noise, advantages=noise, returns=noise)

    def seen():
        return (
            Scorer(made.actor).evaluate(rollout, token_logprobs),
            Scorer(made.reference).evaluate(rollout, token_logprobs),
            Scorer(made.reward).evaluate(rollout, text_scores),
        )

    before = seen()
    loss = ppo.joint_loss(PPOConfig(), ppo.State(), _actor_loss(made)) if made.joint else _actor_loss(made)
    Learner(made.actor, OptimizerConfig(learning_rate=0.01), 1).step(experience, loss)
    after = seen()
    assert not torch.allclose(before[0], after[0], atol=1e-4)
    assert torch.equal(before[1], after[1]) and torch.equal(before[2], after[2])


def test_features_recorded_while_generating_are_those_of_the_trunk():
    model, made = _made("llama", "frozen_trunk")
    # Enough rows, and ends at different lengths, for ended rows to stay in the batch for a while and then to leave it.
    prompts, ends, sampling = PROMPTS * 8, range(16), SamplingConfig(max_new_tokens=6)
    recorded = LocalEngine(model, ends, trunk=made.trunk, head=made.head).generate(prompts, sampling, seed=1)
    computed = made.prepare(LocalEngine(model, ends).generate(prompts, sampling, seed=1))
    assert len(set(recorded.response_lengths().tolist())) > 3
    # the end token's own features are read by nobody and not recorded
    read = torch.arange(recorded.tokens.shape[1])[None] <= recorded.text_end()[:, None]
    assert torch.allclose(recorded.features[read], computed.features[read], atol=1e-5)


def test_roles_with_different_lower_blocks_cannot_share_a_trunk():
    model = build("llama", seed=0)
    other = RewardParts(build("llama", seed=1).base_model, scalar_head(torch.zeros(1, model.config.hidden_size)))
    with pytest.raises(ModelError, match="separate"):
        arrange(model, other, ArrangementConfig(kind="frozen_trunk", blocks=1), CriticStart("actor"))


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_products_leave_the_first_ratio_at_one(kind: str):
    model = build("llama", seed=0)
    made = arrange(
        model, _reward(model), ArrangementConfig(kind=kind, blocks=1, precision="bfloat16"), CriticStart("actor")
    )
    engine = LocalEngine(model, [1], trunk=made.trunk, head=made.head)
    rollout = made.prepare(engine.generate(PROMPTS, SamplingConfig(max_new_tokens=6), seed=0))
    logprobs = Scorer(made.actor).evaluate(rollout, token_logprobs)
    again = Scorer(made.actor, token_budget=8).evaluate(rollout, token_logprobs)
    assert torch.allclose(logprobs, again, atol=1e-5)
    assert torch.allclose(logprobs, rollout.logprobs, atol=0.02)
    with torch.enable_grad():
        trained = token_logprobs(made.actor(rollout), rollout)
    assert torch.allclose(trained.detach(), logprobs, atol=1e-5)
    assert made.critic.stack.low and not made.reference.stack.low


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_from_bfloat16_products_are_those_of_float32_but_for_rounding(kind: str):
    gradients = []
    for precision in ("float32", "bfloat16"):
        config = ArrangementConfig(kind=kind, blocks=1, precision=precision)
        made = arrange(build("llama", seed=0), None, config, CriticStart("actor"))
        rollout = made.prepare(LocalEngine(build("llama", seed=0), [1]).generate(PROMPTS, SamplingConfig(), seed=0))
        features = torch.randn(*rollout.features.shape, generator=torch.Generator().manual_seed(0))
        rows = replace(rollout, features=features)
        (token_logprobs(made.actor(rows), rows) * rows.mask).sum().backward()
        gradients.append({n: p.grad for n, p in made.actor.named_parameters() if p.grad is not None})
    exact, low = gradients
    assert exact.keys() == low.keys() and len(exact) > 5
    for name, expected in exact.items():
        assert (low[name] - expected).norm() < 0.02 * expected.norm(), name
