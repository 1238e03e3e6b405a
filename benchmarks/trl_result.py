"""TRL's side of time_to_result.py: trains from an SFT and a reward model and keeps the policy every so often.

Reads its task from a file of JSON, and writes a line for every policy that it keeps: the folder, and the seconds of
training until then (keeping is not counted).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)

# TRL reads this when it is imported
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.ppo import PPOConfig, PPOTrainer  # noqa: E402


class Keeps(TrainerCallback):
    """Keeps the policy whenever an interval of training has passed, and ends the process at the cap."""

    def __init__(self, out: str, interval: float, cap: float):
        self.out, self.interval, self.cap = out, interval, cap
        self.paused = self.kept = 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.begun = time.perf_counter()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        stopped = time.perf_counter()
        seconds = stopped - self.begun - self.paused
        if seconds - self.kept >= self.interval or seconds >= self.cap:
            self.kept = seconds
            folder = f"{self.out}/step-{state.global_step}"
            model.policy.save_pretrained(folder)
            print("\n" + json.dumps({"folder": folder, "seconds": seconds, "iteration": state.global_step}), flush=True)
            if seconds >= self.cap:
                os._exit(0)
        self.paused += time.perf_counter() - stopped


def scoring(folder: str, end: int | None = None) -> nn.Module:
    """The reward model with its normalised score: the shift that its configuration keeps becomes the head's bias.

    TRL reads a score at the end token. The reward model was trained to be read at the last token of the text, as
    Plaudit reads it; so that both are judged by the same numbers, the state at ``end`` is that of the token before.
    """
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    head = nn.Linear(model.config.hidden_size, 1)
    with torch.no_grad():
        head.weight.copy_(model.score.weight)
        head.bias.fill_(-getattr(model.config, "score_shift", 0.0))
    model.score = head

    def as_before(_backbone: nn.Module, _args: tuple, given: dict, output: Any) -> Any:
        *below, last = output.hidden_states
        before = torch.roll(last, 1, dims=1)
        output.hidden_states = (*below, torch.where((given["input_ids"] == end)[:, :, None], before, last))
        return output

    if end is not None:
        getattr(model, model.base_model_prefix).register_forward_hook(as_before, with_kwargs=True)
    return model


def main() -> None:
    with open(sys.argv[1]) as file:
        task = json.load(file)
    tokenizer = AutoTokenizer.from_pretrained(task["sft"])
    tokenizer.pad_token_id, tokenizer.eos_token_id = task["pad"], task["end"]
    tokenizer.padding_side = "left"
    torch.manual_seed(task["seed"])
    policy, reference = (AutoModelForCausalLM.from_pretrained(task["sft"], dtype=torch.float32) for _ in range(2))
    episodes = 10_000 * task["batch_size"]
    config = PPOConfig(
        output_dir=tempfile.mkdtemp(),
        learning_rate=task["learning_rate"],
        lr_scheduler_type="constant",
        per_device_train_batch_size=task["batch_size"] // task["minibatches"],
        num_mini_batches=task["minibatches"],
        num_ppo_epochs=task["epochs"],
        total_episodes=episodes,
        response_length=task["max_new_tokens"],
        temperature=task["temperature"],
        stop_token_id=task["end"],
        missing_eos_penalty=task["truncation_penalty"],
        kl_coef=task["kl_coef"],
        num_sample_generations=0,
        seed=task["seed"],
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        logging_steps=10,
    )
    prompts = Dataset.from_dict({"input_ids": task["prompts"]})
    trainer = PPOTrainer(
        args=config,
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=scoring(task["reward"], task["end"]),
        # as ours: the critic starts from the reward model
        value_model=scoring(task["reward"]),
        train_dataset=prompts,
        eval_dataset=prompts.select(range(task["batch_size"])),
        callbacks=[Keeps(task["out"], task["interval"], task["cap"])],
    )
    trainer.train()


if __name__ == "__main__":
    main()
