"""Assign credit: from what the roles made of a rollout to the advantages and returns of an update.

Where systems disagree the conventions decide (see conventions); which estimator is asked for decides the rest. The
critic-free ones (REINFORCE with a baseline, RLOO, GRPO, REINFORCE++) are here because they differ in this step alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from plaudit import ops
from plaudit.config import GROUPED, PPOConfig
from plaudit.conventions import Credit, Estimate, Positions, credit, token_rewards
from plaudit.errors import PlauditError
from plaudit.types import Rollout

#: (rewards, rollout) -> token rewards
TokenRewards = Callable[[Tensor, Rollout], Tensor]


@dataclass(frozen=True)
class Facts:
    """What credit is assigned from: scores f32 (B,) after every penalty; what a dense reward has paid already f32 (B,)
    and where f32 (B, S), both 0 without one; per-token KL and values f32 (B, S); V after a truncated row f32 (B,)."""

    scores: Float[Tensor, " B"]
    dense: Float[Tensor, "B S"]
    kl: Float[Tensor, "B S"]
    values: Float[Tensor, "B S"]
    bootstrap: Float[Tensor, " B"]


def assign(
    cfg: PPOConfig,
    facts: Facts,
    rollout: Rollout,
    rows: Positions,
    kl_coef: float,
    own_rewards: TokenRewards | None = None,
    own_advantages: Estimate | None = None,
) -> Credit:
    """Token rewards, advantages and returns of a rollout.

    ``kl_coef`` is what KL costs in the reward. Returns are 0 where no critic learns them.

    Raises:
        PlauditError: the user's own function returned something of another shape, or not finite.
    """
    c = cfg.conventions
    # what a dense reward has paid on the way is not paid again at the end
    at_end = facts.scores - facts.dense.sum(1)
    rewards = token_rewards(c, at_end, facts.kl, rows, kl_coef) + facts.dense
    if own_rewards is not None:
        rewards = checked(own_rewards(rewards, rollout), rewards, cfg.functions.token_rewards)

    def estimate(rewards: Tensor, values: Tensor, over: Tensor) -> tuple[Tensor, Tensor]:
        if own_advantages is not None:
            made = own_advantages(rewards, values, over)
            if not isinstance(made, tuple) or len(made) != 2:
                raise PlauditError(f"{cfg.functions.advantages}: returns no pair; return (advantages, returns)")
            advantages, returns = (checked(x, rewards, cfg.functions.advantages) for x in made)
        else:
            advantages, returns = _estimate(cfg, rewards, values, over, facts.bootstrap)
        if cfg.value_target == "discounted_sum":
            returns = ops.discounted_sums(rewards, over, gamma=cfg.gamma, bootstrap=facts.bootstrap)
        return advantages, returns

    return credit(
        c,
        rewards,
        facts.values,
        rows,
        estimate,
        whiten_rewards=cfg.whiten_rewards,
        # a comparison within a group is on a scale of its own; whitening would mix the groups
        whiten_advantages=cfg.estimator not in GROUPED,
    )


def _estimate(
    cfg: PPOConfig, rewards: Tensor, values: Tensor, mask: Tensor, bootstrap: Tensor
) -> tuple[Tensor, Tensor]:
    match cfg.estimator:
        case "gae":
            return ops.gae(rewards, values, mask, gamma=cfg.gamma, lam=cfg.lam, bootstrap=bootstrap)
        case "n_step":
            return ops.n_step(rewards, values, mask, n=cfg.n_steps, gamma=cfg.gamma, bootstrap=bootstrap)
        case "reinforce":
            # Williams 1992: what came after each token, less the batch's mean of it
            sums = ops.discounted_sums(rewards, mask, gamma=cfg.gamma)
            return torch.where(mask, sums - ops.masked_mean(sums, mask), 0.0), torch.zeros_like(sums)
        case "reinforce++":
            # Hu 2025: no baseline but the global whitening that follows
            return ops.discounted_sums(rewards, mask, gamma=cfg.gamma), torch.zeros_like(rewards)
    # an answer as one action: every token bears the whole answer's comparison with its group
    total = ops.masked_sum(rewards, mask)
    compare = ops.leave_one_out if cfg.estimator == "rloo" else ops.group_normalised
    per_answer = compare(total, cfg.samples_per_prompt)
    return torch.where(mask, per_answer[:, None], 0.0), torch.zeros_like(rewards)


def checked(made: Any, like: Tensor, who: str) -> Tensor:
    """What a user's function returned, if it is a finite tensor of the shape of ``like``.

    Raises:
        PlauditError: otherwise, naming the function.
    """
    if not isinstance(made, Tensor) or made.shape != like.shape:
        shape = tuple(made.shape) if isinstance(made, Tensor) else type(made).__name__
        raise PlauditError(f"{who}: returned {shape}; return a tensor of {tuple(like.shape)}")
    if not torch.isfinite(made).all():
        row = int((~torch.isfinite(made)).any(1).nonzero()[0])
        raise PlauditError(f"{who}: returned a value that is not finite, at row {row}")
    return cast(Tensor, made)
