"""Collecting answers and labelling them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from plaudit import device as devices
from plaudit.config import CollectConfig, LabelConfig
from plaudit.data import comparisons
from plaudit.data import rows as data
from plaudit.errors import ConfigError, DataError, ModelError
from plaudit.evaluation import judges
from plaudit.evaluation.endpoint import Endpoint
from plaudit.evaluation.language_judge import Asker, Journal, LanguageJudge, LocalAsker
from plaudit.models.load import load_language_model, weights_digest
from plaudit.preferences.exchange import imported
from plaudit.preferences.source import PreferenceSource
from plaudit.preferences.store import PreferenceStore
from plaudit.progress import Bar, graceful, say
from plaudit.recipes.common import Summary, engine_for, fits, generate, stage
from plaudit.runs import Run, read_json
from plaudit.training import interrupted
from plaudit.types import Answer, Comparison, Preference

#: a judge that names one place this much more often than half the time has little to say of the answers
ONE_SIDED = 0.4


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
    prompts, _ = data.prompts(config.prompts, tokenizer, limit=config.skip + config.count)
    prompts = prompts[config.skip :]
    if not prompts:
        raise DataError(f"{config.prompts}: all its prompts are left out; lower skip ({config.skip})")
    fits(model, prompts, config.sampling)
    engine = engine_for(config.engine, model.to(device), tokenizer, device)
    asked = [prompt for prompt in prompts for _ in range(config.k)]
    rollout = generate(engine, asked, config.sampling, config.seed, "sampling answers")
    # a stop string is no end token: from such an answer nothing is to be learned of ending
    texts, ended = tokenizer.responses(rollout), (rollout.terminated & ~rollout.stopped).tolist()
    provenance = {
        "model": config.model,
        "weights": weights_digest(config.model),
        "seed": config.seed,
        "sampling": config.sampling.model_dump(),
    }
    made = []
    for i, prompt in enumerate(prompts):
        span = range(i * config.k, (i + 1) * config.k)
        made.append(Comparison(0, prompt.text, tuple(Answer(texts[j], ended[j]) for j in span), provenance))
    samples = [{"prompt": p.text, "response": t, "ended": e} for p, t, e in zip(asked, texts, ended, strict=True)]
    return made, samples


@stage
def label(config: LabelConfig, run: Run) -> Summary:
    """Labels comparisons by a language model or the oracle: programmes in a person's place.

    Labels are in the store as they come. For what a language model costs see :class:`LanguageJudge`.
    """
    run.forget_after(0)
    with closing(PreferenceStore(config.store)) as store:
        chosen = _chosen(run, store, config.limit)
        try:
            source = _source(config, run)
            _fill(run, store, source, chosen)
        except (ConfigError, DataError, ModelError) as error:
            if not run.path(Journal.name).exists():
                # nothing was said, so nothing hangs on which comparisons it would have been said of
                run.path("chosen.json").unlink(missing_ok=True)
                raise
            raise type(error)(
                f"{error}\nwhat was said is kept; go on with `plaudit label --resume {run.folder}`"
            ) from None
        mine = [p for p in store.preferences() if p.comparison.id in chosen and p.annotator == source.name]
        counts = store.counts()
    figures: dict[str, float] = {"labelled": len(mine), "ties": sum(len(set(p.ranks)) < len(p.ranks) for p in mine)}
    if isinstance(source, LanguageJudge):
        figures |= _heard(source, chosen)
    run.log(1, figures)
    run.log_samples(1, [_said(p) for p in mine[:20]])
    return figures | {"annotator": source.name, "store_counts": counts}


def _source(config: LabelConfig, run: Run) -> PreferenceSource:
    judge = config.judge
    if not judge.model:
        return judges.Oracle()
    journal = Journal(run)
    if judge.endpoint:
        asker: Asker = Endpoint(judge, heard=bool(journal.replies))
    else:
        asker = LocalAsker(judge.model, config.device, judge.batch_tokens)
    return LanguageJudge(judge.model, judge.criterion, asker, journal)


def _fill(run: Run, store: PreferenceStore, source: PreferenceSource, chosen: set[int]) -> None:
    """Has the source label what it has not labelled yet, and records it as it comes.

    Raises:
        Interrupted: Ctrl-C; what was said is recorded.
    """
    todo = [c for c in store.unlabelled(source.name) if c.id in chosen]
    done = len(chosen) - len(todo)
    if isinstance(source, LanguageJudge):
        say(f"{source.name}: {source.left(todo)} questions about {len(todo)} comparisons")
    with graceful() as stop, Bar(f"labels by {source.name}", len(chosen), done) as bar:
        for said in source.label(todo, lambda: stop.requested):
            if said:
                store.record(said)
            bar.advance(amount=len(said))
        if stop.requested and bar.done < bar.total:
            raise interrupted(run, f"{bar.done} of {bar.total} comparisons")


def _heard(judge: LanguageJudge, chosen: set[int]) -> dict[str, float]:
    """What the judge was asked, how often it named neither answer, and how often the one shown first (½: no bias)."""
    letters = [reply.letter for key, reply in judge.journal.replies.items() if key[0] in chosen]
    named = [letter for letter in letters if letter]
    first = {"first_chosen": named.count("A") / len(named)} if named else {}
    if named and abs(first["first_chosen"] - 0.5) > ONE_SIDED:
        say(
            f"{judge.name} named the answer shown first in {first['first_chosen']:.0%} of its replies, so most pairs "
            "are ties; a larger model, or a plainer judge.criterion, may tell answers apart"
        )
    if judge.left_out:
        say(f"left without a label: {len(judge.left_out)}; {next(iter(judge.left_out.values()))}")
    return {"asked": len(letters), "unclear": len(letters) - len(named), "left_out": len(judge.left_out)} | first


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
