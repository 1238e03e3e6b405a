"""Where public PPO systems disagree, by name.

A :class:`Conventions` is a bundle of choices; a preset is a bundle that reproduces one system's step exactly (both are
in presets). The functions below compute the step of any bundle from per-token tensors. Left out: how the tensors come
about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from plaudit import ops
from plaudit.presets import PRESETS, Conventions, Hyper, KLClamp, Preset, Span, Whitening

__all__ = [
    "PRESETS",
    "Conventions",
    "Credit",
    "Hyper",
    "KLClamp",
    "Losses",
    "Positions",
    "Preset",
    "Span",
    "Whitening",
    "assign_credit",
    "credit",
    "credited",
    "estimated_kl",
    "limited_kl",
    "losses",
    "token_rewards",
    "whiten",
]


#: (rewards, values, where credit is assigned) -> advantages and returns, f32 (B, S) each
Estimate = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Positions:
    """Which positions of some rows are what: ``response`` bool (B, S) is true where the policy chose; ``fed`` bool
    (B, S) where the row has a position at all (as far as the length limit reaches)."""

    response: Bool[Tensor, "B S"]
    fed: Bool[Tensor, "B S"]

    @classmethod
    def whole(cls, response: Bool[Tensor, "B S"]) -> Positions:
        """Rows that have every position of their tensor."""
        return cls(response, torch.ones_like(response))

    def span(self, over: Span) -> Bool[Tensor, "B S"]:
        """The positions of ``over``."""
        match over:
            case "response":
                return self.response
            case "one_after":
                return self.response | (ops.first_after(self.response) & self.fed)
            case "row":
                # a row's own positions begin with its response: what stands before it is the prompt
                return (self.response.cumsum(1) > 0) & self.fed
        raise ValueError(f"unknown span {over!r}: one of response, one_after, row")

    def paid_at(self, position: str) -> Bool[Tensor, "B S"]:
        """The one position of each row where its score is paid."""
        match position:
            case "last":
                return ops.last_true(self.response)
            case "after_end":
                return ops.last_true(self.span("one_after"))
            case "row_end":
                return ops.last_true(self.span("row"))
        raise ValueError(f"unknown score position {position!r}: one of last, after_end, row_end")


def whiten(w: Whitening, x: Float[Tensor, "B S"], rows: Positions) -> Float[Tensor, "B S"]:
    """``x`` scaled to unit variance as ``w`` says."""
    return ops.whiten(x, rows.span(w.over), unbiased=w.unbiased, floor=w.floor, keep_mean=w.keep_mean, reset=w.reset)


def estimated_kl(
    c: KLClamp, logprobs: Float[Tensor, "B S"], ref_logprobs: Float[Tensor, "B S"], estimator: ops.KLEstimator
) -> Float[Tensor, "B S"]:
    """The per-token estimate within the limits of ``c``."""
    if c.only and estimator != c.only:
        return ops.kl_estimate(logprobs, ref_logprobs, estimator)
    difference = logprobs - ref_logprobs
    if c.argument:
        difference = difference.clamp(-c.argument, c.argument)
    return limited_kl(c, ops.kl_estimate(difference, torch.zeros_like(difference), estimator))


def limited_kl(c: KLClamp, kl: Float[Tensor, "B S"]) -> Float[Tensor, "B S"]:
    """A KL within the limits of ``c`` for estimates."""
    return kl.clamp(-c.estimate, c.estimate) if c.estimate else kl


@dataclass(frozen=True)
class Credit:
    """What a step makes of a rollout, f32 (B, S) each: ``token_rewards`` before and ``whitened_rewards`` after
    whitening, ``raw_advantages`` before and ``advantages`` as they enter the policy loss, ``returns`` as they enter the
    value loss."""

    token_rewards: Float[Tensor, "B S"]
    whitened_rewards: Float[Tensor, "B S"]
    raw_advantages: Float[Tensor, "B S"]
    advantages: Float[Tensor, "B S"]
    returns: Float[Tensor, "B S"]


def assign_credit(
    c: Conventions,
    hyper: Hyper,
    scores: Float[Tensor, " B"],
    logprobs: Float[Tensor, "B S"],
    ref_logprobs: Float[Tensor, "B S"],
    values: Float[Tensor, "B S"],
    rows: Positions,
) -> Credit:
    """Token rewards, advantages and returns under conventions ``c``: :func:`token_rewards`, then :func:`credit`."""
    if hyper.reward_clip is not None:
        scores = scores.clamp(-hyper.reward_clip, hyper.reward_clip)
    clamp = c.kl_clamp if hyper.kl_clamp is None else c.kl_clamp.model_copy(update={"estimate": hyper.kl_clamp})
    kl = estimated_kl(clamp, logprobs, ref_logprobs, hyper.kl_estimator)
    rewards = token_rewards(c, scores, kl, rows, hyper.kl_coef)
    estimate = partial(ops.gae, gamma=hyper.gamma, lam=hyper.lam)
    return credit(c, rewards, values, rows, estimate, whiten_rewards=hyper.whiten_rewards)


def credit(
    c: Conventions,
    rewards: Float[Tensor, "B S"],
    values: Float[Tensor, "B S"],
    rows: Positions,
    estimate: Estimate,
    *,
    whiten_rewards: bool,
    whiten_advantages: bool = True,
) -> Credit:
    """Advantages and returns of token rewards: ``estimate`` makes them from what the conventions let it see.

    Without ``whiten_advantages`` they are left as they are whatever the conventions say.
    """
    whitened = whiten(c.reward_whitening, rewards, rows) if whiten_rewards else rewards
    counted = rows.span(c.values_over)
    raw, returns = estimate(whitened, torch.where(counted, values, 0.0), credited(c, rows))
    whitens = c.whiten_advantages and whiten_advantages
    advantages = whiten(c.advantage_whitening, raw, rows) if whitens else raw
    return Credit(rewards, whitened, raw, advantages, torch.where(counted, returns, 0.0))


def token_rewards(
    c: Conventions, scores: Float[Tensor, " B"], kl: Float[Tensor, "B S"], rows: Positions, kl_coef: float
) -> Float[Tensor, "B S"]:
    """−kl_coef · kl where KL is charged, and each row's score where it is paid."""
    return ops.pay(scores, kl, rows.span(c.kl_over), rows.paid_at(c.score_position), kl_coef=kl_coef)


def credited(c: Conventions, rows: Positions) -> Bool[Tensor, "B S"]:
    """Where the recursion of the advantages runs: as asked, and wherever something is paid, or it reaches no one."""
    return rows.span(c.credit_over) | rows.span(c.kl_over) | rows.paid_at(c.score_position)


@dataclass(frozen=True)
class Losses:
    """Scalars of one minibatch: the losses, the value loss before ``vf_coef``; the share of tokens clipped; the token
    mean of ½ (new − old)²."""

    policy_loss: Float[Tensor, ""]
    value_loss: Float[Tensor, ""]
    policy_clip_fraction: Float[Tensor, ""]
    approx_kl: Float[Tensor, ""]


def losses(
    c: Conventions,
    hyper: Hyper,
    credit: Credit,
    new_logprobs: Float[Tensor, "B S"],
    new_values: Float[Tensor, "B S"],
    logprobs: Float[Tensor, "B S"],
    values: Float[Tensor, "B S"],
    rows: Positions,
) -> Losses:
    """The losses of one minibatch that is the whole of ``credit``."""
    clamp = c.ratio_clamp or None
    per_token = ops.policy_loss(
        new_logprobs, logprobs, credit.advantages, hyper.clip, dual_clip=hyper.dual_clip, ratio_clamp=clamp
    )
    mask = rows.response
    policy = (per_token * ops.mean_weights(mask, hyper.policy_loss_reduction, per_token.dtype)).sum()
    over = rows.span(c.value_loss_over)
    per_value = ops.value_loss(new_values, values, credit.returns, hyper.value_clip)
    value = ops.masked_mean(per_value, over)
    if c.skip_above_mean_ratio:
        ratio = ops.importance_ratio(new_logprobs, logprobs, clamp)
        keep = (ops.masked_mean(ratio, mask) <= c.skip_above_mean_ratio).to(policy.dtype)
        policy, value = policy * keep, value * keep
    clipped = ops.policy_clipped(new_logprobs, logprobs, credit.advantages, hyper.clip, ratio_clamp=clamp)
    change = ops.kl_estimate(new_logprobs, logprobs, "k2")
    return Losses(policy, value, ops.masked_mean(clipped.to(policy.dtype), mask), ops.masked_mean(change, mask))
