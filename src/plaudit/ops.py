"""The mathematics of RLHF as pure functions on tensors.

Per-token tensors are f32 (B, S) and speak of the choice of token s; ``mask`` bool (B, S) is true where the policy
chose it. Losses come back per token (or per row); a mean is a matter of weights and is taken by the learner. Nothing
here knows of models, configuration or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import logsigmoid

KLEstimator = Literal["k1", "k2", "k3", "abs", "full"]
Reduction = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]


def masked_mean(x: Float[Tensor, ...], mask: Bool[Tensor, ...]) -> Float[Tensor, ""]:
    """Mean of ``x`` over the true positions of ``mask``; 0 where there is none."""
    return torch.where(mask, x, 0.0).sum() / mask.sum().clamp(min=1)


def mean_weights(
    mask: Bool[Tensor, "B S"], reduction: Reduction = "token-mean", dtype: torch.dtype = torch.float32
) -> Float[Tensor, "B S"]:
    """The matrix that turns a sum of per-token losses into their mean; 0 outside ``mask``.

    ``token-mean`` weighs all true positions alike: the weights sum to 1 (to 0 where there is none).
    ``seq-mean-token-sum`` and ``seq-mean-token-mean`` take the mean over rows of each row's sum, or mean.

    Raises:
        ValueError: the reduction has no such name.
    """
    chosen = mask.to(dtype)
    match reduction:
        case "token-mean":
            return chosen / mask.sum().clamp(min=1)
        case "seq-mean-token-sum":
            return chosen / max(1, len(mask))
        case "seq-mean-token-mean":
            return chosen / mask.sum(1, keepdim=True).clamp(min=1) / max(1, len(mask))
    raise ValueError(f"unknown reduction {reduction!r}: token-mean, seq-mean-token-sum or seq-mean-token-mean")


def whitening(
    x: Float[Tensor, ...], mask: Bool[Tensor, ...], *, unbiased: bool = False, eps: float = 1e-8, floor: bool = False
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The mean over the true positions, and the factor that :func:`whiten` multiplies by: one over the deviation."""
    mean = masked_mean(x, mask)
    squares = torch.where(mask, torch.where(mask, x, 0.0) - mean, 0.0).square().sum()
    variance = squares / (mask.sum() - int(unbiased)).clamp(min=1)
    return mean, (variance.clamp(min=eps) if floor else variance + eps).rsqrt()


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
    mean, factor = whitening(x, mask, unbiased=unbiased, eps=eps, floor=floor)
    scaled = (torch.where(mask, x, 0.0) - mean) * factor
    if keep_mean:
        scaled = scaled + mean
    return torch.where(mask, scaled, 0.0) if reset else scaled


@dataclass(frozen=True)
class Moments:
    """Count, mean and summed squared deviation of all that was seen so far."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    def merged(self, x: Float[Tensor, " B"]) -> Moments:
        """With ``x`` seen too. Chan, Golub & LeVeque 1979."""
        x = x.double()
        n, mean = len(x), float(x.mean())
        count = self.count + n
        shift = mean - self.mean
        squares = self.squares + float((x - mean).square().sum()) + shift**2 * self.count * n / count
        return Moments(count, self.mean + shift * n / count, squares)

    def normalise(self, x: Float[Tensor, " B"], eps: float = 1e-8) -> Float[Tensor, " B"]:
        """(x − mean) / √(variance + eps), by the biased variance."""
        deviation: float = (self.squares / max(1.0, self.count) + eps) ** 0.5
        return (x - self.mean) / deviation

    def tensor(self) -> Float[Tensor, " 3"]:
        return torch.tensor([self.count, self.mean, self.squares], dtype=torch.float64)


def kl_estimate(
    logprobs: Float[Tensor, "*n"], ref_logprobs: Float[Tensor, "*n"], estimator: KLEstimator = "k1"
) -> Float[Tensor, "*n"]:
    """Per-token estimate of KL(pi ‖ pi_ref) from the sampled token, d = logprobs − ref_logprobs, in nats.

    k1 = d (unbiased, may be negative), k2 = d²/2, k3 = e^(−d) − 1 + d (unbiased, never negative), abs = |d|.
    Schulman 2020, "Approximating KL divergence". The exact sum (``full``) needs both distributions: :func:`full_kl`.

    Raises:
        ValueError: the estimator has no such name, or is no function of the sampled token.
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
    raise ValueError(f"no KL estimator of the sampled token: {estimator!r}; one of k1, k2, k3, abs")


def full_kl(logits: Float[Tensor, "N V"], ref_logits: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """KL(pi ‖ pi_ref) of each row, the exact sum over the vocabulary, in nats. A token of probability 0 adds 0."""
    logp, ref_logp = torch.log_softmax(logits.float(), -1), torch.log_softmax(ref_logits.float(), -1)
    # two tokens that can be drawn by neither differ by −inf − (−inf); their share of the sum is 0
    return (logp.exp() * (logp - ref_logp).masked_fill(logp.isneginf(), 0.0)).sum(-1)


def kl_loss(
    logprobs: Float[Tensor, "*n"],
    old_logprobs: Float[Tensor, "*n"],
    ref_logprobs: Float[Tensor, "*n"],
    estimator: KLEstimator = "k1",
) -> Float[Tensor, "*n"]:
    """A per-token KL term to be added to a loss: the value of ``estimator``, the gradient of the KL itself.

    ∇KL(pi ‖ pi_ref) = E_pi[d ∇log pi] with d = log pi − log pi_ref (the score-function identity), and under the
    sampling policy each token weighs by ρ = pi / pi_old. Differentiating an estimator instead is wrong for most of
    them: k1 gives ∇log pi, whose mean is 0, and k3 the gradient of the reverse KL.
    """
    return kl_estimate(logprobs.detach(), ref_logprobs, estimator) + kl_slope(logprobs, old_logprobs, ref_logprobs)


def kl_slope(
    logprobs: Float[Tensor, "*n"], old_logprobs: Float[Tensor, "*n"], ref_logprobs: Float[Tensor, "*n"]
) -> Float[Tensor, "*n"]:
    """A term of value 0 whose gradient is that of the KL: what turns any value into :func:`kl_loss`."""
    now = logprobs.detach()
    return torch.exp(now - old_logprobs) * (now - ref_logprobs) * (logprobs - now)


def sequence_kl(
    logprobs: Float[Tensor, "B S"],
    ref_logprobs: Float[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    estimator: KLEstimator = "k1",
) -> Float[Tensor, " B"]:
    """Summed KL estimate of each response, in nats."""
    return masked_sum(kl_estimate(logprobs, ref_logprobs, estimator), mask)


def masked_sum(x: Float[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> Float[Tensor, " B"]:
    """Each row's sum over the true positions of ``mask``."""
    return torch.where(mask, x, 0.0).sum(1)


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


def n_step(
    rewards: Float[Tensor, "B S"],
    values: Float[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    *,
    n: int,
    gamma: float = 1.0,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> tuple[Float[Tensor, "B S"], Float[Tensor, "B S"]]:
    """n-step advantages and returns, (advantages, returns), both 0 outside ``mask``.

    R_t = Σ_{i<n} γ^i r_{t+i} + γ^n V(s_{t+n});  A_t = R_t − V(s_t). A response with fewer than n tokens left is summed
    to its end, and ``bootstrap`` (B,) stands for V after it (0 where it is None), as in :func:`gae`. n = 1 is GAE with
    λ = 0; n at least the response's length is λ = 1. Sutton & Barto 2018, equation 7.1.

    Raises:
        ValueError: n is not positive.
    """
    if n < 1:
        raise ValueError(f"n-step advantages need n of at least 1, not {n}")
    n = min(n, rewards.shape[1])
    # The chosen positions of each row move to its front, so that t + n is n chosen tokens on, and back at the end.
    order = torch.argsort((~mask).int(), dim=1, stable=True)
    chosen = mask.gather(1, order)
    r = torch.where(chosen, rewards.gather(1, order), 0.0)
    v = torch.where(chosen, values.gather(1, order), 0.0)
    if bootstrap is not None:
        r = r + torch.where(last_true(chosen), gamma * bootstrap[:, None], 0.0)
    width = r.shape[1]
    padded = torch.nn.functional.pad(r, (0, n))
    total = torch.zeros_like(r)
    for i in reversed(range(n)):
        total = padded[:, i : i + width] + gamma * total
    total = total + gamma**n * torch.nn.functional.pad(v, (0, n))[:, n : n + width]
    returns = torch.zeros_like(rewards).scatter(1, order, torch.where(chosen, total, 0.0))
    return torch.where(mask, returns - values, 0.0), returns


def discounted_sums(
    rewards: Float[Tensor, "B S"],
    mask: Bool[Tensor, "B S"],
    *,
    gamma: float = 1.0,
    bootstrap: Float[Tensor, " B"] | None = None,
) -> Float[Tensor, "B S"]:
    """Σ_{i≥0} γ^i r_{t+i} over the chosen tokens from t on, continued by ``bootstrap`` (B,); 0 outside ``mask``."""
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, lam=1.0, bootstrap=bootstrap)[1]


def _groups(scores: Float[Tensor, " B"], size: int) -> Float[Tensor, "G K"]:
    if size < 2 or len(scores) % size:
        raise ValueError(f"groups of {size} need 2 answers each or more, and whole groups, not {len(scores)} rows")
    return scores.view(-1, size)


def leave_one_out(scores: Float[Tensor, " B"], group_size: int) -> Float[Tensor, " B"]:
    """Each score minus the mean of the others in its group of ``group_size`` adjacent rows. Kool et al. 2019 (RLOO).

    Raises:
        ValueError: groups of one, or rows that do not make whole groups.
    """
    groups = _groups(scores, group_size)
    others = (groups.sum(1, keepdim=True) - groups) / (group_size - 1)
    return (groups - others).flatten()


def group_normalised(scores: Float[Tensor, " B"], group_size: int, eps: float = 1e-8) -> Float[Tensor, " B"]:
    """(score − mean) / √(variance + eps) within each group of adjacent rows, variance by N − 1; 0 where all are equal.

    Shao et al. 2024 (GRPO), section 4.1.

    Raises:
        ValueError: as for :func:`leave_one_out`.
    """
    groups = _groups(scores, group_size)
    centred = groups - groups.mean(1, keepdim=True)
    # equal scores may differ from their own mean by rounding, which the division would blow up
    centred = torch.where(equal_groups(scores, group_size)[:, None], 0.0, centred)
    return (centred * (groups.var(1, keepdim=True) + eps).rsqrt()).flatten()


def equal_groups(scores: Float[Tensor, " B"], group_size: int) -> Bool[Tensor, " G"]:
    """Which groups of adjacent rows have one score throughout, and so teach nothing."""
    groups = _groups(scores, group_size)
    return (groups == groups[:, :1]).all(1)


def dense_rewards(prefix_scores: Float[Tensor, "B S"], mask: Bool[Tensor, "B S"]) -> Float[Tensor, "B S"]:
    """r(t): what each chosen token changes in the score of the prefix that it ends; 0 outside ``mask``.

    ``prefix_scores[b, s]`` is the score of the row up to and with token s. The first token is paid its prefix's whole
    score, so that a row's rewards sum to the score of its last prefix.
    """
    at = torch.where(mask, torch.arange(mask.shape[1], device=mask.device), -1)
    before = torch.nn.functional.pad(at.cummax(1).values, (1, 0), value=-1)[:, :-1]
    previous = torch.where(before >= 0, prefix_scores.gather(1, before.clamp(min=0)), 0.0)
    return torch.where(mask, prefix_scores - previous, 0.0)


def penalise(
    scores: Float[Tensor, " B"],
    terminated: Bool[Tensor, " B"],
    lengths: Int[Tensor, " B"],
    *,
    truncation: Literal["subtract", "replace"] = "subtract",
    truncation_penalty: float = 0.0,
    length_penalty: float = 0.0,
) -> Float[Tensor, " B"]:
    """Scores after the price of being cut and of length.

    ``truncation``: of an answer that did not end itself, ``truncation_penalty`` is taken off (``subtract``), or the
    score becomes −``truncation_penalty`` (``replace``). ``length_penalty`` is taken off for each of the ``lengths``
    tokens.
    """
    cut = scores - truncation_penalty if truncation == "subtract" else torch.full_like(scores, -truncation_penalty)
    return torch.where(terminated, scores, cut) - length_penalty * lengths


def truncated_importance(
    logprobs: Float[Tensor, "*n"], engine_logprobs: Float[Tensor, "*n"], cap: float
) -> Float[Tensor, "*n"]:
    """min(cap, π_trainer / π_engine) of the sampled token: corrects for an engine whose numbers differ a little.

    Ionides 2008, truncated importance sampling; both are taken under the version that sampled.
    """
    return torch.exp(logprobs - engine_logprobs).clamp(max=cap)


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
    chosen: Float[Tensor, "*n"],
    rejected: Float[Tensor, "*n"],
    margin: Float[Tensor, "*n"] | float = 0.0,
    target: Float[Tensor, "*n"] | float = 1.0,
) -> Float[Tensor, "*n"]:
    """−t log σ(d) − (1 − t) log σ(−d) per pair, d = r_w − r_l − m.

    ``target`` t is the probability that the chosen one is the better: 1 where people are sure, ½ a tie, 1 − ε under
    label smoothing. Bradley & Terry 1952; Ouyang et al. 2022, equation 1.
    """
    d = chosen - rejected - margin
    if isinstance(target, float) and target == 1.0:
        return -logsigmoid(d)
    return -target * logsigmoid(d) - (1 - target) * logsigmoid(-d)


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


def pairwise_ranking_loss(
    scores: Float[Tensor, " B"],
    pairs: Bool[Tensor, "B B"],
    margin: Float[Tensor, "B B"] | float = 0.0,
    target: Float[Tensor, "B B"] | float = 1.0,
) -> Float[Tensor, " B"]:
    """Sum over a row's pairs of their Bradley–Terry loss; ``pairs[i, j]`` says that row i stands against row j."""
    losses = bradley_terry(scores[:, None].expand_as(pairs), scores[None, :].expand_as(pairs), margin, target)
    return torch.where(pairs, losses, 0.0).sum(1)


def averaged_losers_loss(scores: Float[Tensor, " B"], preferred: Bool[Tensor, "B B"]) -> Float[Tensor, " B"]:
    """−log σ(r_w − mean_j r_lj) of every row that wins; 0 for a row that beats none. ``preferred[i, j]``: i beats j."""
    losers = preferred.sum(1)
    mean_loser = (preferred * scores[None, :]).sum(1) / losers.clamp(min=1)
    return torch.where(losers > 0, bradley_terry(scores, mean_loser), 0.0)


def plackett_luce_loss(
    scores: Float[Tensor, " B"], preferred: Bool[Tensor, "B B"], rivals: Bool[Tensor, "B B"]
) -> Float[Tensor, " B"]:
    """−log of the probability that a row is drawn first from itself and its ``rivals``; 0 for a row that beats none.

    With the rows placed no better as rivals this is Plackett–Luce: the sum over a ranking is its −log-likelihood,
    places drawn one after the other. With all rows of the comparison as rivals it is the softmax of one pick. Plackett
    1975; Luce 1959.
    """
    among = rivals | torch.eye(len(scores), dtype=torch.bool, device=scores.device)
    total = torch.where(among, scores[None, :], -torch.inf).logsumexp(1)
    return torch.where(preferred.any(1), total - scores, 0.0)


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
