"""Collecting answers and labelling them."""

from __future__ import annotations

import time
from typing import Any

from plaudit import device as devices
from plaudit.config import CollectConfig, LabelConfig
from plaudit.data import comparisons
from plaudit.data import rows as data
from plaudit.errors import DataError
from plaudit.evaluation import judges
from plaudit.models.load import load_language_model
from plaudit.preferences.exchange import imported
from plaudit.preferences.source import PreferenceSource
from plaudit.preferences.store import PreferenceStore
from plaudit.recipes.common import Summary, engine_for, fits, generate, stage
from plaudit.runs import Run, read_json
from plaudit.types import Answer, Comparison, Preference


@stage
def collect(config: CollectConfig, run: Run) -> Summary:
    """k answers a prompt into the preference store, and ready-made human judgements beside them."""
    run.forget_after(0)
    summary: Summary = {"answers": 0, "comparisons": 0, "human_comparisons": 0}
    ready = list(comparisons.read(config.comparisons)) if config.comparisons else []
    answered, samples = _sample_comparisons(config) if config.count else ([], [])
    store = PreferenceStore(config.store, create=True)
    if ready:
        summary["human_comparisons"] = imported(store, ready)["labels"]
    if answered:
        store.add(answered)
        summary["comparisons"], summary["answers"] = len(answered), len(answered) * config.k
        run.log(1, {"ended": sum(s["ended"] for s in samples) / len(samples)})
        run.log_samples(1, samples)
    store.close()
    return summary | {"store": str(config.store)}


def _sample_comparisons(config: CollectConfig):
    device = devices.pick(config.device)
    model, tokenizer = load_language_model(config.model, config.attn_implementation)
    prompts, _ = data.prompts(config.prompts, tokenizer, limit=config.count)
    fits(model, prompts, config.sampling)
    engine = engine_for(config.engine, model.to(device), tokenizer, device)
    asked = [prompt for prompt in prompts for _ in range(config.k)]
    rollout = generate(engine, asked, config.sampling, config.seed, "sampling answers")
    # a stop string is no end token: from such an answer nothing is to be learned of ending
    texts, ended = tokenizer.responses(rollout), (rollout.terminated & ~rollout.stopped).tolist()
    provenance = {"model": config.model, "seed": config.seed, "sampling": config.sampling.model_dump()}
    made = []
    for i, prompt in enumerate(prompts):
        span = range(i * config.k, (i + 1) * config.k)
        made.append(Comparison(0, prompt.text, tuple(Answer(texts[j], ended[j]) for j in span), provenance))
    samples = [{"prompt": p.text, "response": t, "ended": e} for p, t, e in zip(asked, texts, ended, strict=True)]
    return made, samples


@stage
def label(config: LabelConfig, run: Run) -> Summary:
    """Labels comparisons by the oracle, a programme in a person's place."""
    run.forget_after(0)
    store = PreferenceStore(config.store)
    chosen = _chosen(run, store, config.limit)
    oracle: PreferenceSource = judges.Oracle()
    todo = [c for c in store.unlabelled(oracle.name) if c.id in chosen]
    started = time.time()
    labels = oracle.label(todo)
    seconds = (time.time() - started) / max(1, len(todo))
    store.record([Preference(c, ranks, oracle.name, seconds=seconds) for c, ranks in zip(todo, labels, strict=True)])
    mine = [p for p in store.preferences() if p.comparison.id in chosen and p.annotator == oracle.name]
    counts = store.counts()
    store.close()
    run.log(1, {"labelled": len(mine), "ties": sum(len(set(p.ranks)) < len(p.ranks) for p in mine)})
    run.log_samples(1, [_said(p) for p in mine[:20]])
    return {"labelled": len(mine), "store_counts": counts}


def _chosen(run: Run, store: PreferenceStore, limit: int) -> set[int]:
    """The comparisons this run labels, decided once: a run that was interrupted goes on with the same ones."""
    plan = read_json(run.path("chosen.json"))
    if plan is None:
        waiting = store.unlabelled()
        if not waiting:
            raise DataError(f"{store.path}: no comparison is waiting for a label; `plaudit collect` adds some")
        plan = {"comparisons": [c.id for c in waiting[: limit or None]]}
        run.write("chosen.json", plan)
    return set(plan["comparisons"])


def _said(p: Preference) -> dict[str, Any]:
    answers = [a.text for a in p.comparison.answers]
    return {"prompt": p.comparison.prompt, "answers": answers, "ranks": list(p.ranks), "annotator": p.annotator}
