"""Configurations of PPO runs that take a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plaudit.config import CRITIC_FREE, PPOConfig
from plaudit.schema import build

VOWELS = "plaudit.rewards.function:vowels"


def config(out: Path, **keys: Any) -> PPOConfig:
    """Two short iterations on the tiny model; keys are dotted, ``a.b`` as ``a__b``."""
    data: dict[str, Any] = {
        "out": str(out),
        "model": "tiny",
        "reward": VOWELS,
        "prompts": "tiny/prompts",
        "iterations": 2,
        "batch_size": 8,
        "minibatches": 2,
        "sampling": {"max_new_tokens": 6},
        "arrangement": {"blocks": 1},
        "actor": {"learning_rate": 1e-3},
        "critic": {"learning_rate": 1e-3},
    }
    for key, value in keys.items():
        section = data
        *path, last = key.split("__")
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    kind = data["arrangement"].get("kind", "frozen_trunk")
    if kind != "frozen_trunk":
        del data["arrangement"]["blocks"]
    if kind == "shared_trunk" or data.get("estimator") in CRITIC_FREE:
        del data["critic"]
    return build(PPOConfig, data)
