"""The reward model: trained from the store, measured, normalised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from plaudit import device as devices
from plaudit.algorithms import reward as reward_algorithm
from plaudit.config import RewardConfig
from plaudit.errors import DataError, ModelError
from plaudit.evaluation import baselines, judges
from plaudit.learner import Learner, Scorer
from plaudit.models.arrangements import trainable_top
from plaudit.models.load import load_tokenizer, new_reward_model, save_reward_model
from plaudit.models.network import Network, scalar_head, text_scores
from plaudit.preferences.store import PreferenceStore
from plaudit.progress import say
from plaudit.recipes.common import Summary, holds, prepared, save, stage
from plaudit.runs import Run
from plaudit.training import fit
from plaudit.types import Preference, RankedAnswers


@stage
def reward(config: RewardConfig, run: Run) -> Summary:
    """Trains a reward model from the store, measures it on held-out comparisons, fits its score contract."""
    store = PreferenceStore(config.store)
    parts = reward_algorithm.split(store.preferences(), config.held_out, ties=config.ties == "half")
    unlabelled = store.unlabelled()
    store.close()
    if not parts.train:
        raise DataError(
            f"{config.store}: no preference pairs to train from ({parts.unusable} tied, "
            f"{len(parts.held_out)} held out); label some with `plaudit label --oracle`"
        )
    device = devices.pick(config.device)
    tokenizer = load_tokenizer(config.model)
    model = new_reward_model(config.model, tokenizer, config.attn_implementation).to(device)
    holds(model, config.max_length, "max_length")
    stack, trunk = trainable_top(model.base_model, config.train_blocks, config.precision)
    network = Network(stack, scalar=scalar_head(torch.zeros(1, model.config.hidden_size)).to(device))
    size = [len(p.comparison.answers) for p in parts.train]
    order = [
        b for e in range(config.epochs) for b in reward_algorithm.batches(size, config.batch_answers, config.seed, e)
    ]
    learner = Learner(network, config.optimizer, len(order), device)

    def batch_at(step: int) -> RankedAnswers:
        chosen = [parts.train[i] for i in order[step]]
        rows = reward_algorithm.ranked_answers(chosen, tokenizer, config.max_length, ties=config.ties == "half")
        return prepared(rows.to(device), trunk)

    equal = reward_algorithm.pairs_equal_after_cutting(parts.train, tokenizer, config.max_length)
    if equal:
        say(f"{equal} pairs are the same texts once cut to {config.max_length} tokens; they count as ties")
    unsure = sum(p.certainty != 1 for p in parts.train)
    if unsure and config.loss != "pairwise":
        say(f"{unsure} comparisons say how certain they are; loss={config.loss} takes them all as certain")
    fit(run, learner, reward_algorithm.ranking_loss(config), batch_at, len(order), "reward model")
    scorer = Scorer(network, device)

    def scores_of(texts: Sequence[Preference]) -> tuple[torch.Tensor, RankedAnswers]:
        rows = prepared(reward_algorithm.ranked_answers(texts, tokenizer, config.max_length).to(device), trunk).to(
            "cpu"
        )
        return scorer.evaluate(rows, text_scores), rows

    quality, samples = _measure(parts, scores_of)
    # The contract is fitted on reference samples that no label touched, where the store has some.
    free = [Preference(c, (0,) * len(c.answers), "") for c in unlabelled] or parts.train
    reference_scores, _ = scores_of(free)
    mean, deviation = float(reference_scores.mean()), float(reference_scores.std())
    if not deviation > 0:
        raise ModelError(
            "the reward model gives every text the same score; train longer or with a higher learning rate"
        )
    assert network.scalar is not None
    head = network.scalar
    save(
        run.path("model"),
        lambda folder: save_reward_model(model, head, tokenizer, folder, mean=mean, deviation=deviation),
    )
    run.log_samples(learner.steps, [s | {"score": (s["score"] - mean) / deviation} for s in samples])
    summary = quality | {
        "train_comparisons": len(parts.train),
        "unusable_preferences": parts.unusable,
        "pairs_equal_after_cutting": equal,
        "score_mean": mean,
        "score_deviation": deviation,
        "normalised_on": f"{len(reference_scores)} {'unlabelled samples' if unlabelled else 'training answers'}",
        "steps": learner.steps,
    }
    return summary


def _measure(parts: reward_algorithm.Split, scores_of) -> tuple[Summary, list[dict[str, Any]]]:
    """Held-out quality by annotator, the baselines, and every held-out text with its score."""
    quality: Summary = {"sources": {}}
    samples: list[dict[str, Any]] = []
    for annotator in sorted({p.annotator for p in parts.held_out}):
        mine = [p for p in parts.held_out if p.annotator == annotator]
        scores, rows = scores_of(mine)
        measured = reward_algorithm.report(scores, rows)
        trained = [p for p in parts.train if p.annotator == annotator]
        quality["sources"][annotator] = vars(measured) | {
            "longer_wins": baselines.longer_wins(mine),
            "bag_of_words": baselines.bag_of_words(trained, mine),
        }
        texts = [(p.comparison.prompt, a.text) for p in mine for a in p.comparison.answers]
        for (prompt, text), score, rank in zip(texts, scores.tolist(), rows.rank.tolist(), strict=True):
            samples.append({"prompt": prompt, "response": text, "score": score, "rank": rank, "annotator": annotator})
    if not quality["sources"]:
        say("no comparison was held out, so the reward model's accuracy is not measured; raise held_out or label more")
        return quality, samples
    # The headline is people's judgement where there is any: the most-measured source that is no programme.
    people = [n for n in quality["sources"] if n != judges.Oracle.name] or list(quality["sources"])
    main = quality["sources"][max(people, key=lambda n: quality["sources"][n]["pairs"])]
    headline = {
        "reward_model_accuracy": main["accuracy"],
        "reward_model_accuracy_low": main["low"],
        "reward_model_accuracy_high": main["high"],
        "longer_wins": main["longer_wins"],
        "bag_of_words": main["bag_of_words"],
    }
    return headline | quality, samples
