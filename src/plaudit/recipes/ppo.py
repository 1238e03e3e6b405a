"""PPO: the roles and the loop around the iteration."""

from __future__ import annotations

import time
from typing import Any

from plaudit import device as devices
from plaudit.algorithms import ppo as ppo_algorithm
from plaudit.config import PPOConfig
from plaudit.data import rows as data
from plaudit.data.order import shuffled
from plaudit.evaluation.compare import distinct, level
from plaudit.learner import Learner, Scorer
from plaudit.models.arrangements import RewardParts, arrange
from plaudit.models.load import load_language_model, load_reward_model, save_language_model
from plaudit.progress import Bar, graceful, say
from plaudit.recipes.common import Summary, Watch, fits, one_vocabulary, save, stage, watch
from plaudit.rewards.function import FunctionReward, is_function, load_function
from plaudit.rewards.model import ModelReward
from plaudit.rewards.source import RewardSource
from plaudit.rollout.local import LocalEngine
from plaudit.runs import Run, read_jsonl
from plaudit.tokenizer import Tokenizer
from plaudit.training import interrupted


@stage
def ppo(config: PPOConfig, run: Run) -> Summary:
    """PPO against a reward; leaves ``model/``, a plain Hugging Face folder."""
    device = devices.pick(config.device)
    model, tokenizer = load_language_model(config.model)
    prompts, counted = data.prompts(
        config.prompts, tokenizer, max_tokens=config.max_prompt_tokens, long=config.long_prompts
    )
    fits(model, prompts, config.sampling)
    model.to(device)
    roles = _roles(config, model, tokenizer, device)
    state = ppo_algorithm.State(kl_coef=config.kl.coef)
    watches = {name: watch(name) for name in config.monitors}
    if found := run.newest_checkpoint():
        _restore(roles, state, *found)
    run.forget_after(state.iteration)
    with graceful() as stop, Bar("PPO", config.iterations, state.iteration) as bar:
        while state.iteration < config.iterations:
            started = time.time()
            batch = [prompts[i] for i in _turn(len(prompts), config.batch_size, state.iteration, config.seed)]
            iteration = ppo_algorithm.ppo_iteration(config, roles, state, batch)
            metrics = _log_iteration(run, config, state, iteration, tokenizer, watches, time.time() - started)
            devices.release_memory()
            bar.advance("  ".join(f"{k} {metrics[k]:.2f}" for k in ("score", "kl", "ended", *watches)))
            if stop.requested or state.iteration % config.checkpoint_every == 0:
                run.save_checkpoint(state.iteration, *_snapshot(roles, state))
            if stop.requested and state.iteration < config.iterations:
                raise interrupted(run, f"iteration {state.iteration} of {config.iterations}")
    save(run.path("model"), lambda folder: save_language_model(model, tokenizer, folder))
    lines = read_jsonl(run.path("metrics.jsonl"))
    summary = {
        "iterations": state.iteration,
        "prompts": counted.rows,
        "prompts_cut": counted.cut,
        **{f"{k}_first": lines[0][k] for k in ("score", "kl", "ended", "response_tokens")},
        **{f"{k}_last": lines[-1][k] for k in ("score", "kl", "ended", "response_tokens")},
    }
    return summary


def _roles(config: PPOConfig, model, tokenizer: Tokenizer, device) -> ppo_algorithm.Roles:
    parts: RewardParts | None = None
    if not is_function(config.reward):
        reward_model, head, reward_tokenizer = load_reward_model(config.reward)
        one_vocabulary(tokenizer, reward_tokenizer, config.reward)
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
        engine=LocalEngine(model, tokenizer.end_ids, trunk=made.trunk, head=made.head, device=device),
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
