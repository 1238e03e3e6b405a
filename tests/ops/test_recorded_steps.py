"""Whole PPO steps as public systems' own code computed them, where their conventions are among this module's switches.

Left out: cases whose numbers come from a choice the functions do not offer (clamps that are reached, dual clip, reward
whitening, the score or the value at another index, other reductions).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plaudit import ops
from plaudit.types import mean_weights

STEPS = Path(__file__).parents[3] / "shared" / "vectors" / "ppo_steps.json"
#: system -> whether its advantage whitening divides by N − 1
UNBIASED = {"openrlhf": False, "trl-0.7": True, "verl": True}
Case = dict[str, Any]


def columns(case: Case) -> dict[str, Tensor]:
    made = {name: torch.tensor(value, dtype=torch.float64) for name, value in case["inputs"].items()}
    width = made["logprobs"].shape[1]
    lengths = torch.tensor(case["response_lengths"])
    return made | {"mask": torch.arange(width)[None, :] < lengths[:, None]}


def expressible(case: Case) -> bool:
    """Whether no choice that these functions lack has touched the numbers."""
    hyper, c = case["hyper"], columns(case)
    if case["system"] not in UNBIASED or hyper.get("whiten_rewards"):
        return False
    if hyper.get("policy_loss_reduction", "token-mean") != "token-mean":
        return False
    log_ratio = (c["new_logprobs"] - c["logprobs"])[c["mask"]]
    gap = (c["logprobs"] - c["ref_logprobs"])[c["mask"]]
    k3 = torch.expm1(-gap) + gap
    reached = [c["scores"].abs().max() > (hyper.get("reward_clip") or 1e9), log_ratio.abs().max() > 2]
    reached.append(max(gap.abs().max(), k3.max()) > (hyper.get("kl_clamp") or 10))
    return not any(map(bool, reached)) and not (hyper.get("dual_clip") and log_ratio.max() > 1)


def recorded() -> list[Any]:
    if not STEPS.exists():
        return [pytest.param(None, marks=pytest.mark.skip(reason="the recorded numbers are not here"))]
    cases = [case for case in json.loads(STEPS.read_text()) if expressible(case)]
    assert {case["system"] for case in cases} == set(UNBIASED)
    return [pytest.param(case, id=f"{case['system']}-{i}") for i, case in enumerate(cases)]


@pytest.mark.parametrize("case", recorded())
def test_a_whole_step_gives_the_recorded_numbers(case: Case):
    c, hyper, expected = columns(case), case["hyper"], case["expected"]
    mask = c["mask"]
    rewards = ops.token_rewards(
        c["scores"], c["logprobs"], c["ref_logprobs"], mask,
        kl_coef=hyper["kl_coef"], estimator=hyper["kl_estimator"],
    )  # fmt: skip
    advantages, returns = ops.gae(rewards, c["values"], mask, gamma=hyper["gamma"], lam=hyper["lam"])
    advantages = ops.whiten(advantages, mask, unbiased=UNBIASED[case["system"]])
    weights = mean_weights(mask).double()
    policy = ops.policy_loss(c["new_logprobs"], c["logprobs"], advantages, hyper["clip"])
    value = ops.value_loss(c["new_values"], c["values"], returns, hyper["value_clip"])
    clipped = ops.policy_clipped(c["new_logprobs"], c["logprobs"], advantages, hyper["clip"])
    ours = {
        "token_rewards": rewards,
        "advantages": advantages,
        "returns": returns,
        "policy_loss": (policy * weights).sum(),
        "value_loss": (value * weights).sum(),
        "weighted_value_loss": (value * weights).sum() * hyper.get("vf_coef", 1.0),
        "policy_clip_fraction": (clipped * weights).sum(),
    }
    tolerance = 1e-5 if "float32" in case["source"] else 1e-6
    for name, mine in ours.items():
        if expected.get(name) is not None:
            theirs = torch.tensor(expected[name], dtype=torch.float64)
            assert torch.allclose(mine, theirs, atol=tolerance, rtol=tolerance), name
