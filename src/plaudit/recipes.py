"""The composition root: each stage turns a configuration into concrete objects, runs them, and leaves a run folder.

Every function here is a command and can be called from a notebook. Below this file there are only objects with one to
three methods; above it only the command line.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel

from plaudit import device as devices
from plaudit.algorithms import ppo as ppo_algorithm
from plaudit.algorithms import reward as reward_algorithm
from plaudit.algorithms.sft import sft_loss
from plaudit.config import (
    ChatConfig,
    CollectConfig,
    EvaluateConfig,
    LabelConfig,
    PPOConfig,
    QuickstartConfig,
    RewardConfig,
    SamplingConfig,
    ScoreConfig,
    SFTConfig,
)
from plaudit.data import files
from plaudit.data import rows as data
from plaudit.data.order import shuffled
from plaudit.errors import ConfigError, DataError, Interrupted, ModelError, RunError
from plaudit.evaluation import baselines, judges
from plaudit.evaluation.compare import Answers, compare, distinct, level
from plaudit.learner import Learner, Scorer
from plaudit.models.arrangements import (
    RewardParts,
    arrange,
    read_together,
    recorded_block,
    share,
    trainable_top,
)
from plaudit.models.load import (
    load_language_model,
    load_reward_model,
    load_tokenizer,
    locate,
    new_reward_model,
    save_language_model,
    save_reward_model,
)
from plaudit.models.network import LanguageHead, Network, scalar_head, text_scores, token_logprobs
from plaudit.models.stack import Trunk, WholeStack
from plaudit.preferences.source import PreferenceSource
from plaudit.preferences.store import PreferenceStore
from plaudit.progress import Bar, clock, graceful, say
from plaudit.report import write_report
from plaudit.rewards.function import FunctionReward, RewardError, checked, is_function, load_function
from plaudit.rewards.model import ModelReward
from plaudit.rewards.source import RewardSource
from plaudit.rollout.local import LocalEngine
from plaudit.runs import Run, read_json, read_jsonl
from plaudit.tokenizer import Tokenizer
from plaudit.training import fit, interrupted
from plaudit.types import Answer, Comparison, Preference, Prompt, RankedAnswers, Rollout, Sequences

Summary = dict[str, Any]
Watch = Callable[[Sequence[str], Sequence[str]], list[float]]


def _finish(run: Run, summary: Summary) -> Summary:
    measured = {"seed": summary.pop("seed"), "seconds": round(time.time() - run.started, 1)}
    return run.finish(summary | measured | {"peak_rss_mib": devices.peak_rss_mib()})


def _already(run: Run) -> Summary | None:
    if run.summary is not None:
        say(f"{run.folder}: this run is finished; nothing to do")
    return run.summary


def _save(folder: Path, write: Callable[[Path], None]) -> Path:
    """Writes a model folder beside its place and renames it, so that a folder that is there is whole."""
    scratch = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        write(scratch)
        shutil.rmtree(folder, ignore_errors=True)
        scratch.rename(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(scratch, ignore_errors=True)
        raise RunError(f"{folder}: the model could not be written: {error}") from None
    return folder


# --- supervised fine-tuning -------------------------------------------------------------------------------------------


def sft(config: SFTConfig, *, resume: bool = False) -> Summary:
    """Supervised fine-tuning on demonstrations; leaves ``model/``."""
    run = Run.open("sft", config, resume=resume)
    if done := _already(run):
        return done
    device = devices.pick(config.device)
    model, tokenizer = load_language_model(config.model)
    rows, counted = data.demonstrations(config.data, tokenizer, limit=config.rows, max_length=config.max_length)
    _holds(model, config.max_length, "max_length")
    model.to(device)
    if config.train_blocks:
        model.requires_grad_(False)
    stack, trunk = trainable_top(model.base_model, config.train_blocks, config.trunk_precision)
    network = Network(stack, LanguageHead(model))
    order = _epochs(len(rows), config.batch_size, config.epochs, config.seed)
    learner = Learner(network, config.optimizer, len(order), device)

    def batch_at(step: int):
        return _prepared(rows.take(order[step]).trim().to(device), trunk)

    metrics = fit(run, learner, sft_loss, batch_at, len(order), "SFT")
    _save(run.path("model"), lambda folder: save_language_model(model, tokenizer, folder))
    run.log_samples(learner.steps, _try_out(model, tokenizer, rows, config.seed, device))
    summary = {"rows": counted.rows, "cut": counted.cut, "dropped": counted.dropped, "steps": learner.steps}
    return _finish(run, summary | {"nll": metrics.get("nll"), "seed": config.seed})


def _prepared(rows, trunk: Trunk | None):
    return trunk.prepare(rows) if trunk else rows


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
    engine = LocalEngine(model, tokenizer.end_ids, device=device)
    rollout = engine.generate(prompts, SamplingConfig(temperature=0.8), seed=seed)
    return [{"prompt": p.text, "response": r} for p, r in zip(prompts, tokenizer.responses(rollout), strict=True)]


# --- preferences ------------------------------------------------------------------------------------------------------


def collect(config: CollectConfig, *, resume: bool = False) -> Summary:
    """k answers a prompt into the preference store, and ready-made human judgements beside them."""
    run = Run.open("collect", config, resume=resume)
    if done := _already(run):
        return done
    run.forget_after(0)
    summary: Summary = {"answers": 0, "comparisons": 0, "human_comparisons": 0}
    ready = data.human_comparisons(config.comparisons) if config.comparisons else []
    answered, samples = _sample_comparisons(config) if config.count else ([], [])
    store = PreferenceStore(config.store, create=True)
    if ready:
        stored = store.add([comparison for comparison, _ in ready])
        new = {c.id for c in store.unlabelled("people")}
        said = [Preference(c, ranks, "people") for c, (_, ranks) in zip(stored, ready, strict=True)]
        said = [p for p in said if p.comparison.id in new]
        store.record(said)
        summary["human_comparisons"] = len(said)
    if answered:
        store.add(answered)
        summary["comparisons"], summary["answers"] = len(answered), len(answered) * config.k
        run.log(1, {"ended": sum(s["ended"] for s in samples) / len(samples)})
        run.log_samples(1, samples)
    store.close()
    return _finish(run, summary | {"store": str(config.store), "seed": config.seed})


def _sample_comparisons(config: CollectConfig):
    device = devices.pick(config.device)
    model, tokenizer = load_language_model(config.model)
    prompts, _ = data.prompts(config.prompts, tokenizer, limit=config.count)
    _fits(model, prompts, config.sampling)
    engine = LocalEngine(model.to(device), tokenizer.end_ids, device=device)
    asked = [prompt for prompt in prompts for _ in range(config.k)]
    rollout = _generate(engine, asked, config.sampling, config.seed, "sampling answers")
    texts, ended = tokenizer.responses(rollout), rollout.terminated.tolist()
    provenance = {"model": config.model, "seed": config.seed, "sampling": config.sampling.model_dump()}
    made = []
    for i, prompt in enumerate(prompts):
        span = range(i * config.k, (i + 1) * config.k)
        made.append(Comparison(0, prompt.text, tuple(Answer(texts[j], ended[j]) for j in span), provenance))
    samples = [{"prompt": p.text, "response": t, "ended": e} for p, t, e in zip(asked, texts, ended, strict=True)]
    return made, samples


def _generate(
    engine: LocalEngine, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int, title: str
) -> Rollout:
    with Bar(title, len(prompts)) as bar:
        return engine.generate(prompts, sampling, seed=seed, progress=lambda done: bar.advance(amount=done - bar.done))


def label(config: LabelConfig, *, resume: bool = False) -> Summary:
    """Labels comparisons by the oracle, a programme in a person's place."""
    run = Run.open("label", config, resume=resume)
    if done := _already(run):
        return done
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
    return _finish(run, {"labelled": len(mine), "store_counts": counts, "seed": config.seed})


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


# --- reward model -----------------------------------------------------------------------------------------------------


def reward(config: RewardConfig, *, resume: bool = False) -> Summary:
    """Trains a reward model from the store, measures it on held-out comparisons, fits its score contract."""
    run = Run.open("reward", config, resume=resume)
    if done := _already(run):
        return done
    store = PreferenceStore(config.store)
    parts = reward_algorithm.split(store.preferences(), config.held_out)
    unlabelled = store.unlabelled()
    store.close()
    if not parts.train:
        raise DataError(
            f"{config.store}: no preference pairs to train from ({parts.unusable} tied, "
            f"{len(parts.held_out)} held out); label some with `plaudit label --oracle`"
        )
    device = devices.pick(config.device)
    tokenizer = load_tokenizer(config.model)
    model = new_reward_model(config.model, tokenizer).to(device)
    _holds(model, config.max_length, "max_length")
    stack, trunk = trainable_top(model.base_model, config.train_blocks, config.trunk_precision)
    network = Network(stack, scalar=scalar_head(torch.zeros(1, model.config.hidden_size)).to(device))
    size = [len(p.comparison.answers) for p in parts.train]
    order = [
        b for e in range(config.epochs) for b in reward_algorithm.batches(size, config.batch_answers, config.seed, e)
    ]
    learner = Learner(network, config.optimizer, len(order), device)

    def batch_at(step: int) -> RankedAnswers:
        chosen = [parts.train[i] for i in order[step]]
        return _prepared(reward_algorithm.ranked_answers(chosen, tokenizer, config.max_length).to(device), trunk)

    fit(run, learner, reward_algorithm.ranking_loss(config.loss), batch_at, len(order), "reward model")
    scorer = Scorer(network, device)

    def scores_of(texts: Sequence[Preference]) -> tuple[torch.Tensor, RankedAnswers]:
        rows = _prepared(reward_algorithm.ranked_answers(texts, tokenizer, config.max_length).to(device), trunk).to(
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
    _save(
        run.path("model"),
        lambda folder: save_reward_model(model, head, tokenizer, folder, mean=mean, deviation=deviation),
    )
    run.log_samples(learner.steps, [s | {"score": (s["score"] - mean) / deviation} for s in samples])
    summary = quality | {
        "train_comparisons": len(parts.train),
        "unusable_preferences": parts.unusable,
        "score_mean": mean,
        "score_deviation": deviation,
        "normalised_on": f"{len(reference_scores)} {'unlabelled samples' if unlabelled else 'training answers'}",
        "steps": learner.steps,
    }
    return _finish(run, summary | {"seed": config.seed})


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


# --- PPO --------------------------------------------------------------------------------------------------------------


def ppo(config: PPOConfig, *, resume: bool = False) -> Summary:
    """PPO against a reward; leaves ``model/``, a plain Hugging Face folder."""
    run = Run.open("ppo", config, resume=resume)
    if done := _already(run):
        return done
    device = devices.pick(config.device)
    model, tokenizer = load_language_model(config.model)
    prompts, counted = data.prompts(
        config.prompts, tokenizer, max_tokens=config.max_prompt_tokens, long=config.long_prompts
    )
    _fits(model, prompts, config.sampling)
    model.to(device)
    roles = _roles(config, model, tokenizer, device)
    state = ppo_algorithm.State(kl_coef=config.kl.coef)
    watches = {name: _watch(name) for name in config.monitors}
    if found := run.newest_checkpoint():
        _restore(roles, state, *found)
    run.forget_after(state.iteration)
    with graceful() as stop, Bar("PPO", config.iterations, state.iteration) as bar:
        while state.iteration < config.iterations:
            started = time.time()
            batch = [prompts[i] for i in _turn(len(prompts), config.batch_size, state.iteration, config.seed)]
            iteration = ppo_algorithm.ppo_iteration(config, roles, state, batch)
            metrics = _log_iteration(run, config, state, iteration, tokenizer, watches, time.time() - started)
            bar.advance("  ".join(f"{k} {metrics[k]:.2f}" for k in ("score", "kl", "ended", *watches)))
            if stop.requested or state.iteration % config.checkpoint_every == 0:
                run.save_checkpoint(state.iteration, *_snapshot(roles, state))
            if stop.requested and state.iteration < config.iterations:
                raise interrupted(run, f"iteration {state.iteration} of {config.iterations}")
    _save(run.path("model"), lambda folder: save_language_model(model, tokenizer, folder))
    lines = read_jsonl(run.path("metrics.jsonl"))
    summary = {
        "iterations": state.iteration,
        "prompts": counted.rows,
        "prompts_cut": counted.cut,
        **{f"{k}_first": lines[0][k] for k in ("score", "kl", "ended", "response_tokens")},
        **{f"{k}_last": lines[-1][k] for k in ("score", "kl", "ended", "response_tokens")},
    }
    return _finish(run, summary | {"seed": config.seed})


def _fits(model: PreTrainedModel, prompts: Sequence[Prompt], sampling: SamplingConfig) -> None:
    context = _context(model)
    longest = max(len(p.ids) for p in prompts)
    if context and longest + sampling.max_new_tokens > context:
        raise DataError(
            f"a prompt of {longest} tokens and {sampling.max_new_tokens} new ones exceed the model's context "
            f"of {context}; shorten the prompts, or lower sampling.max_new_tokens"
        )


def _holds(model: PreTrainedModel, tokens: int, key: str) -> None:
    context = _context(model)
    if context and tokens > context:
        raise ConfigError(f"{key}={tokens} exceeds the model's context of {context}; lower it")


def _context(model: PreTrainedModel) -> int | None:
    """How many tokens the model's positions reach, where it says so."""
    return getattr(model.config, "max_position_embeddings", None)


def _one_vocabulary(mine: Tokenizer, other: Tokenizer, name: str) -> None:
    if mine.fingerprint() != other.fingerprint():
        raise ModelError(f"{name}: its vocabulary differs from the policy's; train both from one model")


def _roles(config: PPOConfig, model, tokenizer: Tokenizer, device) -> ppo_algorithm.Roles:
    parts: RewardParts | None = None
    if not is_function(config.reward):
        reward_model, head, reward_tokenizer = load_reward_model(config.reward)
        _one_vocabulary(tokenizer, reward_tokenizer, config.reward)
        parts = RewardParts(reward_model.base_model.to(device), head.to(device))
    made = arrange(model, parts, config.arrangement, config.critic_from)
    for network in (made.actor, made.critic, made.reference, made.reward):
        if network is not None:
            network.to(device)
    steps = config.iterations * config.epochs * config.minibatches
    if made.joint:
        updates = [("actor", Learner(made.actor, config.actor, steps, device), ppo_algorithm.joint_loss(config))]
    else:
        updates = [
            ("actor", Learner(made.actor, config.actor, steps, device), ppo_algorithm.actor_loss(config)),
            ("critic", Learner(made.critic, config.critic, steps, device), ppo_algorithm.critic_loss(config)),
        ]
    source: RewardSource
    if made.reward is not None:
        source = ModelReward(Scorer(made.reward, device))
    else:
        source = FunctionReward(load_function(config.reward), tokenizer, config.reward)
    return ppo_algorithm.Roles(
        engine=LocalEngine(model, tokenizer.end_ids, record=made.record, device=device),
        reward=source,
        actor=Scorer(made.actor, device),
        reference=Scorer(made.reference, device),
        critic=Scorer(made.critic, device),
        prepare=made.prepare,
        updates=updates,
    )


def _turn(count: int, batch: int, iteration: int, seed: int) -> list[int]:
    """Which prompts an iteration takes: every prompt once an epoch, in an order drawn afresh for each epoch."""
    chosen = []
    orders: dict[int, list[int]] = {}
    for position in range(iteration * batch, (iteration + 1) * batch):
        epoch, place = divmod(position, count)
        if epoch not in orders:
            orders[epoch] = shuffled(count, seed, epoch)
        chosen.append(orders[epoch][place])
    return chosen


def _watch(name: str) -> Watch:
    if name in ("gold", "vader"):
        judge = judges.gold_judge() if name == "gold" else judges.vader_judge()
        return lambda prompts, responses: judge([p + r for p, r in zip(prompts, responses, strict=True)])
    if not is_function(name):
        raise ConfigError(f"unknown judge {name!r}: gold, vader, or a function as file.py:name")
    function = load_function(name)

    def watch(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
        try:
            said = list(function(prompts, responses))
        except Exception as error:
            raise RewardError(f"judge {name} raised {type(error).__name__}: {error}") from error
        return checked(said, len(prompts), f"judge {name}")

    return watch


def _log_iteration(
    run: Run,
    config: PPOConfig,
    state: ppo_algorithm.State,
    done: ppo_algorithm.Iteration,
    tokenizer: Tokenizer,
    watches: dict[str, Watch],
    seconds: float,
) -> dict[str, float]:
    texts = tokenizer.responses(done.rollout)
    prompts = [p.text for p in done.rollout.prompts]
    judged = {name: watch(prompts, texts) for name, watch in watches.items()}
    metrics = done.metrics | {"distinct2": distinct(texts), "seconds": seconds}
    metrics |= {name: level(name, values) for name, values in judged.items()}
    run.log(state.iteration, metrics)
    if state.iteration % config.sample_every == 0 or state.iteration == config.iterations:
        samples = [
            {
                "prompt": prompts[i],
                "response": texts[i],
                "score": float(done.scores[i]),
                "kl": float(done.kl[i]),
                "ended": bool(done.rollout.terminated[i]),
                **{name: values[i] for name, values in judged.items()},
            }
            for i in range(min(4, len(texts)))
        ]
        run.log_samples(state.iteration, samples)
    if metrics["first_ratio_error"] > 1e-4:
        message = (
            f"iteration {state.iteration}: the ratio at the first minibatch is off 1 by "
            f"{metrics['first_ratio_error']:.1e}; the trainer does not see what was sampled. "
            "Use float32, and look for a changed model"
        )
        run.jsonl.event("warning", message, step=state.iteration)
        say(message)
    return metrics


def _snapshot(roles: ppo_algorithm.Roles, state: ppo_algorithm.State):
    tensors = {f"{name}.{k}": v for name, learner, _ in roles.updates for k, v in learner.state().items()}
    return tensors, {"iteration": state.iteration, "kl_coef": state.kl_coef}


def _restore(roles: ppo_algorithm.Roles, state: ppo_algorithm.State, tensors, meta: dict[str, Any]) -> None:
    for name, learner, _ in roles.updates:
        learner.load_state({k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")})
    state.iteration, state.kl_coef = meta["iteration"], meta["kl_coef"]
    roles.engine.load(state.iteration)


# --- evaluation -------------------------------------------------------------------------------------------------------


def evaluate(config: EvaluateConfig, *, resume: bool = False) -> Summary:
    """Compares a model with its reference on held-out prompts, one sample each."""
    run = Run.open("evaluate", config, resume=resume)
    if done := _already(run):
        return done
    device = devices.pick(config.device)
    model, tokenizer = load_language_model(config.model)
    reference, other = load_language_model(config.reference)
    _one_vocabulary(tokenizer, other, config.reference)
    run.forget_after(0)
    everything = model.config.num_hidden_layers
    depth = share(model.base_model, reference.base_model, at_most=everything)
    if reference.config.tie_word_embeddings and reference.get_input_embeddings() is model.get_input_embeddings():
        reference.set_output_embeddings(model.get_output_embeddings())
    bases, head = [model.base_model, reference.base_model], None
    if config.reward:
        scoring, head, other = load_reward_model(config.reward)
        _one_vocabulary(tokenizer, other, config.reward)
        depth = min(depth, share(model.base_model, scoring.base_model, at_most=everything))
        bases.append(scoring.base_model)
        del scoring
    for part in (model, reference, *bases, *([head] if head is not None else [])):
        part.to(device)
    stacks = read_together(bases, depth)
    prompts, _ = data.prompts(config.prompts, tokenizer, limit=config.count)
    _fits(model, prompts, config.sampling)
    watches = {name: _watch(name) for name in config.judges}
    reward_source = ModelReward(Scorer(Network(stacks[2], scalar=head), device)) if head is not None else None

    def answers(policy, title: str) -> tuple[Answers, Rollout]:
        engine = LocalEngine(policy, tokenizer.end_ids, record=recorded_block(policy.base_model, depth), device=device)
        rollout = _generate(engine, prompts, config.sampling, config.seed, title)
        texts, asked = tokenizer.responses(rollout), [p.text for p in prompts]
        judged = {name: watch(asked, texts) for name, watch in watches.items()}
        scores = reward_source.score(rollout).tolist() if reward_source else []
        return Answers(texts, rollout.terminated.tolist(), judged, scores), rollout

    before, _ = answers(reference, "answers of the reference")
    after, rollout = answers(model, "answers of the model")
    kl = _kl(
        rollout, Network(stacks[0], LanguageHead(model)), Network(stacks[1], LanguageHead(reference)), config, device
    )
    summary: Summary = compare(before, after, kl)
    run.log(1, {k: float(v) for k, v in summary.items()})
    run.log_samples(1, _side_by_side(prompts, before, after, kl))
    return _finish(run, summary | {"seed": config.seed})


def _kl(rollout: Rollout, policy: Network, reference: Network, config: EvaluateConfig, device) -> list[float]:
    """Summed k1 of each answer at the sampling temperature (at 1 for greedy answers), in nats."""
    t = config.sampling.temperature or 1.0
    mine, theirs = (
        Scorer(network, device).evaluate(rollout, lambda out, part: token_logprobs(out, part, t))
        for network in (policy, reference)
    )
    return (mine - theirs).sum(1).tolist()


def _side_by_side(
    prompts: Sequence[Prompt], before: Answers, after: Answers, kl: Sequence[float]
) -> list[dict[str, Any]]:
    rows = []
    for i, prompt in enumerate(prompts):
        row: dict[str, Any] = {"prompt": prompt.text, "before": before.responses[i], "after": after.responses[i]}
        row |= {"ended_before": before.ended[i], "ended": after.ended[i], "kl": kl[i]}
        for judge in after.judged:
            row |= {f"{judge}_before": before.judged[judge][i], f"{judge}_after": after.judged[judge][i]}
        if after.scores:
            row |= {"score_before": before.scores[i], "score_after": after.scores[i]}
        rows.append(row)
    return rows


# --- using a model ----------------------------------------------------------------------------------------------------


def score(model: str, file: str, config: ScoreConfig) -> list[dict[str, Any]]:
    """The rows of ``file`` (a column text, or prompt and response) with a reward model's score added to each."""
    device = devices.pick(config.device)
    loaded, head, tokenizer = load_reward_model(model)
    rows, ids, places = [], [], []
    for where, row in files.rows(file):
        if "response" in row:
            prompt = files.text_column(where, row, "prompt", allow_empty=True)
            answer = files.text_column(where, row, "response", allow_empty=True)
        else:
            prompt, answer = "", files.text_column(where, row, "text")
        rows.append(row)
        places.append(where)
        ids.append(tokenizer.scored_ids(tokenizer.text_ids(prompt) if prompt else [], answer))
    context = _context(loaded)
    for where, tokens in zip(places, ids, strict=True):
        if context and len(tokens) > context:
            raise DataError(f"{where}: {len(tokens)} tokens exceed the model's context of {context}; shorten the text")
    network = Network(WholeStack(loaded.base_model), scalar=head).to(device)
    packed = Sequences.pack(ids, [[True] * len(i) for i in ids])
    scores = Scorer(network, device).evaluate(packed, text_scores).tolist()
    return [row | {"score": value} for row, value in zip(rows, scores, strict=True)]


class Chat:
    """A conversation with a model, through its chat template (or raw: it goes on from the text as it stands)."""

    def __init__(self, model: str, config: ChatConfig):
        device = devices.pick(config.device)
        loaded, self.tokenizer = load_language_model(model)
        if not config.raw and not self.tokenizer.inner.chat_template:
            raise ModelError(
                f"{model}: its tokenizer has no chat template; use raw=true to complete texts as they stand"
            )
        self.model = loaded.to(device)
        self.engine = LocalEngine(self.model, self.tokenizer.end_ids, device=device)
        self.config = config
        self.messages: list[dict[str, str]] = []

    def answer(self, text: str) -> str:
        """The model's answer to ``text``, given what was said before (raw: to this text alone)."""
        if self.config.raw:
            prompt = self.tokenizer.prompt(text)
        else:
            self.messages.append({"role": "user", "content": text})
            prompt = self.tokenizer.chat_prompt(self.messages)
        try:
            _fits(self.model, [prompt], self.config.sampling)
        except DataError:
            self.messages = []
            raise DataError("the conversation no longer fits the model's context; it starts anew") from None
        seed = ppo_algorithm.stream(self.config.seed, len(self.messages), 2)
        rollout = self.engine.generate([prompt], self.config.sampling, seed=seed)
        answer = self.tokenizer.responses(rollout)[0]
        self.messages.append({"role": "assistant", "content": answer})
        return answer


# --- the whole way ----------------------------------------------------------------------------------------------------


def quickstart(config: QuickstartConfig, *, resume: bool = False) -> Summary:
    """SFT, answers, labels, reward model, PPO, evaluation, report: the whole way on real text."""
    locate(config.model)
    run = Run.open("quickstart", config, resume=resume)
    if done := _already(run):
        if not run.path("report.html").exists():
            say(f"report: {write_report(run.folder)}")
        return done
    out = run.folder
    store = str(out / "preferences.sqlite")
    sft_model, reward_model, model = (str(out / stage / "model") for stage in ("sft", "reward", "ppo"))
    common = {"seed": config.seed, "device": config.device}

    def stage(name: str, **given: Any):
        return getattr(config, name).model_copy(update=common | {"out": str(out / name)} | given)

    plan: list[tuple[str, Callable[..., Summary], Any]] = [
        ("supervised fine-tuning on critics' sentences", sft, stage("sft", model=config.model)),
        ("collecting answers and human ratings", collect, stage("collect", model=sft_model, store=store)),
        ("labelling (by a programme in a person's place)", label, stage("label", store=store)),
        ("reward model", reward, stage("reward", model=sft_model, store=store)),
        ("PPO", ppo, stage("ppo", model=sft_model, reward=reward_model)),
        ("evaluation", evaluate, stage("evaluate", model=model, reference=sft_model, reward=reward_model)),
    ]
    results: dict[str, Summary] = {}
    seconds = 0.0
    for number, (title, function, stage_config) in enumerate(plan, 1):
        name = function.__name__
        say(f"[bold]{number}/{len(plan)}[/bold] {title}")
        reused = (out / name / "summary.json").exists()
        results[name] = _stage(run, function, stage_config, resume)
        seconds += 0 if reused else results[name]["seconds"]
    final = _save(out / "model", lambda folder: _copy(Path(model), folder))
    summary = _pipeline_summary(config, results)
    summary |= {"seconds": round(seconds, 1), "peak_rss_mib": devices.peak_rss_mib()}
    run.finish(summary)
    report = write_report(out)
    _say_what_improved(summary, final, report)
    return summary


def _stage(run: Run, function: Callable[..., Summary], config: Any, resume: bool) -> Summary:
    """Runs a stage of the pipeline, or takes over what an earlier start has finished of it."""
    begun = (Path(config.out) / "config.json").exists()
    try:
        return function(config, resume=resume and begun)
    except Interrupted:
        raise Interrupted(
            f"stopped; what is done is saved, go on with `plaudit quickstart --resume {run.folder}`"
        ) from None
    finally:
        # Modules and their hooks refer to each other; collected now, a stage's models are gone before the next ones.
        gc.collect()


def _copy(source: Path, target: Path) -> None:
    """A second name for the same files where the file system allows it, else a copy."""
    for file in source.iterdir():
        try:
            (target / file.name).hardlink_to(file)
        except OSError:
            shutil.copy2(file, target / file.name)


def _pipeline_summary(config: QuickstartConfig, results: dict[str, Summary]) -> Summary:
    kept = {k: v for k, v in results["evaluate"].items() if k not in ("seconds", "peak_rss_mib")}
    headline = ("reward_model_accuracy", "longer_wins", "bag_of_words")
    kept |= {k: v for k, v in results["reward"].items() if k.startswith(headline)}
    timing = {name: result["seconds"] for name, result in results.items()}
    return kept | {"seed": config.seed, "stage_seconds": timing}


def _say_what_improved(summary: Summary, model: Path, report: Path) -> None:
    say("")
    say("[bold]What improved[/bold] (held-out openings, judges that no training stage saw)")
    if "gold_before" in summary:
        say(f"  favourable by the gold judge   {summary['gold_before']:.0%} → [bold]{summary['gold_after']:.0%}[/bold]")
    if "vader_before" in summary:
        say(
            f"  VADER's mean sentiment         {summary['vader_before']:.2f} → "
            f"[bold]{summary['vader_after']:.2f}[/bold]"
        )
    say(
        f"  wins against the SFT model     [bold]{summary['win_rate']:.0%}[/bold] "
        f"(95 % interval {summary['win_rate_low']:.0%} to {summary['win_rate_high']:.0%})"
    )
    say(
        f"  paid in KL                     {summary['kl']:.1f} nats an answer; "
        f"{summary['ended']:.0%} of the answers end by themselves"
    )
    say(f"  time and memory                {clock(summary['seconds'])} min, {summary['peak_rss_mib']} MiB")
    say(f"model:  {model}")
    say(f"report: {report}")


__all__ = ["Chat", "collect", "evaluate", "label", "ppo", "quickstart", "reward", "score", "sft"]
