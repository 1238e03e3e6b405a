"""Keys of a PPO run that the rest of its configuration leaves without effect.

A setting that does nothing is refused rather than passed over: whoever wrote it meant something by it. Kept as a table
so that the refusal and `plaudit explain` say the same. What a preset sets and the run does not need is no mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from plaudit.schema import Frozen

if TYPE_CHECKING:
    from plaudit.config import PPOConfig

#: estimators of the advantages that need no critic, and those that compare the answers to one prompt
CRITIC_FREE = ("reinforce", "rloo", "grpo", "reinforce++")
GROUPED = ("rloo", "grpo")


@dataclass(frozen=True)
class Rule:
    """``keys`` (dotted; a section stands for all its keys) matter only where ``heard`` is true.

    ``why`` and ``instead`` are filled in with the configuration: what silences the keys, and what to set instead.
    """

    keys: tuple[str, ...]
    heard: Callable[[PPOConfig], bool]
    why: str
    instead: str


OF_THE_CRITIC = (
    "critic",
    "critic_warmup",
    "critic_from",
    "critic_head",
    "bootstrap_truncated",
    "value_target",
    "value_clip_range",
    "conventions.values_over",
    "conventions.value_loss_over",
)
OF_VALIDATION = tuple(f"validation.{key}" for key in ("every", "count", "keep_best", "patience"))

RULES = (
    Rule(
        OF_THE_CRITIC,
        lambda c: c.estimator not in CRITIC_FREE,
        "estimator={c.estimator} has no critic",
        "take the key out, or use estimator=gae",
    ),
    Rule(
        ("n_steps",),
        lambda c: c.estimator == "n_step",
        "estimator={c.estimator} does not know it",
        "use estimator=n_step",
    ),
    Rule(("lam",), lambda c: c.estimator == "gae", "estimator={c.estimator} does not know it", "use estimator=gae"),
    Rule(
        ("gamma",),
        lambda c: c.estimator not in GROUPED,
        "estimator={c.estimator} compares whole answers and discounts nothing",
        "use another estimator",
    ),
    Rule(
        ("lam", "gamma", "value_target"),
        lambda c: not c.functions.advantages,
        "functions.advantages takes the estimator's place",
        "let your function use it",
    ),
    Rule(
        ("clip_range", "clip_range_above", "dual_clip"),
        lambda c: not c.functions.policy_loss,
        "functions.policy_loss takes the clipped loss's place",
        "let your function use it",
    ),
    Rule(
        ("critic",),
        lambda c: c.arrangement.kind != "shared_trunk",
        "with arrangement.kind=shared_trunk actor and critic step together",
        "take the key out, and set the actor's keys and vf_coef",
    ),
    Rule(
        ("vf_coef",),
        lambda c: c.arrangement.kind == "shared_trunk" and c.estimator not in CRITIC_FREE,
        "the critic has an optimizer of its own, or there is none",
        "use critic.learning_rate, or arrangement.kind=shared_trunk",
    ),
    Rule(
        ("conventions.reward_whitening",),
        lambda c: c.whiten_rewards,
        "token rewards are not whitened",
        "set whiten_rewards=true",
    ),
    Rule(
        ("conventions.whiten_advantages", "conventions.advantage_whitening"),
        lambda c: c.estimator not in GROUPED,
        "estimator={c.estimator} compares within its groups, which whitening would mix",
        "use another estimator",
    ),
    Rule(
        ("conventions.advantage_whitening",),
        lambda c: c.conventions.whiten_advantages,
        "advantages are not whitened",
        "set conventions.whiten_advantages=true",
    ),
    Rule(
        ("conventions.kl_gradient",),
        lambda c: c.kl.place == "loss",
        "KL is charged in the reward",
        "use kl.place=loss",
    ),
    Rule(
        ("arrangement.blocks",),
        lambda c: c.arrangement.kind == "frozen_trunk",
        "arrangement.kind={c.arrangement.kind} does not know it",
        "use arrangement.kind=frozen_trunk",
    ),
    Rule(
        ("kl.target", "kl.horizon"),
        lambda c: c.kl.controller == "adaptive",
        "the coefficient is fixed",
        "use kl.controller=adaptive",
    ),
    Rule(
        ("kl.place",),
        lambda c: c.kl.coef > 0,
        "kl.coef is 0, so KL is measured and not charged",
        "set kl.coef, for example 0.05",
    ),
    Rule(
        ("conventions.kl_clamp.only",),
        lambda c: bool(c.conventions.kl_clamp.argument or c.conventions.kl_clamp.estimate),
        "nothing is limited",
        "set conventions.kl_clamp.argument or conventions.kl_clamp.estimate",
    ),
    Rule(
        ("pool.max_age",),
        lambda c: not c.pool.on_policy,
        "no experience is older than its iteration",
        "set pool.size, pool.refresh_every or pool.overlap",
    ),
    Rule(
        ("actor.final_fraction",),
        lambda c: c.actor.schedule != "constant",
        "with actor.schedule=constant the rate stays",
        "use actor.schedule=linear or cosine",
    ),
    Rule(
        ("critic.final_fraction",),
        lambda c: c.critic.schedule != "constant",
        "with critic.schedule=constant the rate stays",
        "use critic.schedule=linear or cosine",
    ),
    Rule(
        ("ptx.data", "ptx.batch_size", "ptx.max_length"),
        lambda c: c.ptx.coef > 0,
        "ptx.coef is 0",
        "set ptx.coef, for example 1.0",
    ),
    Rule(
        OF_VALIDATION,
        lambda c: bool(c.validation.prompts),
        "nothing is validated",
        "set validation.prompts and validation.judge",
    ),
    Rule(
        ("trace.every", "trace.alternatives"),
        lambda c: c.trace.answers > 0,
        "trace.answers is 0",
        "set trace.answers, for example 4",
    ),
    Rule(
        ("probe.every",),
        lambda c: c.probe.prompts > 0,
        "probe.prompts is 0",
        "set probe.prompts, for example 4",
    ),
    Rule(
        ("ensemble.combine",),
        lambda c: bool(c.ensemble.members),
        "there is one reward model",
        "set ensemble.members",
    ),
    Rule(
        ("ensemble.coef",),
        lambda c: bool(c.ensemble.members) and c.ensemble.combine == "lower",
        "only the lower bound of several reward models knows it",
        "use ensemble.members and ensemble.combine=lower",
    ),
)


def reason(config: PPOConfig, key: str) -> str:
    """Why ``key`` has no effect, and what to set instead; empty where it has one."""
    for rule in RULES:
        if any(key == name or key.startswith(f"{name}.") for name in rule.keys) and not rule.heard(config):
            return f"{rule.why.format(c=config)}; {rule.instead}"
    return ""


def changed(config: Frozen, base: Frozen, prefix: str = "") -> Iterator[str]:
    """The dotted keys in which two configurations of one kind differ."""
    for name in type(config).model_fields:
        mine: Any = getattr(config, name)
        theirs = getattr(base, name)
        if isinstance(mine, Frozen):
            yield from changed(mine, theirs, f"{prefix}{name}.")
        elif mine != theirs:
            yield prefix + name
