"""Supervised fine-tuning."""

from __future__ import annotations

from typing import Any

import torch

from plaudit import device as devices
from plaudit.algorithms.sft import sft_loss
from plaudit.config import EngineConfig, SamplingConfig, SFTConfig
from plaudit.data import rows as data
from plaudit.data.order import shuffled
from plaudit.learner import Learner
from plaudit.models.arrangements import trainable_policy
from plaudit.models.load import load_language_model, save_language_model
from plaudit.recipes.common import Summary, engine_for, holds, prepared, save, stage
from plaudit.runs import Run
from plaudit.tokenizer import Tokenizer
from plaudit.training import fit
from plaudit.types import Prompt, Sequences


@stage
def sft(config: SFTConfig, run: Run) -> Summary:
    """Supervised fine-tuning on demonstrations; leaves ``model/``."""
    device = devices.pick(config.device)
    model, tokenizer = load_language_model(config.model, config.attn_implementation)
    rows, counted = data.demonstrations(config.data, tokenizer, limit=config.rows, max_length=config.max_length)
    holds(model, config.max_length, "max_length")
    model.to(device)
    network, trunk = trainable_policy(model, config.train_blocks, config.precision)
    order = _epochs(len(rows), config.batch_size, config.epochs, config.seed)
    learner = Learner(network, config.optimizer, len(order), device)

    def batch_at(step: int):
        return prepared(rows.take(order[step]).trim().to(device), trunk)

    metrics = fit(run, learner, sft_loss, batch_at, len(order), "SFT")
    save(run.path("model"), lambda folder: save_language_model(model, tokenizer, folder))
    run.log_samples(learner.steps, _try_out(model, tokenizer, rows, config.seed, device))
    summary = {"rows": counted.rows, "cut": counted.cut, "dropped": counted.dropped, "steps": learner.steps}
    return summary | {"nll_nats_per_token": metrics.get("nll_nats_per_token")}


def _epochs(rows: int, batch: int, epochs: int, seed: int) -> list[torch.Tensor]:
    """Every epoch's rows in a shuffled order, cut into batches; the last batch of an epoch may be smaller."""
    order: list[torch.Tensor] = []
    for epoch in range(epochs):
        order += torch.tensor(shuffled(rows, seed, epoch)).split(batch)
    return order


def _try_out(model, tokenizer: Tokenizer, rows: Sequences, seed: int, device) -> list[dict[str, Any]]:
    """A few answers of the new model to the beginnings of its own rows."""
    prompts = []
    for i in range(min(8, len(rows))):
        given = int((~rows.mask[i, : int(rows.lengths[i])]).sum())
        # a whole text supervises all but its first token; it is continued from its first few
        ids = rows.tokens[i, : given if given > 1 else max(1, min(4, int(rows.lengths[i]) - 1))].tolist()
        prompts.append(Prompt(tokenizer.decode(ids), tuple(ids)))
    engine = engine_for(EngineConfig(), model, tokenizer, device)
    rollout = engine.generate(prompts, SamplingConfig(temperature=0.8), seed=seed)
    return [{"prompt": p.text, "response": r} for p, r in zip(prompts, tokenizer.responses(rollout), strict=True)]
