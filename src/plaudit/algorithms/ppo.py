"""PPO with four roles. One iteration is five verbs: act, judge, assign credit, improve, publish.

This file knows protocols and row types only; which models stand behind the roles, and how they share weights, is an
arrangement's business. Left out: the loop around the iteration, files, progress (see recipes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from plaudit import ops
from plaudit.config import PPOConfig
from plaudit.learner import Learner, Loss
from plaudit.models.network import Outputs, token_logprobs, token_policy, token_values
from plaudit.rewards.source import RewardSource
from plaudit.rollout.engine import RolloutEngine
from plaudit.types import Experience, Prompt, Rollout, Sequences


class Role(Protocol):
    """A network that can be read: actor, reference or critic."""

    def evaluate(self, rows: Sequences, read: Callable[[Outputs, Sequences], Tensor]) -> Tensor: ...


@dataclass(frozen=True)
class Roles:
    """The four roles, the engine that samples for the actor, and the learners that improve what is trained."""

    engine: RolloutEngine
    reward: RewardSource
    actor: Role
    reference: Role
    critic: Role
    prepare: Callable[[Rollout], Rollout]
    updates: Sequence[tuple[str, Learner, Loss]]


@dataclass
class State:
    """What changes from iteration to iteration, apart from the weights."""

    iteration: int = 0
    kl_coef: float = 0.0


@dataclass(frozen=True)
class Iteration:
    """What an iteration leaves behind: its metrics, and what was said and how it was judged."""

    metrics: dict[str, float]
    rollout: Rollout
    scores: Tensor
    kl: Tensor


def stream(seed: int, iteration: int, purpose: int) -> int:
    """The seed of one random stream. Streams are derived, not carried along, so that a resumed run needs none saved."""
    return (seed * 1_000_003 + iteration) * 8 + purpose


def ppo_iteration(cfg: PPOConfig, roles: Roles, state: State, prompts: Sequence[Prompt]) -> Iteration:
    """Act, judge, assign credit, improve, publish."""
    t = cfg.sampling.temperature

    def logprobs_of(role: Role, rows: Sequences) -> Tensor:
        return role.evaluate(rows, lambda outputs, part: token_logprobs(outputs, part, t))

    # Act: the current policy answers the prompts.
    rollout = roles.engine.generate(prompts, cfg.sampling, seed=stream(cfg.seed, state.iteration, 0))
    rollout = roles.prepare(rollout)
    # Judge: one score an answer; for each token, what every role makes of the choice.
    scores = roles.reward.score(rollout)
    logprobs = logprobs_of(roles.actor, rollout)
    ref_logprobs = logprobs_of(roles.reference, rollout)
    values = roles.critic.evaluate(rollout, token_values)
    # Assign credit: the score is paid at the end, KL is charged at every token.
    paid = scores - cfg.truncation_penalty * (~rollout.terminated).float()
    rewards = ops.token_rewards(
        paid, logprobs, ref_logprobs, rollout.mask, kl_coef=state.kl_coef, estimator=cfg.kl.estimator
    )
    advantages, returns = ops.gae(rewards, values, rollout.mask, gamma=cfg.gamma, lam=cfg.lam)
    whitened = ops.whiten(advantages, rollout.mask)
    experience = Experience.of(rollout, logprobs=logprobs, values=values, advantages=whitened, returns=returns)
    # Improve: a few epochs of clipped updates.
    updates = [improve(roles, minibatch) for minibatch in minibatches(experience, cfg, state.iteration)]
    # Publish: the next answers come from the improved policy, at an adjusted price of KL.
    state.iteration += 1
    roles.engine.load(state.iteration)
    kl = ops.sequence_kl(logprobs, ref_logprobs, rollout.mask, cfg.kl.estimator)
    metrics = iteration_metrics(rollout, scores, kl, logprobs, values, returns, updates) | {"kl_coef": state.kl_coef}
    if cfg.kl.controller == "adaptive":
        state.kl_coef = ops.adaptive_kl_coef(
            state.kl_coef, float(kl.mean()), target=cfg.kl.target, horizon=cfg.kl.horizon, n=len(rollout)
        )
    return Iteration(metrics, rollout, scores, kl)


def minibatches(experience: Experience, cfg: PPOConfig, iteration: int):
    """Each epoch's rows in a fresh order, in ``cfg.minibatches`` parts of nearly equal size."""
    generator = torch.Generator().manual_seed(stream(cfg.seed, iteration, 1))
    for _ in range(cfg.epochs):
        order = torch.randperm(len(experience), generator=generator)
        for index in order.tensor_split(min(cfg.minibatches, len(experience))):
            yield experience.take(index)


def improve(roles: Roles, minibatch: Experience) -> dict[str, float]:
    """One optimizer step of every learner."""
    stats: dict[str, float] = {}
    for name, learner, loss in roles.updates:
        stats |= {f"{name}/{k}": v for k, v in learner.step(minibatch, loss).items()}
    return stats


def actor_loss(cfg: PPOConfig) -> Loss:
    """Clipped policy loss with an entropy bonus, per token (B, S)."""

    def loss(outputs: Outputs, rows: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(rows, Experience)
        logprobs, entropy = token_policy(outputs, rows, cfg.sampling.temperature, entropy_gradient=cfg.entropy_coef > 0)
        policy = ops.policy_loss(logprobs, rows.logprobs, rows.advantages, cfg.clip_range)
        log_ratio = logprobs.detach() - rows.logprobs
        stats = {
            "policy_loss": policy,
            "entropy": entropy,
            "clip_fraction": ops.policy_clipped(
                logprobs.detach(), rows.logprobs, rows.advantages, cfg.clip_range
            ).float(),
            "approx_kl": log_ratio.square() / 2,
            "ratio": log_ratio.exp(),
            "log_ratio_max": log_ratio.abs(),
        }
        total = policy - cfg.entropy_coef * entropy if cfg.entropy_coef else policy
        return total, stats

    return loss


def critic_loss(cfg: PPOConfig) -> Loss:
    """Clipped value loss per token (B, S)."""

    def loss(outputs: Outputs, rows: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        assert isinstance(rows, Experience)
        values = token_values(outputs, rows)
        losses = ops.value_loss(values, rows.values, rows.returns, cfg.value_clip_range or None)
        clipped = (values.detach() - rows.values).abs() > (cfg.value_clip_range or float("inf"))
        return losses, {"value_loss": losses, "value_clip_fraction": clipped.float()}

    return loss


def joint_loss(cfg: PPOConfig) -> Loss:
    """Policy and value loss of one network with both heads: L_policy + vf_coef · L_value − entropy_coef · H."""
    policy, value = actor_loss(cfg), critic_loss(cfg)

    def loss(outputs: Outputs, rows: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        policy_losses, policy_stats = policy(outputs, rows)
        value_losses, value_stats = value(outputs, rows)
        return policy_losses + cfg.vf_coef * value_losses, policy_stats | value_stats

    return loss


def iteration_metrics(
    rollout: Rollout,
    scores: Tensor,
    kl: Tensor,
    logprobs: Tensor,
    values: Tensor,
    returns: Tensor,
    updates: Sequence[dict[str, float]],
) -> dict[str, float]:
    """Means over real tokens (or responses) of what the iteration saw, and over its updates of what they reported."""
    mask = rollout.mask
    lengths = rollout.response_lengths().float()
    residual = ops.masked_mean((returns - values).square(), mask)
    spread = ops.masked_mean((returns - ops.masked_mean(returns, mask)).square(), mask)
    seen = {k: sum(u[k] for u in updates) / len(updates) for k in updates[0]}
    return {
        "score": float(scores.mean()),
        "score_std": float(scores.std(unbiased=False)),
        "kl": float(kl.mean()),
        "response_tokens": float(lengths.mean()),
        "ended": float(rollout.terminated.float().mean()),
        "explained_variance": float(1 - residual / spread.clamp(min=1e-8)),
        "engine_gap": float(ops.masked_mean((rollout.logprobs - logprobs).abs(), mask)),
        "first_ratio_error": updates[0]["actor/log_ratio_max"],
        **seen,
    }
