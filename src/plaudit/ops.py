"""The mathematics of RLHF as pure functions on tensors.

Per-token tensors are f32 (B, S) and speak of the choice of token s; ``mask`` bool (B, S) is true where the policy
chose it. Losses come back per token (or per row); a mean is a matter of weights and is taken by the learner. Nothing
here knows of models, configuration or devices.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

KLEstimator = Literal["k1", "k2", "k3", "abs"]


def masked_mean(x: Float[Tensor, ...], mask: Bool[Tensor, ...]) -> Float[Tensor, ""]:
    """Mean of ``x`` over the true positions of ``mask``; 0 where there is none."""
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def whiten(
    x: Float[Tensor, ...],
    mask: Bool[Tensor, ...],
    *,
    unbiased: bool = False,
    keep_mean: bool = False,
    eps: float = 1e-8,
    floor: bool = False,
    reset: bool = True,
) -> Float[Tensor, ...]:
    """(x − mean) / √(variance + eps) over the true positions; 0 elsewhere.

    ``unbiased`` divides the squared deviations by N − 1 instead of N; ``keep_mean`` adds the mean back; ``floor``
    divides by √max(variance, eps) instead. With fewer than two true positions the deviation is 0, so the result is 0
    (or the mean). Without ``reset`` the other positions, taken as 0, go through the same map. Ziegler et al. 2019,
    section 2.2.
    """
    n = mask.sum()
    mean = masked_mean(x, mask)
    centred = torch.where(mask, x, 0.0) - mean
    variance = torch.where(mask, centred, 0.0).square().sum() / (n - int(unbiased)).clamp(min=1)
    scaled = centred * (variance.clamp(min=eps) if floor else variance + eps).rsqrt()
    if keep_mean:
        scaled = scaled + mean
    return torch.where(mask, scaled, 0.0) if reset else scaled


def kl_estimate(
    logprobs: Float[Tensor, "*n"], ref_logprobs: Float[Tensor, "*n"], estimator: KLEstimator = "k1"
) -> Float[Tensor, "*n"]:
    """Per-token estimate of KL(pi ‖ pi_ref) from the sampled token, d = logprobs − ref_logprobs, in nats.

    k1 = d (unbiased, may be negative), k2 = d²/2, k3 = e^(−d) − 1 + d (unbiased, never negative), abs = |d|.
    Schulman 2020, "Approximating KL divergence".

    Raises:
        ValueError: the estimator has no such name.
    """
    d = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.expm1(-d) + d
        case "abs":
            return d.abs()
    raise ValueError(f"unknown KL estimator {estimator!r}: one of k1, k2, k3, abs")


def sequence_kl(
    logprobs: Float[Tensor, "B S"],
    ref_logprobs: Float[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    estimator: KLEstimator = "k1",
) -> Float[Tensor, " B"]:
    """Summed KL estimate of each response, in nats."""
    return torch.where(mask, kl_estimate(logprobs, ref_logprobs, estimator), 0.0).sum(1)


def last_true(mask: Bool[Tensor, "B S"]) -> Bool[Tensor, "B S"]:
    """True at the last true position of each row of ``mask``, and nowhere in a row without one."""
    after = mask.flip(1).cumsum(1).flip(1)
    return mask & (after == 1)


def first_after(mask: Bool[Tensor, "B S"]) -> Bool[Tensor, "B S"]:
    """True one position after the last true one of each row; nowhere in a row that has none, or whose last is S − 1."""
    return torch.nn.functional.pad(last_true(mask), (1, 0))[:, :-1]


def token_rewards(
    scores: Float[Tensor, " B"],
    logprobs: Float[Tensor, "B S"],
    ref_logprobs: Float[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    *,
    kl_coef: float,
    estimator: KLEstimator = "k1",
) -> Float[Tensor, "B S"]:
    """r_t = −kl_coef · kl_t at every chosen token, plus the response's score at the last of them.

    Ziegler et al. 2019, equation 2, per token. A row without a chosen token is paid nothing.
    """
    kl = kl_estimate(logprobs, ref_logprobs, estimator)
    return pay(scores, kl, mask, last_true(mask), kl_coef=kl_coef)


def pay(
    scores: Float[Tensor, " B"],
    kl: Float[Tensor, "B S"],
    counted: Bool[Tensor, "B S"],
    paid_at: Bool[Tensor, "B S"],
    *,
    kl_coef: float,
) -> Float[Tensor, "B S"]:
    """−kl_coef · kl where it is ``counted``, plus the row's score where it is ``paid_at``; 0 elsewhere."""
    return torch.where(counted, -kl_coef * kl, 0.0) + torch.where(paid_at, scores[:, None], 0.0)


def gae(
    rewards: Float[Tensor, "B S"],
    values: Float[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """Generalised advantage estimation and the λ-returns, (advantages, returns), both 0 outside ``mask``.

    δ_t = r_t + γV(s_{t+1}) − V(s_t);  A_t = δ_t + γλA_{t+1};  R_t = A_t + V(s_t). Schulman et al. 2016, equation 16.
    s_{t+1} is the next *chosen* token's state: positions the policy did not choose are passed over. After the last one
    V is 0, or ``bootstrap`` (B,) where a truncated row is to be continued by its estimate.
    """
    next_values = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap
    running = torch.zeros_like(next_values)
    advantages = torch.zeros_like(rewards)
    for t in reversed(range(rewards.shape[1])):
        chosen = mask[:, t]
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        running = torch.where(chosen, delta + gamma * lam * running, running)
        advantages[:, t] = torch.where(chosen, running, 0.0)
        next_values = torch.where(chosen, values[:, t], next_values)
    return advantages, torch.where(mask, advantages + values, 0.0)


def importance_ratio(
    logprobs: Float[Tensor, "*n"], old_logprobs: Float[Tensor, "*n"], clamp: float | None = None
) -> Float[Tensor, "*n"]:
    """ρ = exp(logprobs − old_logprobs), the exponent first limited to ± ``clamp``."""
    log_ratio = logprobs - old_logprobs
    return torch.exp(log_ratio if clamp is None else log_ratio.clamp(-clamp, clamp))


def policy_loss(
    logprobs: Float[Tensor, "*n"],
    old_logprobs: Float[Tensor, "*n"],
    advantages: Float[Tensor, "*n"],
    clip_range: float | tuple[float, float] = 0.2,
    *,
    dual_clip: float | None = None,
    ratio_clamp: float | None = None,
) -> Float[Tensor, "*n"]:
    """Clipped surrogate per token, −min(ρA, clip(ρ, 1 − ε, 1 + ε)A) with ρ = exp(logprobs − old_logprobs).

    Schulman et al. 2017, equation 7. The gradient is 0 where A > 0 and ρ > 1 + ε, or A < 0 and ρ < 1 − ε. A pair of
    ranges is (below, above) 1. ``dual_clip`` c > 1: where A < 0 the loss is at most −cA (Ye et al. 2020, equation 5).
    """
    losses = torch.maximum(*_surrogates(logprobs, old_logprobs, advantages, clip_range, ratio_clamp))
    if dual_clip is not None:
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    return losses


def policy_clipped(
    logprobs: Float[Tensor, "*n"],
    old_logprobs: Float[Tensor, "*n"],
    advantages: Float[Tensor, "*n"],
    clip_range: float | tuple[float, float] = 0.2,
    *,
    ratio_clamp: float | None = None,
) -> Bool[Tensor, "*n"]:
    """Where the clipped term of :func:`policy_loss` is the larger one, so that the token has no gradient."""
    plain, clipped = _surrogates(logprobs, old_logprobs, advantages, clip_range, ratio_clamp)
    return clipped > plain


def _surrogates(
    logprobs: Float[Tensor, "*n"],
    old_logprobs: Float[Tensor, "*n"],
    advantages: Float[Tensor, "*n"],
    clip_range: float | tuple[float, float],
    ratio_clamp: float | None,
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """−ρA and −clip(ρ)A, of which the policy loss is the larger."""
    below, above = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    ratio = importance_ratio(logprobs, old_logprobs, ratio_clamp)
    return -ratio * advantages, -ratio.clamp(1 - below, 1 + above) * advantages


def value_loss(
    values: Float[Tensor, "*n"],
    old_values: Float[Tensor, "*n"],
    returns: Float[Tensor, "*n"],
    clip_range: float | None = 0.2,
) -> Float[Tensor, "*n"]:
    """½ max((V − R)², (clip(V, V_old ± ε) − R)²) per token, or ½ (V − R)² where ``clip_range`` is None.

    Schulman et al. 2017, as in the authors' published code.
    """
    error = (values - returns).square()
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        error = torch.maximum(error, (clipped - returns).square())
    return error / 2


def logprobs_and_entropy(
    logits: Float[Tensor, "N V"], chosen: Tensor
) -> tuple[Float[Tensor, " N"], Float[Tensor, " N"]]:
    """log softmax(logits)[chosen] and the entropy −Σ p log p of each row, in nats. ``chosen`` is i64 (N,)."""
    logp = torch.log_softmax(logits.float(), -1)
    return logp.gather(-1, chosen[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def logprobs_of(logits: Float[Tensor, "N V"], chosen: Tensor) -> Float[Tensor, " N"]:
    """log softmax(logits)[chosen] of each row, in nats, without the distribution. ``chosen`` is i64 (N,)."""
    logits = logits.float()
    return logits.gather(-1, chosen[:, None]).squeeze(-1) - logits.logsumexp(-1)


def bradley_terry(
    chosen: Float[Tensor, "*n"], rejected: Float[Tensor, "*n"], margin: Float[Tensor, "*n"] | float = 0.0
) -> Float[Tensor, "*n"]:
    """−log σ(r_w − r_l − m) per pair. Bradley & Terry 1952; Ouyang et al. 2022, equation 1."""
    return -logsigmoid(chosen - rejected - margin)


def every_token_loss(
    chosen: Float[Tensor, "B S"],
    rejected: Float[Tensor, "B S"],
    chosen_ids: Int[Tensor, "B S"],
    rejected_ids: Int[Tensor, "B S"],
    chosen_lengths: Int[Tensor, " B"],
    rejected_lengths: Int[Tensor, " B"],
) -> Float[Tensor, " B"]:
    """The pairwise loss of the token scores at each position from where the two texts part to the end of the longer
    one, averaged over a pair's positions.

    Two texts that never part are compared at the last column alone. Yao et al. 2023 (DeepSpeed-Chat).
    """
    at = torch.arange(chosen.shape[1], device=chosen.device)
    inside, outside = at < chosen_lengths[:, None], at < rejected_lengths[:, None]
    differ = (inside != outside) | (inside & outside & (chosen_ids != rejected_ids))
    parted = differ.cumsum(1) > 0
    compared = parted & (inside | outside)
    compared = torch.where(differ.any(1, keepdim=True), compared, at == chosen.shape[1] - 1)
    losses = torch.where(compared, bradley_terry(chosen, rejected), 0.0)
    return losses.sum(1) / compared.sum(1)


def pairwise_ranking_loss(scores: Float[Tensor, " B"], preferred: Bool[Tensor, "B B"]) -> Float[Tensor, " B"]:
    """Sum over the pairs a row wins of their Bradley–Terry loss; ``preferred[i, j]`` says that row i beats row j."""
    losses = bradley_terry(scores[:, None].expand_as(preferred), scores[None, :].expand_as(preferred))
    return torch.where(preferred, losses, 0.0).sum(1)


def averaged_losers_loss(scores: Float[Tensor, " B"], preferred: Bool[Tensor, "B B"]) -> Float[Tensor, " B"]:
    """−log σ(r_w − mean_j r_lj) of every row that wins, times its number of losers; 0 for a row that beats none.

    The factor makes it weigh like :func:`pairwise_ranking_loss`, whose pairs it replaces by one.
    """
    losers = preferred.sum(1)
    mean_loser = (preferred * scores[None, :]).sum(1) / losers.clamp(min=1)
    return torch.where(losers > 0, losers * bradley_terry(scores, mean_loser), 0.0)


def ranking_accuracy(scores: Float[Tensor, " B"], preferred: Bool[Tensor, "B B"]) -> Float[Tensor, " B"]:
    """How many of the pairs a row wins are scored the right way round; a tied score counts as wrong."""
    return (preferred & (scores[:, None] > scores[None, :])).sum(1).float()


def adaptive_kl_coef(kl_coef: float, kl: float, *, target: float, horizon: float, n: int) -> float:
    """β · (1 + clip(KL/target − 1, −0.2, 0.2) · n/horizon), with n the number of responses since the last change.

    Ziegler et al. 2019, section 2.2.

    Raises:
        ValueError: target or horizon is not positive.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"adaptive KL needs a positive target and horizon, not {target} and {horizon}")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coef * (1 + error * n / horizon)


def wilson_interval(wins: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion ``wins``/``n`` (ties count half a win). Wilson 1927; (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    p, z2 = wins / n, z * z
    centre = p + z2 / (2 * n)
    half = z * ((p * (1 - p) + z2 / (4 * n)) / n) ** 0.5
    return max(0.0, (centre - half) / (1 + z2 / n)), min(1.0, (centre + half) / (1 + z2 / n))
