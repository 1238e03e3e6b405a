"""TRL's side of the PPO benchmarks, in an environment of its own: one iteration for every line read.

Everything but sizes, the end token and the precision is TRL's default. Its trainer runs its own loop; a callback holds
it at the end of every iteration until the next line comes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time

import torch
from datasets import Dataset
from prompts import EPOCHS, PROMPTS, SHAPES
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

# TRL reads this when it is imported
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # noqa: E402


class Served(TrainerCallback):
    """Holds the loop until it is asked for an iteration, and says how long that took."""

    def __init__(self) -> None:
        self.started = 0.0
        self.tokens = 0

    def wait(self) -> None:
        if not sys.stdin.readline():
            os._exit(0)
        self.started = time.perf_counter()

    def on_train_begin(self, args, state, control, **kwargs):
        self.wait()

    def on_step_end(self, args, state, control, **kwargs):
        seconds = time.perf_counter() - self.started
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        said = {"seconds": seconds, "tokens": self.tokens, "updates": EPOCHS, "peak_mib": peak}
        print("\n" + json.dumps(said), flush=True)
        self.wait()


def main() -> None:
    folder, shape, end_id, precision, prompts = sys.argv[1:]
    end = int(end_id) if end_id else None
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token_id = 0
    tokenizer.padding_side = "left"
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    value, reward = (
        AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32, num_labels=1) for _ in range(2)
    )
    with open(prompts) as file:
        rows = json.load(file)
    served = Served()
    real = ppo_trainer.selective_log_softmax

    def counting(logits, response):
        if not torch.is_grad_enabled():
            served.tokens = int((response != tokenizer.pad_token_id).sum())
        return real(logits, response)

    ppo_trainer.selective_log_softmax = counting
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=PROMPTS,
        num_mini_batches=1,
        num_ppo_epochs=EPOCHS,
        total_episodes=len(rows),
        response_length=SHAPES[shape][0],
        stop_token_id=end,
        num_sample_generations=0,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=precision == "bfloat16",
        disable_tqdm=True,
    )
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        eval_dataset=Dataset.from_dict({"input_ids": rows[:PROMPTS]}),
        callbacks=[served],
    )
    trainer.train()


if __name__ == "__main__":
    main()
