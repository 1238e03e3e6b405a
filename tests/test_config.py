"""Configurations: strict, frozen, with advice; nothing is built from one that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from plaudit import config as configs
from plaudit.config import PPOConfig, QuickstartConfig, SFTConfig
from plaudit.errors import ConfigError
from plaudit.schema import Frozen, build, dump, leaves, read


def all_schemas() -> list[type[Frozen]]:
    found, waiting = [], [Frozen]
    while waiting:
        kinds = waiting.pop().__subclasses__()
        found += [k for k in kinds if k.__module__ == configs.__name__]
        waiting += kinds
    return sorted(set(found), key=lambda k: k.__name__)


SCHEMAS = pytest.mark.parametrize("schema", all_schemas(), ids=lambda s: s.__name__)


# --- unknown keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "override", "nearest"),
    [
        (SFTConfig, "epoch=2", "epochs"),
        (SFTConfig, "max_lenght=12", "max_length"),
        (SFTConfig, "optimizer.learning_rat=0.1", "optimizer.learning_rate"),
        (PPOConfig, "kl.coeff=0.1", "kl.coef"),
        (PPOConfig, "kl.controler='fixed'", "kl.controller"),
        (PPOConfig, "sampling.temprature=1.0", "sampling.temperature"),
        (PPOConfig, "temperature=1.0", "sampling.temperature"),
        (PPOConfig, "lambda=0.9", "lam"),
        (QuickstartConfig, "ppo.kl.coeff=0.1", "ppo.kl.coef"),
        (QuickstartConfig, "ppo.batchsize=8", "ppo.batch_size"),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(schema: type[Frozen], override: str, nearest: str):
    with pytest.raises(ConfigError) as error:
        read(schema, None, [override])
    assert repr(override.split("=")[0]) in str(error.value)
    assert f"did you mean {nearest!r}?" in str(error.value)


@pytest.mark.parametrize(
    ("schema", "section", "nearest"),
    [
        (PPOConfig, "smapling", "sampling"),
        (PPOConfig, "arangement", "arrangement"),
        (QuickstartConfig, "rewards", "reward"),
    ],
)
def test_an_unknown_section_is_an_error_that_names_the_nearest_section(
    schema: type[Frozen], section: str, nearest: str
):
    with pytest.raises(ConfigError) as error:
        build(schema, {section: {"seed": 1}})
    assert repr(section) in str(error.value)
    advice = str(error.value).partition("did you mean ")[2]
    assert advice.strip("'?").split(".")[0] == nearest


def test_a_key_that_resembles_nothing_gets_the_list_of_known_keys():
    with pytest.raises(ConfigError) as error:
        read(configs.LabelConfig, None, ["zzzzqqqq=1"])
    for name in configs.LabelConfig.model_fields:
        assert name in str(error.value)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "override"),
    [
        (SFTConfig, "epochs=0"),
        (SFTConfig, "seed=-1"),
        (SFTConfig, "max_length=1"),
        (SFTConfig, "optimizer.learning_rate=-0.1"),
        (SFTConfig, "optimizer.learning_rate=nan"),
        (SFTConfig, "optimizer.learning_rate=inf"),
        (SFTConfig, "optimizer.final_fraction=1.5"),
        (SFTConfig, "optimizer.eps=0.0"),
        (SFTConfig, "optimizer.betas=[1.5, 0.999]"),
        (SFTConfig, "optimizer.betas=[0.9]"),
        (SFTConfig, "optimizer.schedule='quadratic'"),
        (configs.RewardConfig, "held_out=1.0"),
        (configs.RewardConfig, "held_out=0.0"),
        (configs.CollectConfig, "k=1"),
        (PPOConfig, "gamma=1.1"),
        (PPOConfig, "lam=-0.1"),
        (PPOConfig, "clip_range=0.0"),
        (PPOConfig, "kl.target=0.0"),
        (PPOConfig, "kl.horizon=-1.0"),
        (PPOConfig, "kl.estimator='k4'"),
        (PPOConfig, "sampling.temperature=0.0"),
        (PPOConfig, "sampling.temperature=-1.0"),
        (PPOConfig, "minibatches=65"),
        (PPOConfig, "arrangement.kind='together'"),
        (configs.EvaluateConfig, "judges=[]"),
        (QuickstartConfig, "ppo.sampling.max_new_tokens=0"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_key(schema: type[Frozen], override: str):
    with pytest.raises(ConfigError) as error:
        read(schema, None, [override])
    assert override.split("=")[0] in str(error.value)


@pytest.mark.parametrize("override", ["epochs=1.5", "epochs='3'", "epochs=true", "epochs=many", "data=7", "seed=[1]"])
def test_values_are_not_coerced(override: str):
    with pytest.raises(ConfigError) as error:
        read(SFTConfig, None, [override])
    assert override.split("=")[0] in str(error.value)


def test_the_message_names_the_file_and_the_value(tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text("[optimizer]\nlearning_rate = -3.0\n")
    with pytest.raises(ConfigError) as error:
        read(SFTConfig, file)
    assert str(file) in str(error.value) and "-3.0" in str(error.value)


# --- overrides and files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "path", "expected"),
    [
        ("out=runs/mine", "out", "runs/mine"),
        ("out='runs/mine'", "out", "runs/mine"),
        ("out=C:\\runs\\mine", "out", "C:\\runs\\mine"),
        ("out=a=b", "out", "a=b"),
        ("reward=my/rewards.py:length", "reward", "my/rewards.py:length"),
        ("seed=7", "seed", 7),
        ("gamma=0.5", "gamma", 0.5),
        ("gamma=1", "gamma", 1.0),
        ("actor.learning_rate=3e-5", "actor.learning_rate", 3e-5),
        ("actor.betas=[0.8, 0.95]", "actor.betas", (0.8, 0.95)),
        ("monitors=['gold', 'mine.py:f']", "monitors", ["gold", "mine.py:f"]),
        ("kl.coef=0.25", "kl.coef", 0.25),
        ("kl={coef = 0.25}", "kl.coef", 0.25),
        ("kl.controller=adaptive", "kl.controller", "adaptive"),
    ],
)
def test_overrides_are_read_as_toml_or_else_as_text(override: str, path: str, expected: Any):
    value: Any = read(PPOConfig, None, [override])
    for name in path.split("."):
        value = getattr(value, name)
    assert value == expected and type(value) is type(expected)


def test_an_override_of_one_key_leaves_its_section_at_the_defaults_of_that_command():
    config = read(PPOConfig, None, ["actor.eps=1e-6", "sampling.max_new_tokens=5"])
    assert config.actor == PPOConfig().actor.model_copy(update={"eps": 1e-6})
    assert config.sampling == PPOConfig().sampling.model_copy(update={"max_new_tokens": 5})


def test_overrides_beat_the_file_and_the_file_beats_the_defaults(tmp_path: Path):
    file = tmp_path / "ppo.toml"
    file.write_text("seed = 3\niterations = 5\n[kl]\ncoef = 0.1\nestimator = 'k3'\n")
    config = read(PPOConfig, file, ["iterations=6", "kl.coef=0.2"])
    assert (config.seed, config.iterations, config.kl.coef, config.kl.estimator) == (3, 6, 0.2, "k3")
    assert config.batch_size == PPOConfig().batch_size


def test_the_last_of_two_overrides_counts():
    assert read(SFTConfig, None, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize("text", ["seed", "=1", ""])
def test_what_is_no_override_is_an_error_that_shows_the_form(text: str):
    with pytest.raises(ConfigError, match="key=value"):
        read(SFTConfig, None, [text])


@pytest.mark.parametrize("overrides", [["optimizer=3"], ["optimizer=adam"], ["optimizer=[1, 2]"]])
def test_a_section_given_a_scalar_is_an_error_that_shows_how_to_set_its_keys(overrides: list[str]):
    with pytest.raises(ConfigError, match=r"optimizer is a section.*optimizer\.learning_rate="):
        read(SFTConfig, None, overrides)


def test_a_key_below_a_value_is_an_error():
    with pytest.raises(ConfigError, match="seed"):
        read(SFTConfig, None, ["seed=1", "seed.more=2"])
    with pytest.raises(ConfigError, match="seed"):
        read(SFTConfig, None, ["seed.more=2"])


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match="absent.toml: no such file"):
        read(SFTConfig, tmp_path / "absent.toml")


@pytest.mark.parametrize("content", [b"seed = = 1\n", b"[optimizer\n", b"seed = 1\nseed = 2\n", b"out = '\xff\xfe'\n"])
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes):
    file = tmp_path / "broken.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match="broken.toml"):
        read(SFTConfig, file)


def test_a_folder_is_no_configuration(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read(SFTConfig, tmp_path)


# --- every configuration ----------------------------------------------------------------------------------------------


@SCHEMAS
def test_defaults_survive_json_and_back(schema: type[Frozen]):
    """The defaults themselves keep the rules, and config.json rebuilds the configuration."""
    stored = json.loads(json.dumps(dump(schema()), allow_nan=False))
    assert build(schema, stored) == schema()


def test_changed_values_survive_json_and_back():
    config = read(
        QuickstartConfig,
        None,
        ["seed=5", "ppo.actor.betas=[0.8, 0.9]", "ppo.kl.coef=0.2", "evaluate.judges=['vader']", "sft.data=a b.jsonl"],
    )
    assert build(QuickstartConfig, json.loads(json.dumps(dump(config)))) == config


@SCHEMAS
def test_nothing_changes_after_reading(schema: type[Frozen]):
    config = schema()
    for name in schema.model_fields:
        with pytest.raises(ValidationError):
            setattr(config, name, getattr(config, name))


@SCHEMAS
def test_every_key_has_a_description(schema: type[Frozen]):
    keys = list(leaves(schema))
    assert len({name for name, *_ in keys}) == len(keys) > 0
    assert [name for name, _, _, text in keys if not text.strip()] == []


def test_leaves_name_every_key_as_an_override_would():
    for name, _, default, _ in leaves(PPOConfig):
        value = json.dumps(list(default) if isinstance(default, tuple) else default)
        assert read(PPOConfig, None, [f"{name}={value}"]) == PPOConfig(), name
