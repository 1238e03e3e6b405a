"""Plaudit's side of the PPO benchmarks: one iteration for every line read; see against_trl.py."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from prompts import EPOCHS, PROMPTS, SHAPES, openings, unread

from plaudit.algorithms.ppo import ppo_iteration
from plaudit.config import PPOConfig
from plaudit.device import peak_rss_mib, release_memory
from plaudit.models.load import load_language_model, new_reward_model, save_reward_model
from plaudit.models.network import scalar_head
from plaudit.recipes.roles import compose
from plaudit.schema import build
from plaudit.types import Prompt

#: an iteration's tokens in one pass, as TRL has them with its defaults
MICRO_BATCH = 1024


def reward_folder(model: str, folder: Path) -> Path:
    """A reward model of the policy's size, with a random head."""
    _, tokenizer = load_language_model(model)
    made = new_reward_model(model, tokenizer)
    generator = torch.Generator().manual_seed(0)
    head = scalar_head(torch.randn(1, made.config.hidden_size, generator=generator) / 100)
    save_reward_model(made, head, tokenizer, folder, mean=0.0, deviation=1.0)
    return folder


def configuration(
    arrangement: str, shape: str, model: str, reward: Path, count: int, precision: str, recompute: bool
) -> PPOConfig:
    """What TRL's defaults are, in our words: four epochs of one minibatch, β 0.05, no penalty."""
    learning = {"micro_batch_tokens": MICRO_BATCH, "gradient_checkpointing": recompute}
    return build(
        PPOConfig,
        {
            "model": model,
            "reward": str(reward),
            "batch_size": count,
            "epochs": EPOCHS,
            "minibatches": 1,
            "actor": learning,
            "critic": learning,
            "iterations": 1000,
            "truncation_penalty": 0.0,
            "kl": {"coef": 0.05},
            "sampling": {
                "temperature": 0.7,
                "max_new_tokens": SHAPES[shape][0],
                "fixed_length": shape == "fixed",
            },
            "arrangement": {"kind": arrangement, "precision": precision},
            "engine": {"weights": precision},
        },
    )


class Side:
    def __init__(
        self,
        arrangement: str,
        shape: str,
        count: int,
        *,
        precision: str,
        end: int | None = None,
        model: str = "smollm2",
        device: torch.device | str = "cpu",
        recompute: bool = False,
        readable: bool = True,
    ):
        with tempfile.TemporaryDirectory() as folder:
            reward = reward_folder(model, Path(folder, "reward"))
            self.config = configuration(arrangement, shape, model, reward, count, precision, recompute)
            loaded, tokenizer = load_language_model(model)
            if end is not None:
                tokenizer.end_ids = (end,)
            self.asked = openings(tokenizer, count, shape) if readable else unread(count, shape)
            device = torch.device(device)
            self.made = compose(self.config, loaded.to(device), tokenizer, device)

    def iterate(self, number: int) -> dict[str, float]:
        asked = [Prompt("", tuple(ids)) for ids in self.asked(number)]
        started = time.perf_counter()
        done = ppo_iteration(self.config, self.made.roles, self.made.state, asked)
        release_memory()
        seconds = time.perf_counter() - started
        # on a GPU products of other shapes round otherwise
        assert done.metrics["first_log_ratio_max"] < (1e-4 if self.made.roles.clock.device.type == "cpu" else 1e-2)
        return {
            "seconds": seconds,
            "tokens": int(done.rollout.mask.sum()),
            "updates": done.metrics["updates"],
            "first_log_ratio": done.metrics["first_log_ratio_max"],
            "peak_mib": peak_rss_mib(),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("arrangement")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--end", type=int, help="the token that ends an answer")
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help="an iteration")
    args = parser.parse_args()
    side = Side(args.arrangement, args.shape, args.prompts, precision=args.precision, end=args.end)
    for line in sys.stdin:
        print(json.dumps(side.iterate(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
