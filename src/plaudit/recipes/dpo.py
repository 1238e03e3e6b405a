"""DPO: preferences straight into the policy, without a reward model."""

from __future__ import annotations

from dataclasses import replace

import torch

from plaudit import device as devices
from plaudit.algorithms import dpo as algorithm
from plaudit.algorithms import reward as rankings
from plaudit.config import DPOConfig
from plaudit.data.order import shuffled
from plaudit.errors import DataError
from plaudit.learner import Learner, Scorer
from plaudit.models.arrangements import trainable_policy
from plaudit.models.load import load_language_model, save_language_model
from plaudit.preferences.store import PreferenceStore
from plaudit.recipes.common import Summary, holds, prepared, save, stage
from plaudit.runs import Run
from plaudit.training import fit


@stage
def dpo(config: DPOConfig, run: Run) -> Summary:
    """Trains a language model on the store's preferences; leaves ``model/``."""
    store = PreferenceStore(config.store)
    parts = rankings.split(store.preferences(), config.held_out)
    store.close()
    device = devices.pick(config.device)
    model, tokenizer = load_language_model(config.model, config.attn_implementation)
    holds(model, config.max_length, "max_length")
    model.to(device)
    network, trunk = trainable_policy(model, config.train_blocks, config.precision)
    scorer = Scorer(network, device)

    def pairs_of(preferences) -> tuple[algorithm.Pairs, int]:
        return algorithm.pairs_of(preferences, tokenizer, config.max_length, config.max_pairs, config.seed)

    (train, equal), (held_out, _) = pairs_of(parts.train), pairs_of(parts.held_out)
    if not len(train):
        raise DataError(
            f"{config.store}: no preference pairs to train from ({parts.unusable} tied, {len(parts.held_out)} held "
            "out); label some with `plaudit label --oracle`"
        )

    def read(pairs: algorithm.Pairs) -> torch.Tensor:
        return scorer.evaluate(prepared(pairs.to(device), trunk).to("cpu"), algorithm.answer_logprobs)

    # Before the first step the policy is the reference, so one model serves both; a resumed run takes what was kept.
    reference = run.once("reference", lambda: {"train": read(train), "held_out": read(held_out)})
    train = replace(train, ref_answer_logprobs=reference["train"])
    order: list[torch.Tensor] = []
    for epoch in range(config.epochs):
        order += torch.tensor(shuffled(len(train) // 2, config.seed, epoch)).split(config.batch_pairs)
    learner = Learner(network, config.optimizer, len(order), device)

    def batch_at(step: int) -> algorithm.Pairs:
        index = torch.stack([2 * order[step], 2 * order[step] + 1], 1).flatten()
        return prepared(train.take(index).trim().to(device), trunk)

    metrics = fit(run, learner, algorithm.dpo_loss(config.beta, config.label_smoothing), batch_at, len(order), "DPO")
    save(run.path("model"), lambda folder: save_language_model(model, tokenizer, folder))
    gained = read(held_out) - reference["held_out"]
    right = (gained[::2] > gained[1::2]).float()
    return {
        "pairs": len(train) // 2,
        "held_out_pairs": len(right),
        "accuracy": float(right.mean()) if len(right) else None,
        "unusable_preferences": parts.unusable,
        "pairs_equal_after_cutting": equal,
        "loss": metrics.get("loss"),
        "steps": learner.steps,
    }
