"""Where public PPO systems disagree, by name.

A :class:`Conventions` is a bundle of choices; a preset is a bundle that reproduces one system's step exactly. The
functions below compute the step of any bundle from per-token tensors; what a choice means stands at its field. Left
out: how the tensors come about.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from plaudit import ops

#: Positions of a row whose response has n tokens: those n; the one after them too, where the row has it; or all.
Span = Literal["response", "one_after", "row"]
Reduction = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


@dataclass(frozen=True)
class Whitening:
    """Scaling to unit variance over ``over``.

    ``unbiased`` divides by N − 1. ``floor`` divides by √max(variance, 1e-8), otherwise by √(variance + 1e-8).
    ``keep_mean`` adds the mean back. Without ``reset`` what lies outside goes through the same map.
    """

    over: Span = "response"
    unbiased: bool = False
    floor: bool = False
    keep_mean: bool = False
    reset: bool = True

    def __str__(self) -> str:
        words = [f"over {self.over}", "unbiased" if self.unbiased else "biased"]
        words += ["floored variance"] * self.floor + ["mean kept"] * self.keep_mean
        return ", ".join(words + ["padding goes through the map too"] * (not self.reset))

    def __call__(self, x: Float[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> Float[Tensor, "B S"]:
        return ops.whiten(
            x,
            span(mask, self.over),
            unbiased=self.unbiased,
            floor=self.floor,
            keep_mean=self.keep_mean,
            reset=self.reset,
        )


@dataclass(frozen=True)
class KLClamp:
    """Limits on the per-token KL estimate: ``argument`` on the log-ratio it is made of, ``estimate`` on the result.

    ``only`` names the one estimator that is limited; empty: every one.
    """

    argument: float | None = None
    estimate: float | None = None
    only: str = ""

    def __str__(self) -> str:
        limits = [f"{name} ± {v:g}" for name, v in (("log-ratio", self.argument), ("estimate", self.estimate)) if v]
        return ", ".join(limits + [f"{self.only} only"] * bool(limits and self.only)) or "none"

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, estimator: ops.KLEstimator) -> Tensor:
        if self.only and estimator != self.only:
            return ops.kl_estimate(logprobs, ref_logprobs, estimator)
        difference = logprobs - ref_logprobs
        if self.argument is not None:
            difference = difference.clamp(-self.argument, self.argument)
        kl = ops.kl_estimate(difference, torch.zeros_like(difference), estimator)
        return kl if self.estimate is None else kl.clamp(-self.estimate, self.estimate)


@dataclass(frozen=True)
class Hyper:
    """The coefficients of one step: what a run may set without leaving a convention.

    ``kl_clamp`` replaces the convention's limit of the KL estimate; ``vf_coef`` weighs the value loss in a joint total.
    """

    kl_coef: float = 0.05
    kl_estimator: ops.KLEstimator = "k1"
    gamma: float = 1.0
    lam: float = 0.95
    clip: float | tuple[float, float] = 0.2
    value_clip: float | None = 0.2
    vf_coef: float = 1.0
    reward_clip: float | None = None
    kl_clamp: float | None = None
    whiten_rewards: bool = False
    dual_clip: float | None = None
    policy_loss_reduction: Reduction = "token-mean"


def _choice(default: Any, meaning: str) -> Any:
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True)
class Conventions:
    """The choices of one step. The defaults are Plaudit's own; what a choice means is in its field's metadata."""

    name: str = "plaudit"
    hyper: Hyper = Hyper()
    score_position: Literal["last", "after_end", "row_end"] = _choice(
        "last",
        "where the score is paid: at the last response token; one after it (at it, where the row ends there); "
        "or at the last position of the row",
    )
    kl_over: Span = _choice("response", "where KL is charged")
    values_over: Span = _choice("response", "where V counts; it is 0 elsewhere")
    credit_over: Span = _choice("response", "where the recursion of the advantages runs")
    value_loss_over: Span = _choice("response", "where the value loss is taken")
    kl_clamp: KLClamp = _choice(KLClamp(), "limits of the per-token KL estimate")
    reward_whitening: Whitening = _choice(
        Whitening(keep_mean=True), "how rewards are whitened, where that is asked for"
    )
    advantage_whitening: Whitening | None = _choice(Whitening(), "how advantages are whitened")
    ratio_clamp: float | None = _choice(None, "limit of the log-ratio of new to old policy")
    skip_above_mean_ratio: float | None = _choice(None, "a minibatch whose mean ratio is above this has no loss")


def span(mask: Bool[Tensor, "B S"], over: Span) -> Bool[Tensor, "B S"]:
    """The positions of ``over`` for rows whose response is where ``mask`` is true."""
    match over:
        case "response":
            return mask
        case "one_after":
            return mask | ops.first_after(mask)
        case "row":
            # a row's own positions begin with its response: what stands before it is the prompt
            return mask.cumsum(1) > 0
    raise ValueError(f"unknown span {over!r}: one of response, one_after, row")


def paid_at(mask: Bool[Tensor, "B S"], position: str) -> Bool[Tensor, "B S"]:
    """The one position of each row where its score is paid."""
    last = ops.last_true(mask)
    match position:
        case "last":
            return last
        case "after_end":
            after = ops.first_after(mask)
            return torch.where(after.any(1, keepdim=True), after, last)
        case "row_end":
            return ops.last_true(span(mask, "row"))
    raise ValueError(f"unknown score position {position!r}: one of last, after_end, row_end")


@dataclass(frozen=True)
class Credit:
    """What a step makes of a rollout, f32 (B, S) each: ``token_rewards`` before and ``whitened_rewards`` after
    whitening, ``advantages`` as they enter the policy loss, ``returns`` as they enter the value loss."""

    token_rewards: Float[Tensor, "B S"]
    whitened_rewards: Float[Tensor, "B S"]
    advantages: Float[Tensor, "B S"]
    returns: Float[Tensor, "B S"]


def assign_credit(
    c: Conventions,
    hyper: Hyper,
    scores: Float[Tensor, " B"],
    logprobs: Float[Tensor, "B S"],
    ref_logprobs: Float[Tensor, "B S"],
    values: Float[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
) -> Credit:
    """Token rewards, advantages and returns under conventions ``c``."""
    if hyper.reward_clip is not None:
        scores = scores.clamp(-hyper.reward_clip, hyper.reward_clip)
    clamp = c.kl_clamp if hyper.kl_clamp is None else replace(c.kl_clamp, estimate=hyper.kl_clamp)
    kl = clamp(logprobs, ref_logprobs, hyper.kl_estimator)
    rewards = ops.pay(scores, kl, span(mask, c.kl_over), paid_at(mask, c.score_position), kl_coef=hyper.kl_coef)
    whitened = c.reward_whitening(rewards, mask) if hyper.whiten_rewards else rewards
    kept = torch.where(span(mask, c.values_over), values, 0.0)
    credited = span(mask, c.credit_over)
    advantages, returns = ops.gae(whitened, kept, credited, gamma=hyper.gamma, lam=hyper.lam)
    returns = torch.where(span(mask, c.values_over), returns, 0.0)
    if c.advantage_whitening is not None:
        advantages = c.advantage_whitening(advantages, mask)
    return Credit(rewards, whitened, advantages, returns)


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
    mask: Bool[Tensor, "B S"],
) -> Losses:
    """The losses of one minibatch that is the whole of ``credit``."""
    per_token = ops.policy_loss(
        new_logprobs,
        logprobs,
        credit.advantages,
        hyper.clip,
        dual_clip=hyper.dual_clip,
        ratio_clamp=c.ratio_clamp,
    )
    policy = reduce(per_token, mask, hyper.policy_loss_reduction)
    over = span(mask, c.value_loss_over)
    per_value = ops.value_loss(new_values, values, credit.returns, hyper.value_clip)
    value = ops.masked_mean(per_value, over)
    if c.skip_above_mean_ratio is not None:
        ratio = ops.importance_ratio(new_logprobs, logprobs, c.ratio_clamp)
        keep = (ops.masked_mean(ratio, mask) <= c.skip_above_mean_ratio).to(policy.dtype)
        policy, value = policy * keep, value * keep
    clipped = ops.policy_clipped(new_logprobs, logprobs, credit.advantages, hyper.clip, ratio_clamp=c.ratio_clamp).to(
        policy.dtype
    )
    change = ops.kl_estimate(new_logprobs, logprobs, "k2")
    return Losses(policy, value, ops.masked_mean(clipped, mask), ops.masked_mean(change, mask))


def reduce(x: Float[Tensor, "B S"], mask: Bool[Tensor, "B S"], reduction: Reduction) -> Float[Tensor, ""]:
    """Mean over all tokens; or over rows, of each row's sum or mean over its tokens.

    Raises:
        ValueError: the reduction has no such name.
    """
    sums = torch.where(mask, x, 0.0).sum(1)
    match reduction:
        case "token-mean":
            return ops.masked_mean(x, mask)
        case "seq-mean-token-sum":
            return sums.mean()
        case "seq-mean-token-mean":
            return (sums / mask.sum(1).clamp(min=1)).mean()
    raise ValueError(f"unknown reduction {reduction!r}: token-mean, seq-mean-token-sum or seq-mean-token-mean")


PRESETS: dict[str, Conventions] = {
    c.name: c
    for c in (
        Conventions(),
        Conventions(
            "ziegler19",
            hyper=Hyper(kl_coef=0.15, vf_coef=0.1, whiten_rewards=True),
            score_position="row_end",
            kl_over="row",
            values_over="row",
            credit_over="row",
            value_loss_over="row",
            reward_whitening=Whitening("row", keep_mean=True),
            advantage_whitening=Whitening("row"),
        ),
        Conventions(
            "trl-0.7",
            hyper=Hyper(kl_coef=0.2, vf_coef=0.1),
            credit_over="row",
            reward_whitening=Whitening(unbiased=True, keep_mean=True, reset=False),
            advantage_whitening=Whitening(unbiased=True),
            skip_above_mean_ratio=10.0,
        ),
        Conventions(
            "trl-1",
            hyper=Hyper(kl_coef=0.05, vf_coef=0.1),
            score_position="after_end",
            values_over="one_after",
            credit_over="one_after",
            value_loss_over="one_after",
            reward_whitening=Whitening("one_after", unbiased=True, keep_mean=True),
            advantage_whitening=Whitening(unbiased=True),
        ),
        Conventions(
            "deepspeed-chat",
            hyper=Hyper(kl_coef=0.1, reward_clip=5.0),
            score_position="after_end",
            kl_over="one_after",
            values_over="one_after",
            credit_over="one_after",
            advantage_whitening=None,
        ),
        Conventions(
            "openrlhf",
            hyper=Hyper(kl_coef=0.01, lam=1.0, value_clip=0.5, reward_clip=10.0),
            kl_clamp=KLClamp(estimate=10.0),
            advantage_whitening=Whitening(floor=True),
            ratio_clamp=20.0,
        ),
        Conventions(
            "verl",
            hyper=Hyper(kl_coef=0.0, kl_estimator="k3", lam=1.0, value_clip=0.5, dual_clip=3.0),
            kl_clamp=KLClamp(argument=20.0, estimate=10.0, only="k3"),
            advantage_whitening=Whitening(unbiased=True),
            ratio_clamp=20.0,
        ),
    )
}
