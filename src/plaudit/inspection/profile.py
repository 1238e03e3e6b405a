"""Where an iteration's time goes: seconds and tokens a second by phase, and the share of what products alone could do.

The limit is the rate of a float32 matrix product of the model's width, measured on the spot; a phase's share of it is
the floating point operations of its linear layers over its seconds. Products in a lower precision may exceed 1.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import nn

from plaudit.device import Clock
from plaudit.types import Rollout


def linear_weights(*modules: nn.Module | None) -> int:
    """How many weights the linear layers of these modules have; a layer that stands in several counts each time."""
    layers = (m for module in modules if module is not None for m in module.modules() if isinstance(m, nn.Linear))
    return sum(layer.weight.numel() for layer in layers)


@dataclass(frozen=True)
class Sizes:
    """Weights in linear layers: of the whole policy's blocks and output layer, and of what each role runs itself."""

    blocks: int
    head: int
    actor: int
    reference: int
    critic: int
    reward: int


def products_rate(width: int, device: torch.device) -> float:
    """Floating point operations a second of a float32 product (512, width) @ (width, 4 · width), median of ten."""
    x, w = torch.randn(512, width, device=device), torch.randn(4 * width, width, device=device)
    clock, taken = Clock(device), []
    for _ in range(12):
        clock.reset()
        with clock("product"):
            nn.functional.linear(x, w)
        taken.append(clock.seconds["product"])
    return 2 * x.numel() * 4 * width / statistics.median(taken[2:])


def profile(clock: Clock, sizes: Sizes, rollout: Rollout, epochs: int, rate: float) -> dict[str, float]:
    """Metrics of one iteration: ``tokens_per_second/…`` and ``share_of_limit/…`` of each phase.

    Tokens are the answers' own. ``rate``: floating point operations a second (see :func:`products_rate`).
    """
    answers, positions = int(rollout.mask.sum()), int(rollout.lengths.sum())
    forward = {
        "generate": sizes.blocks * positions + sizes.head * answers,
        "read": (sizes.actor + sizes.reference + sizes.critic) * positions + 2 * sizes.head * answers,
        "judge": sizes.reward * positions,
        # forward, and twice as much backward
        "improve": 3 * epochs * ((sizes.actor + sizes.critic) * positions + sizes.head * answers),
    }
    made: dict[str, float] = {}
    for phase, seconds in clock.seconds.items():
        if phase in forward and seconds:
            made[f"tokens_per_second/{phase}"] = answers / seconds
            made[f"share_of_limit/{phase}"] = 2 * forward[phase] / seconds / rate
    return made
