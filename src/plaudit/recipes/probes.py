"""A few fixed prompts, answered by the policy as it changes, always with the same draws; the first time by the policy
that training starts from, which is the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from plaudit.algorithms.ppo import stream
from plaudit.config import PPOConfig, falls_due
from plaudit.recipes.roles import Composed
from plaudit.runs import Run
from plaudit.tokenizer import Tokenizer
from plaudit.types import Prompt


@dataclass(frozen=True)
class Probes:
    config: PPOConfig
    made: Composed
    tokenizer: Tokenizer
    prompts: Sequence[Prompt]

    @classmethod
    def of(cls, config: PPOConfig, made: Composed, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> Probes:
        return cls(config, made, tokenizer, prompts[: config.probe.prompts])

    def due(self, iteration: int) -> bool:
        """Before the first iteration (0), every so many, and after the last one of the configuration."""
        return bool(self.prompts) and falls_due(iteration, self.config.probe.every, self.config.iterations)

    def look(self, run: Run) -> None:
        """Where it is time: the answers that the policy gives now, into the run's probes."""
        iteration = self.made.state.iteration
        if self.due(iteration):
            with self.made.roles.clock("probe"):
                run.jsonl.log_probes(iteration, self.answers())

    def answers(self) -> list[dict[str, Any]]:
        """The prompts with what the policy that samples says to them now."""
        self.made.settle()
        seed = stream(self.config.seed, 0, 3)
        rollout = self.made.engine.generate(self.prompts, self.config.sampling, seed=seed)
        texts = self.tokenizer.responses(rollout)
        return [{"prompt": p.text, "response": text} for p, text in zip(self.prompts, texts, strict=True)]
