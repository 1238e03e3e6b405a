"""Engines that answer prompts."""

from plaudit.rollout.engine import RolloutEngine, SamplingConfig

__all__ = ["RolloutEngine", "SamplingConfig"]
