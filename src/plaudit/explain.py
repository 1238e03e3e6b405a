"""A PPO configuration in plain words: what is in force at each step, and which systems do otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from plaudit.config import PPOConfig, preset_keys
from plaudit.presets import PRESETS, Conventions, KLClamp, Whitening
from plaudit.schema import Frozen
from plaudit.unheard import reason

Phrase = Callable[[Any], str]

SPANS = {
    "response": "the answer's tokens",
    "one_after": "the answer's tokens and the position after them, where there is one",
    "row": "every position up to the length limit",
}


def _number(form: str, off: str = "") -> Phrase:
    return lambda value: off if off and not value else form.format(f"{value:g}")


def _of(words: dict[Any, str]) -> Phrase:
    return lambda value: words[value]


def _over(form: str) -> Phrase:
    return lambda value: form.format(SPANS[value])


def _whitening(w: Whitening) -> str:
    words = [f"over {SPANS[w.over]}", "variance divided by N − 1" if w.unbiased else "variance divided by N"]
    words += ["√max(variance, 1e-8) below"] * w.floor + ["the mean kept"] * w.keep_mean
    return ", ".join(words + ["padding goes through the same map"] * (not w.reset))


def _clamp(c: KLClamp) -> str:
    return "unlimited" if str(c) == "none" else f"limited: {c}"


#: step -> keys of the configuration that decide it, each with the words for a value
STEPS: dict[str, dict[str, Phrase]] = {
    "Sampling": {
        "sampling.temperature": _number("at temperature {}"),
        "sampling.fixed_length": _of({False: "an end token ends an answer", True: "answers run to the limit"}),
        "samples_per_prompt": _number("{} answers a prompt"),
        "pool.size": _number("minibatches from the newest {} rollouts"),
        "pool.refresh_every": _number("the sampling policy is renewed every {} iterations"),
    },
    "Log-probabilities": {
        "conventions.tempered_logprobs": _of(
            {True: "taken at the sampling temperature", False: "taken at temperature 1, whatever was sampled at"}
        ),
    },
    "Score of an answer": {
        "reward_clip": _number("limited to ± {}", "not limited"),
        "conventions.score_position": _of(
            {
                "last": "paid at the last token of the answer",
                "after_end": "paid one position after the answer; at its last token where the row ends there",
                "row_end": "paid at the last position of the row",
            }
        ),
        "dense_reward": _of({False: "paid once, at the end", True: "paid token by token, as prefix scores change"}),
        "truncation": _of(
            {"subtract": "the penalty of an unended answer is taken off", "replace": "the penalty replaces the score"}
        ),
        "truncation_penalty": _number("an unended answer costs {}", "an unended answer costs nothing"),
        "length_penalty": _number("each token costs {}", "length costs nothing"),
    },
    "KL to the reference": {
        "kl.estimator": _of(
            {
                "k1": "estimated by d, the log-ratio of the sampled token (k1)",
                "k2": "estimated by d²/2 (k2)",
                "k3": "estimated by e^(−d) − 1 + d (k3)",
                "abs": "estimated by |d|",
                "full": "summed over the whole vocabulary",
            }
        ),
        "kl.place": _of({"reward": "charged in the token rewards", "loss": "added to the policy loss"}),
        "kl.coef": _number("at {} a nat", "at no price"),
        "kl.controller": _of({"fixed": "a fixed price", "adaptive": "a price that steers KL to its target"}),
        "conventions.kl_over": _over("over {}"),
        "conventions.kl_clamp": _clamp,
        "conventions.kl_gradient": _of(
            {"kl": "in a loss: with the KL's own gradient", "estimator": "in a loss: the estimate is differentiated"}
        ),
    },
    "Token rewards": {
        "whiten_rewards": _of({False: "left as they are", True: "scaled to unit variance"}),
        "conventions.reward_whitening": lambda w: f"scaled {_whitening(w)}",
    },
    "Advantages and returns": {
        "estimator": _of(
            {
                "gae": "by generalised advantage estimation",
                "n_step": "by n-step sums",
                "reinforce": "by REINFORCE with the batch's mean as baseline",
                "rloo": "by leaving one out of the group (RLOO)",
                "grpo": "by the group's z-score (GRPO)",
                "reinforce++": "by the rewards to come, whitened (REINFORCE++)",
            }
        ),
        "n_steps": _number("n-step sums over {}"),
        "gamma": _number("discount {}"),
        "lam": _number("λ {}"),
        "conventions.credit_over": _over("recursion over {}"),
        "conventions.values_over": _over("V counts over {}, and is 0 elsewhere"),
        "bootstrap_truncated": _of({False: "0 after a truncated answer", True: "V after a truncated answer"}),
        "value_target": _of({"lambda_return": "returns: A + V", "discounted_sum": "returns: summed rewards"}),
        "conventions.whiten_advantages": _of({True: "advantages are whitened", False: "advantages are not whitened"}),
        "conventions.advantage_whitening": lambda w: f"whitening {_whitening(w)}",
    },
    "Policy loss": {
        "clip_range": _number("ratio limited to 1 ± {}"),
        "clip_range_above": _number("above 1 limited by {}", "the same above 1"),
        "stop_kl": _number("updates stop at ½(log-ratio)² of {}", "updates do not stop early"),
        "dual_clip": _number("a negative advantage costs at most {} times itself", "no dual clip"),
        "conventions.ratio_clamp": _number("log-ratio limited to ± {}", "log-ratio not limited"),
        "conventions.skip_above_mean_ratio": _number(
            "a minibatch with a mean ratio above {} is skipped", "no minibatch is skipped for its ratio"
        ),
        "loss_reduction": _of(
            {
                "token-mean": "mean over all tokens",
                "seq-mean-token-sum": "mean over answers of their sums",
                "seq-mean-token-mean": "mean over answers of their means",
            }
        ),
        "entropy_coef": _number("entropy bonus {}", "no entropy bonus"),
    },
    "Value loss": {
        "value_clip_range": _number("values limited to the old ones ± {}", "not clipped"),
        "conventions.value_loss_over": _over("over {}"),
        "vf_coef": _number("weight {} in the total of both losses"),
        "critic_from": _of(
            {
                "auto": "the critic starts as the reward model, where there is one",
                "reward": "the critic starts as the reward model",
                "actor": "the critic starts as the actor",
            }
        ),
        "critic_warmup": _number("the critic learns alone for {} iterations", "actor and critic learn from the start"),
    },
    "Besides": {
        "ptx.coef": _number("language-model loss on texts of yours, weighed {}", "no texts of yours besides (PTX)"),
        "ema_decay": _number("the model is an average of the weights, decay {}", "the model is the last step's"),
        "pool.importance_cap": _number(
            "tokens weighed by min({}, π_trainer / π_engine)", "the engine's gap is measured, not corrected"
        ),
    },
}

#: the same for each of the two optimizers
OPTIMIZER: dict[str, Phrase] = {
    "optimizer": str,
    "betas": lambda b: f"β {b[0]:g}, {b[1]:g}",
    "eps": _number("ε {}"),
    "eps_corrected": _of({True: "ε beside the corrected moment", False: "ε beside the moment as it is"}),
    "weight_decay": _number("matrices decay by {}", "no weight decay"),
    "schedule": _of({"linear": "rate falls linearly", "cosine": "rate falls as a cosine", "constant": "constant rate"}),
    "schedule_per": _of({"step": "with every step", "rollout": "with every rollout"}),
    "learning_rate": _number("peak rate {}"),
    "warmup_steps": _number("{} steps of warm-up", "no warm-up by steps"),
    "warmup_fraction": _number("{} of all steps warm up", "no warm-up by share"),
    "final_fraction": _number("{} of the peak is left at the end", "nothing is left at the end"),
    "max_grad_norm": _number("gradient norm limited to {}", "gradient norm not limited"),
    "skip_nonfinite": _of({False: "a gradient that is not finite stops the run", True: "… is left out"}),
}
for _role in ("actor", "critic"):
    STEPS[f"Optimizer of the {_role}"] = {f"{_role}.{key}": phrase for key, phrase in OPTIMIZER.items()}

#: steps of which a system's preset may be silent: there every run of that system has values of its own
A_RUNS_OWN = ("Sampling", "Optimizer of the actor", "Optimizer of the critic")

#: key -> the step in which a function of the user's takes our place
OWN = {
    "functions.token_rewards": "Token rewards",
    "functions.advantages": "Advantages and returns",
    "functions.policy_loss": "Policy loss",
}


def explain(config: PPOConfig) -> Iterator[str]:
    """The lines of the explanation."""
    name = config.conventions.preset
    presets = {system: preset_config(system) for system in PRESETS}
    changed = deviations(config.conventions)
    yield f"conventions: {name}" + (f", but for {', '.join(changed)}" if changed else "")
    if changed and (name != "plaudit" or len(changed) > 1):
        yield "  (this mixture is not tested: tested are the presets, and single deviations from plaudit)"
    without: dict[str, list[str]] = {}
    for step, keys in STEPS.items():
        if all(reason(config, key) for key in keys):
            for key in keys:
                without.setdefault(reason(config, key).partition(";")[0], []).append(key)
            continue
        yield ""
        yield step
        for key, place in OWN.items():
            if place == step and (spec := value_at(config, key)):
                yield f"  {'by your own function':66}  {key} = {spec}"
        for key, phrase in keys.items():
            value = value_at(config, key)
            if why := reason(config, key):
                without.setdefault(why.partition(";")[0], []).append(key)
                continue
            yield f"  {phrase(value):66}  {key} = {_plain(value)}"
            others: dict[str, list[str]] = {}
            for system, preset in presets.items():
                theirs = value_at(preset, key)
                if theirs != value and (step not in A_RUNS_OWN or _sets(system, key)):
                    others.setdefault(phrase(theirs), []).append(system)
            for words, systems in others.items():
                yield f"      {', '.join(systems)}: {words}"
    if without:
        yield ""
        yield "Without effect here"
        for why, silent in without.items():
            whole = [f"{role}.*" for role in ("actor", "critic") if f"{role}.optimizer" in silent]
            single = [key for key in silent if f"{key.partition('.')[0]}.*" not in whole]
            yield f"  {why}: {', '.join(single + whole)}"


def _sets(system: str, key: str) -> bool:
    """Whether a system's preset says anything of a key; what it does not say is Plaudit's, and `plaudit` has it all."""
    keys: Any = preset_keys(PRESETS[system])
    for part in key.split("."):
        if not isinstance(keys, dict) or part not in keys:
            return system == "plaudit"
        keys = keys[part]
    return True


def preset_config(system: str) -> PPOConfig:
    """A run's configuration under a preset, with nothing else set."""
    return PPOConfig().rebased({"conventions": {"preset": system}})


def deviations(c: Conventions) -> list[str]:
    """The choices in which a run's conventions differ from the preset they name."""
    preset = PRESETS[c.preset].conventions
    return [f"conventions.{key}" for key in Conventions.model_fields if getattr(c, key) != getattr(preset, key)]


def value_at(config: Frozen, key: str) -> Any:
    """The value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _plain(value: Any) -> str:
    if isinstance(value, Frozen):
        return "…"
    return f"{value:g}" if isinstance(value, float) else str(value)
