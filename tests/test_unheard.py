"""A key that does nothing under the rest of a configuration is refused, and taken where it does something."""

from __future__ import annotations

import pytest

from plaudit.config import CRITIC_FREE, PPOConfig
from plaudit.errors import ConfigError
from plaudit.presets import PRESETS
from plaudit.schema import leaves, read
from plaudit.unheard import RULES

RLOO = ("estimator=rloo", "samples_per_prompt=2")
SHARED = ("arrangement.kind=shared_trunk",)
OWN = ("functions.advantages=mine.py:mine",)
LOSS = ("functions.policy_loss=mine.py:mine",)
VALIDATED = ("validation.prompts=reviews/validation", "validation.judge=mine.py:mine")
TWO = ("ensemble.members=['other']",)

#: (a key with a value, where it does nothing, where it does something)
SILENT = [
    ("critic.learning_rate=0.1", RLOO, ()),
    ("critic.betas=[0.5, 0.9]", ("estimator=reinforce",), ()),
    ("critic.max_grad_norm=2.0", SHARED, ("arrangement.kind=separate",)),
    ("critic_warmup=2", ("estimator=reinforce++",), ()),
    ("critic_from=actor", RLOO, ()),
    ("critic_head=zero", RLOO, ()),
    ("bootstrap_truncated=true", RLOO, ()),
    ("value_target=discounted_sum", RLOO, ()),
    ("value_clip_range=0.1", RLOO, ()),
    ("conventions.values_over=one_after", RLOO, ()),
    ("conventions.value_loss_over=one_after", RLOO, ()),
    ("vf_coef=0.2", (), SHARED),
    ("vf_coef=0.2", (*SHARED, "estimator=reinforce"), SHARED),
    ("lam=0.9", ("estimator=n_step",), ()),
    ("lam=0.9", RLOO, ()),
    ("lam=0.9", OWN, ()),
    ("gamma=0.9", RLOO, ("estimator=reinforce",)),
    ("gamma=0.9", OWN, ()),
    ("value_target=discounted_sum", OWN, ()),
    ("n_steps=3", (), ("estimator=n_step",)),
    ("clip_range=0.1", LOSS, ()),
    ("clip_range_above=0.3", LOSS, ()),
    ("dual_clip=3.0", LOSS, ()),
    ("arrangement.blocks=2", ("arrangement.kind=separate",), ()),
    ("kl.target=3.0", (), ("kl.controller=adaptive",)),
    ("kl.horizon=3.0", (), ("kl.controller=adaptive",)),
    ("kl.place=loss", ("kl.coef=0.0",), ()),
    ("conventions.kl_clamp.only=k3", (), ("conventions.kl_clamp.estimate=5.0",)),
    ("pool.max_age=3", (), ("pool.size=2",)),
    ("pool.max_age=4", (), ("pool.overlap=true",)),
    ("actor.final_fraction=0.5", ("actor.schedule=constant",), ()),
    ("critic.final_fraction=0.5", ("critic.schedule=constant",), ("critic.schedule=cosine",)),
    ("ptx.data=reviews/sft", (), ("ptx.coef=0.1",)),
    ("ptx.batch_size=2", ("ptx.data=''",), ("ptx.coef=0.1", "ptx.data=reviews/sft")),
    ("ptx.max_length=12", (), ("ptx.coef=0.1", "ptx.data=reviews/sft")),
    ("validation.every=2", (), VALIDATED),
    ("validation.count=2", (), VALIDATED),
    ("validation.keep_best=false", (), VALIDATED),
    ("validation.patience=2", (), VALIDATED),
    ("ensemble.combine=worst", (), TWO),
    ("ensemble.coef=0.5", TWO, (*TWO, "ensemble.combine=lower")),
    ("conventions.reward_whitening.unbiased=true", (), ("whiten_rewards=true",)),
    ("conventions.whiten_advantages=false", RLOO, ()),
    ("conventions.advantage_whitening.unbiased=true", ("conventions.whiten_advantages=false",), ()),
    ("conventions.kl_gradient=estimator", (), ("kl.place=loss",)),
    ("trace.every=2", ("trace.answers=0",), ()),
    ("trace.alternatives=2", ("trace.answers=0",), ()),
    ("probe.every=2", ("probe.prompts=0",), ()),
]


@pytest.mark.parametrize(("key", "silent", "heard"), SILENT)
def test_a_key_without_effect_is_refused(key: str, silent: tuple[str, ...], heard: tuple[str, ...]):
    name = key.partition("=")[0]
    with pytest.raises(ConfigError, match=f"{name.removesuffix('.unbiased')}.*has no effect here, because"):
        read(PPOConfig, None, [*silent, key])
    read(PPOConfig, None, [*heard, key])


def test_every_key_of_the_table_is_tried_and_is_a_key():
    known = {name for name, *_ in leaves(PPOConfig)}
    tried = {key.partition("=")[0] for key, *_ in SILENT}
    for name in (name for rule in RULES for name in rule.keys):
        assert any(key == name or key.startswith(f"{name}.") for key in known)
        assert any(key == name or key.startswith(f"{name}.") for key in tried), name


@pytest.mark.parametrize("estimator", ["gae", "n_step", *CRITIC_FREE])
@pytest.mark.parametrize("preset", PRESETS)
def test_what_a_preset_brings_and_a_run_does_not_need_is_no_mistake(preset: str, estimator: str):
    for kind in ("separate", "shared_trunk", "frozen_trunk"):
        keys = [f"conventions.preset={preset}", f"estimator={estimator}", f"arrangement.kind={kind}"]
        read(PPOConfig, None, [*keys, "samples_per_prompt=2"])
