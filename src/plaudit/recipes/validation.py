"""Validation while PPO trains: held-out prompts, a judge of the user's choice, the best model, an early stop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from plaudit.algorithms.ppo import stream
from plaudit.config import PPOConfig, falls_due
from plaudit.data import rows as data
from plaudit.models.arrangements import whole_reward
from plaudit.recipes.common import fits
from plaudit.recipes.roles import Composed, source_of
from plaudit.tokenizer import Tokenizer


@dataclass
class Validation:
    """What was validated so far. ``measure`` judges the present model; without one nothing is ever due."""

    every: int
    patience: int
    measure: Callable[[], float] | None = None
    made: Composed | None = None
    best: float = -math.inf
    best_at: int = 0
    without_gain: int = 0

    @classmethod
    def of(cls, config: PPOConfig, made: Composed, tokenizer: Tokenizer, device: torch.device) -> Validation:
        v = config.validation
        if not v.prompts:
            return cls(v.every, v.patience)
        prompts, _ = data.prompts(v.prompts, tokenizer, max_tokens=config.max_prompt_tokens, long=config.long_prompts)
        prompts = prompts[: v.count]
        fits(made.model, prompts, config.sampling)
        # whole, so that it reads answers without the roles' features
        source = source_of(
            v.judge, tokenizer, device, whole_reward, "validation judge", attention=config.attn_implementation
        )

        def measure() -> float:
            # the same draws every time: two validations differ by the model alone
            made.engine.load(made.state.version)
            rollout = made.engine.generate(prompts, config.sampling, seed=stream(config.seed, 0, 2))
            return float(source.score(rollout).mean())

        return cls(v.every, v.patience, measure, made)

    def due(self, iteration: int, last: int) -> bool:
        """Every so many iterations, and at the last one."""
        return self.measure is not None and falls_due(iteration, self.every, last)

    @property
    def exhausted(self) -> bool:
        """Whether patience has run out."""
        return bool(self.patience) and self.without_gain >= self.patience

    def judge(self) -> float:
        """Judges the present model, and remembers whether it is the best."""
        assert self.measure is not None and self.made is not None
        score = self.measure()
        if score > self.best:
            self.best, self.best_at, self.without_gain = score, self.made.state.iteration, 0
        else:
            self.without_gain += 1
        return score

    def state(self) -> dict[str, Any]:
        return {"best": self.best, "best_at": self.best_at, "without_gain": self.without_gain}

    def load_state(self, state: dict[str, Any]) -> None:
        self.best, self.best_at, self.without_gain = state["best"], state["best_at"], state["without_gain"]

    def summary(self) -> dict[str, Any]:
        """For the run's summary; empty without validation."""
        return {"validation_best": self.best, "validation_best_at": self.best_at} if self.best_at else {}
