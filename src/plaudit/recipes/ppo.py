"""PPO: the loop around the iteration, with its checkpoints, warnings and validation."""

from __future__ import annotations

import math
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from plaudit import device as devices
from plaudit.algorithms import ppo as algorithm
from plaudit.config import PPOConfig, falls_due
from plaudit.data import rows as data
from plaudit.errors import NonFinite, RunError
from plaudit.evaluation.compare import distinct, level, repeated
from plaudit.inspection import health, trace
from plaudit.inspection.profile import products_rate, profile
from plaudit.models.load import load_language_model, save_language_model
from plaudit.progress import Bar, graceful, say
from plaudit.recipes.common import Summary, Watch, fits, save, stage, watch
from plaudit.recipes.probes import Probes
from plaudit.recipes.roles import compose, turn
from plaudit.recipes.validation import Validation
from plaudit.runs import Run, read_jsonl, trace_place
from plaudit.tokenizer import Tokenizer
from plaudit.training import interrupted
from plaudit.types import Prompt

FIRST_AND_LAST = ("score", "kl", "ended", "response_tokens")


@stage
def ppo(config: PPOConfig, run: Run) -> Summary:
    """PPO against a reward; leaves ``model/``, a plain Hugging Face folder."""
    device = devices.pick(config.device)
    model, tokenizer = load_language_model(config.model, config.attn_implementation)
    prompts, counted = data.prompts(
        config.prompts, tokenizer, max_tokens=config.max_prompt_tokens, long=config.long_prompts
    )
    fits(model, prompts, config.sampling)
    model.to(device)
    made = compose(config, model, tokenizer, device)
    state = made.state
    watches = {name: watch(name) for name in config.monitors}
    validation = Validation.of(config, made, tokenizer, device)

    def write_model(folder: Path) -> None:
        save(folder, lambda place: save_language_model(model, tokenizer, place))

    def checkpoint() -> None:
        tensors, meta = made.snapshot()
        run.save_checkpoint(state.iteration, tensors, meta | {"validation": validation.state()})

    def batch_at(iteration: int) -> list[Prompt]:
        """The prompts of an iteration; none beyond the last."""
        if iteration >= config.iterations:
            return []
        return [prompts[i] for i in turn(len(prompts), config.batch_size, iteration, config.seed)]

    if found := run.newest_checkpoint():
        tensors, meta = found
        made.restore(tensors, meta, config.loss_reduction)
        validation.load_state(meta["validation"])
    run.forget_after(state.iteration)
    lines = read_jsonl(run.path("metrics.jsonl"))
    probes = Probes.of(config, made, tokenizer, prompts)
    if state.iteration == 0 and not read_jsonl(run.path("probes.jsonl")):
        probes.look(run)
    warned = {line.get("sign", "") for line in read_jsonl(run.path("events.jsonl"))}
    rate = products_rate(int(model.config.hidden_size), device) if config.profile else 0.0
    with graceful() as stop, Bar("PPO", config.iterations, state.iteration) as bar:
        while state.iteration < config.iterations and not validation.exhausted:
            started = time.time()
            made.roles.clock.reset()
            asked, upcoming = batch_at(state.iteration), batch_at(state.iteration + 1)
            try:
                iteration = algorithm.ppo_iteration(config, made.roles, state, asked, upcoming)
            except NonFinite as error:
                # what has been stepped in this iteration is left out: the newest checkpoint is of a whole one
                raise NonFinite(f"iteration {state.iteration + 1}: {error}. {_what_is_kept(run)}") from None
            said = _said(iteration, tokenizer, watches)
            metrics = _metrics(iteration, said)
            clock = made.roles.clock
            if iteration.account is not None:
                with clock("trace"):
                    made_of = trace.traces(config, iteration.account, tokenizer, said.responses, state.iteration)
                    run.write(trace_place(state.iteration), trace.plain(made_of), indent=None)
            probes.look(run)
            metrics |= {f"seconds/{phase}": seconds for phase, seconds in clock.seconds.items()}
            if config.profile:
                metrics |= profile(made.roles.clock, made.sizes, iteration.rollout, config.epochs, rate)
            if validation.due(state.iteration, config.iterations):
                made.settle()
                with made.result():
                    metrics["validation"] = validation.judge()
                    if validation.best_at == state.iteration and config.validation.keep_best:
                        write_model(run.path("best"))
                made.reload()
            run.log(state.iteration, metrics | {"seconds": time.time() - started})
            lines.append({"step": state.iteration} | metrics)
            if falls_due(state.iteration, config.sample_every, config.iterations):
                run.log_samples(state.iteration, _samples(iteration, said))
            _warn(run, config, lines, warned)
            devices.release_memory()
            bar.advance("  ".join(f"{k} {metrics[k]:.2f}" for k in ("score", "kl", "ended", *watches)))
            if stop.requested or state.iteration % config.checkpoint_every == 0:
                checkpoint()
            if stop.requested and state.iteration < config.iterations:
                raise interrupted(run, f"iteration {state.iteration} of {config.iterations}")
    if validation.best_at and config.validation.keep_best:
        # a run that was killed after this step finds the model in its place
        if run.path("best").is_dir():
            _keep(run.path("best"), run.path("model"))
        elif not run.path("model").is_dir():
            raise RunError(f"{run.path('best')}: the best model so far is gone; start anew with another out=…")
    else:
        with made.result():
            write_model(run.path("model"))
    if not lines:
        raise RunError(f"{run.path('metrics.jsonl')}: holds no whole line; start anew with another out=…")
    return {
        "iterations": state.iteration,
        "prompts": counted.rows,
        "prompts_cut": counted.cut,
        **validation.summary(),
        **{f"{k}_first": lines[0][k] for k in FIRST_AND_LAST},
        **{f"{k}_last": lines[-1][k] for k in FIRST_AND_LAST},
    }


def _what_is_kept(run: Run) -> str:
    places = sorted(run.path("checkpoints").glob("step-*"))
    return f"The newest checkpoint is {places[-1]}" if places else "There is no checkpoint yet"


def _keep(best: Path, model: Path) -> None:
    """The best model so far becomes the run's."""
    shutil.rmtree(model, ignore_errors=True)
    best.rename(model)


@dataclass(frozen=True)
class Said:
    """The prompts and answers of an iteration as text, and what each judge that only watches made of them."""

    prompts: list[str]
    responses: list[str]
    judged: dict[str, list[float]]


def _said(done: algorithm.Iteration, tokenizer: Tokenizer, watches: dict[str, Watch]) -> Said:
    prompts, responses = [p.text for p in done.rollout.prompts], tokenizer.responses(done.rollout)
    return Said(prompts, responses, {name: watch(prompts, responses) for name, watch in watches.items()})


def _metrics(done: algorithm.Iteration, said: Said) -> dict[str, float]:
    """The iteration's numbers, with those that need the answers' text."""
    return done.metrics | {
        "distinct2": distinct(said.responses),
        "repeated3": repeated(said.responses),
        "empty": sum(not text.strip() for text in said.responses) / len(said.responses),
        "score_length": _correlation(done.scores, done.rollout.response_lengths().float()),
        **{name: level(name, values) for name, values in said.judged.items()},
    }


def _correlation(x: torch.Tensor, y: torch.Tensor) -> float:
    """Pearson's r; 0 where one of the two does not vary."""
    if len(x) < 2 or float(x.std()) == 0 or float(y.std()) == 0:
        return 0.0
    r = float(torch.corrcoef(torch.stack([x, y]))[0, 1])
    return r if math.isfinite(r) else 0.0


def _samples(done: algorithm.Iteration, said: Said) -> list[dict[str, Any]]:
    """The first few answers, with all that was made of them."""
    return [
        {
            "prompt": said.prompts[i],
            "response": said.responses[i],
            "score": float(done.scores[i]),
            "kl": float(done.kl[i]),
            "ended": bool(done.rollout.terminated[i]),
            **{name: values[i] for name, values in said.judged.items()},
        }
        for i in range(min(4, len(done.rollout)))
    ]


def _warn(run: Run, config: PPOConfig, lines: list[dict[str, Any]], warned: set[str]) -> None:
    """Says each kind of warning once, on the screen and in events.jsonl; ``lines`` are the run's numbers so far."""
    for sign in health.signs(lines, config.monitors, on_policy=config.pool.on_policy):
        if sign.kind not in warned:
            warned.add(sign.kind)
            run.jsonl.event("warning", sign.message, sign=sign.kind, step=sign.iteration)
            say(sign.message)
