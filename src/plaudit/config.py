"""Configuration: strict, frozen, read from TOML and ``key=value`` overrides, checked before anything is built.

The descriptions below are the reference: ``--help`` and docs/configuration.md are made from them. This module leaves
out what a configuration turns into (see recipes).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from plaudit.errors import ConfigError

C = TypeVar("C", bound="Frozen")


class Frozen(BaseModel):
    """Base of every configuration: unknown keys are errors, values are not coerced, nothing changes after reading."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class SamplingConfig(Frozen):
    temperature: float = Field(1.0, ge=0, le=10, description="divides the logits; 0 takes the likeliest token")
    max_new_tokens: int = Field(32, ge=1, description="length limit of an answer, in tokens")


class OptimizerConfig(Frozen):
    learning_rate: float = Field(1e-4, ge=0, le=10, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    schedule: Literal["linear", "cosine", "constant"] = Field("linear", description="what follows the warm-up")
    final_fraction: float = Field(0.0, ge=0, le=1, description="share of the peak rate left at the last step")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay rates of the two moments")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay, on matrices only")
    max_grad_norm: float = Field(1.0, ge=0, description="gradient norm is clipped to this; 0 leaves it")
    micro_batch_tokens: int = Field(512, ge=1, description="tokens a forward pass; changes memory, not the result")

    @model_validator(mode="before")
    @classmethod
    def _pair(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("betas"), list):
            data = data | {"betas": tuple(data["betas"])}
        return data

    @field_validator("betas")
    @classmethod
    def _decays(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("decay rates are at least 0 and below 1")
        return betas


PRECISION = (
    "matrix products of all blocks: float32, bfloat16 (their inputs and results are rounded; weights, gradients and "
    "all else stay float32), or auto: bfloat16 on a processor with units for it"
)


class RunConfig(Frozen):
    out: str = Field("", description="run folder; it must not hold a run already (or use --resume)")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="seed of every random stream")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps; auto takes a GPU where there is one")


class SFTConfig(RunConfig):
    out: str = "runs/sft"
    model: str = Field("smollm2", description="smollm2, tiny, a folder or a hub id")
    data: str = Field(
        "reviews/sft", description="texts (text) or prompt and completion: a file, a hub id or reviews/sft"
    )
    rows: int = Field(0, ge=0, description="use this many rows; 0 uses all")
    max_length: int = Field(64, ge=2, description="longer rows are cut to this many tokens")
    train_blocks: int = Field(
        4, ge=0, description="train only the top blocks, over a frozen trunk; 0 trains all weights"
    )
    precision: Literal["float32", "bfloat16", "auto"] = Field("float32", description=PRECISION)
    epochs: int = Field(1, ge=1, description="passes over the data")
    batch_size: int = Field(8, ge=1, description="rows an optimizer step")
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=3e-4, warmup_steps=5)


class CollectConfig(RunConfig):
    out: str = "runs/collect"
    model: str = Field("runs/sft/model", description="the policy that answers")
    prompts: str = Field(
        "reviews/prompts", description="prompts (column prompt or messages): a file, a hub id, reviews/…"
    )
    count: int = Field(
        64, ge=0, description="number of prompts, taken from the start; 0 samples none (with comparisons)"
    )
    k: int = Field(4, ge=2, description="answers a prompt")
    sampling: SamplingConfig = SamplingConfig()
    store: str = Field("runs/preferences.sqlite", description="the preference store (SQLite)")
    comparisons: str = Field(
        "", description="ready-made human judgements to add: a file of prompt, chosen, rejected, or reviews/comparisons"
    )

    @model_validator(mode="after")
    def _something(self) -> Self:
        if not self.count and not self.comparisons:
            raise ValueError("count is 0 and comparisons is empty: nothing would be collected; set one of them")
        if self.count and self.sampling.temperature == 0:
            raise ValueError("sampling.temperature: 0 gives the same answer k times; use for example 1.0")
        return self


class LabelConfig(RunConfig):
    out: str = "runs/label"
    store: str = Field("runs/preferences.sqlite", description="the preference store (SQLite)")
    limit: int = Field(0, ge=0, description="label this many comparisons; 0 labels all that have no label yet")


class RewardConfig(RunConfig):
    out: str = "runs/reward"
    model: str = Field("runs/sft/model", description="the language model to start from")
    store: str = Field("runs/preferences.sqlite", description="the preference store (SQLite)")
    held_out: float = Field(0.2, gt=0, lt=1, description="share of comparisons kept for measuring, split by prompt")
    loss: Literal["pairwise", "averaged_losers"] = Field(
        "pairwise", description="all pairs of a ranking, or each winner against the mean of those it beats"
    )
    max_length: int = Field(96, ge=2, description="longer texts lose their beginning")
    train_blocks: int = Field(
        4, ge=0, description="train only the top blocks, over a frozen trunk; 0 trains all weights"
    )
    precision: Literal["float32", "bfloat16", "auto"] = Field("float32", description=PRECISION)
    epochs: int = Field(1, ge=1, description="passes over the comparisons")
    batch_answers: int = Field(32, ge=2, description="answers an optimizer step; a comparison is never cut")
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1.25e-4, warmup_steps=5, micro_batch_tokens=1024)


class ArrangementConfig(Frozen):
    kind: Literal["separate", "shared_trunk", "frozen_trunk"] = Field(
        "frozen_trunk",
        description="separate: four models; shared_trunk: the critic is a head on the actor; "
        "frozen_trunk: all roles share frozen lower blocks, computed once a rollout",
    )
    blocks: int = Field(4, ge=1, description="frozen_trunk: how many top blocks each role owns and trains")
    precision: Literal["float32", "bfloat16", "auto"] = Field(
        "float32",
        description="frozen_trunk: matrix products of trunk and critic, as for SFT; above the trunk, actor, reference "
        "and reward model multiply in float32 always, so that the ratio is exact",
    )


class KLConfig(Frozen):
    coef: float = Field(0.05, ge=0, description="price of one nat, charged at every token")
    estimator: Literal["k1", "k2", "k3", "abs"] = Field("k1", description="per-token estimate; see docs/ppo.md")
    controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="adaptive steers the coefficient to the target"
    )
    target: float = Field(6.0, gt=0, description="adaptive: KL a response, in nats")
    horizon: float = Field(10000.0, gt=0, description="adaptive: responses over which the coefficient adjusts")


class PPOConfig(RunConfig):
    out: str = "runs/ppo"
    model: str = Field("runs/sft/model", description="the actor's start, and the frozen reference")
    reward: str = Field(
        "runs/reward/model", description="a reward model's folder, or a Python function: file.py:name or module:name"
    )
    prompts: str = Field(
        "reviews/prompts", description="prompts (column prompt or messages): a file, a hub id, reviews/…"
    )
    max_prompt_tokens: int = Field(512, ge=1, description="longest prompt, in tokens")
    long_prompts: Literal["error", "keep_end"] = Field(
        "error", description="a prompt that is too long: refuse it, or keep its end (counted)"
    )
    arrangement: ArrangementConfig = ArrangementConfig()
    critic_from: Literal["auto", "reward", "actor"] = Field(
        "auto", description="where the critic starts: the reward model (auto, where there is one), or the actor"
    )
    sampling: SamplingConfig = SamplingConfig(temperature=0.8)
    iterations: int = Field(25, ge=1, description="rounds of act, judge, assign credit, improve, publish")
    batch_size: int = Field(64, ge=1, description="prompts an iteration")
    epochs: int = Field(2, ge=1, description="passes over each iteration's experience")
    minibatches: int = Field(4, ge=1, description="optimizer steps a pass")
    gamma: float = Field(1.0, gt=0, le=1, description="discount")
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda: 0 one step, 1 the whole return")
    clip_range: float = Field(0.2, gt=0, description="the ratio is clipped to 1 ± this")
    value_clip_range: float = Field(0.2, ge=0, description="values are clipped to the old ones ± this; 0 leaves them")
    vf_coef: float = Field(0.5, ge=0, description="weight of the value loss where the trunk is shared")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    truncation_penalty: float = Field(1.0, ge=0, description="taken off the score of an answer that did not end itself")
    kl: KLConfig = KLConfig()
    actor: OptimizerConfig = OptimizerConfig(learning_rate=4e-4, warmup_steps=8, final_fraction=0.1)
    critic: OptimizerConfig = OptimizerConfig(learning_rate=4e-4, warmup_steps=8, final_fraction=0.1)
    monitors: list[str] = Field(
        [], description="judges that only watch: gold, vader, or functions (file.py:name); they never steer"
    )
    checkpoint_every: int = Field(10, ge=1, description="iterations between checkpoints")
    sample_every: int = Field(1, ge=1, description="iterations between samples written to samples.jsonl")

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature: PPO needs sampled answers; 0 is greedy. Use for example 0.8")
        if self.arrangement.kind == "shared_trunk" and self.critic_from == "reward":
            raise ValueError(
                "critic_from: with shared_trunk the critic is a new head on the actor; use critic_from=auto"
            )
        if self.minibatches > self.batch_size:
            raise ValueError(
                f"minibatches ({self.minibatches}) exceeds batch_size ({self.batch_size}); lower it or raise batch_size"
            )
        return self


class EvaluateConfig(RunConfig):
    out: str = "runs/evaluate"
    model: str = Field("runs/ppo/model", description="the model to judge")
    reference: str = Field("runs/sft/model", description="the model it is compared with")
    reward: str = Field("", description="reward model whose scores are shown beside the judges; empty: none")
    prompts: str = Field("reviews/evaluation", description="held-out prompts: a file, a hub id or reviews/evaluation")
    count: int = Field(256, ge=0, description="number of prompts, from the start; 0 uses all")
    sampling: SamplingConfig = SamplingConfig(temperature=0.8)
    judges: list[str] = Field(
        ["gold", "vader"],
        min_length=1,
        description="gold, vader or functions (file.py:name); the first decides the win rate",
    )


class QuickstartConfig(RunConfig):
    out: str = "runs/quickstart"
    model: str = Field("smollm2", description="smollm2, a folder or a hub id")
    sft: SFTConfig = SFTConfig(rows=720, precision="auto")
    collect: CollectConfig = CollectConfig(comparisons="reviews/comparisons")
    label: LabelConfig = LabelConfig(limit=48)
    reward: RewardConfig = RewardConfig(precision="auto")
    ppo: PPOConfig = PPOConfig(monitors=["gold", "vader"], arrangement=ArrangementConfig(precision="auto"))
    evaluate: EvaluateConfig = EvaluateConfig()

    @model_validator(mode="after")
    def _wired(self) -> Self:
        """The quickstart connects its stages itself; a key that it would overwrite is refused, not ignored."""
        for stage, keys in WIRED.items():
            default = type(self).model_fields[stage].default
            for key in ("out", "seed", "device", *keys):
                if getattr(getattr(self, stage), key) != getattr(default, key):
                    advice = (
                        f"set {key}=… for the whole"
                        if key in ("out", "seed", "device", "model")
                        else "it connects the stages"
                    )
                    raise ValueError(f"{stage}.{key}: the quickstart sets this itself; {advice}")
        return self


#: keys of the quickstart's stages that follow from its own
WIRED = {
    "sft": ("model",),
    "collect": ("model", "store"),
    "label": ("store",),
    "reward": ("model", "store"),
    "ppo": ("model", "reward"),
    "evaluate": ("model", "reference", "reward"),
}


class ChatConfig(Frozen):
    sampling: SamplingConfig = SamplingConfig(temperature=0.8, max_new_tokens=256)
    seed: int = Field(0, ge=0, description="seed of the answers")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps; auto takes a GPU where there is one")
    raw: bool = Field(False, description="complete the text as it stands, without the chat template")


class ScoreConfig(Frozen):
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps; auto takes a GPU where there is one")
    out: str = Field("", description="file for the scores (JSONL); empty: print them")


def leaves(schema: type[Frozen], prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """Every key of a configuration: dotted name, type, default, description."""
    yield from _leaves(schema, schema(), prefix)


def _leaves(schema: type[Frozen], default: Frozen, prefix: str) -> Iterator[tuple[str, str, Any, str]]:
    for name, info in schema.model_fields.items():
        value = getattr(default, name)
        if isinstance(value, Frozen):
            yield from _leaves(type(value), value, f"{prefix}{name}.")
        else:
            choices = get_args(info.annotation)
            kind = (
                " | ".join(map(str, choices)) if choices and not isinstance(choices[0], type) else type(value).__name__
            )
            yield f"{prefix}{name}", kind, value, info.description or _inherited(schema, name)


def _inherited(schema: type[Frozen], name: str) -> str:
    for base in schema.__mro__:
        fields = getattr(base, "model_fields", {})
        if name in fields and fields[name].description:
            return str(fields[name].description)
    return ""


def parse_override(text: str) -> tuple[list[str], Any]:
    """``a.b=value`` as (["a", "b"], value). The value is read as TOML; what is not TOML is a string.

    Raises:
        ConfigError: there is no "=".
    """
    key, equals, raw = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r} is no override; write key=value, for example seed=1")
    try:
        value = tomllib.loads(f"v = {raw}")["v"]
    except tomllib.TOMLDecodeError:
        value = raw
    return key.strip().split("."), value


def read(schema: type[C], file: str | Path | None = None, overrides: Sequence[str] = ()) -> C:
    """The configuration in a TOML file, with overrides applied.

    Raises:
        ConfigError: the file is missing or no TOML, a key is unknown (the nearest is named), a value is out of range.
    """
    data: dict[str, Any] = {}
    if file is not None:
        try:
            data = tomllib.loads(Path(file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"{file}: no such file; recipes/ holds one for every command") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file}: cannot be read as a configuration: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{file}: not valid TOML: {error}") from None
    for text in overrides:
        path, value = parse_override(text)
        _set(data, path, value, text)
    return build(schema, data, str(file) if file is not None else "command line")


def _set(data: dict[str, Any], path: list[str], value: Any, text: str) -> None:
    for part in path[:-1]:
        data = data.setdefault(part, {})
        if not isinstance(data, dict):
            raise ConfigError(f"{text}: {part} is a value, not a section")
    data[path[-1]] = value


def build(schema: type[C], data: dict[str, Any], source: str = "configuration") -> C:
    """A configuration from nested dictionaries; missing keys take the schema's defaults, also inside sections.

    Raises:
        ConfigError: as for :func:`read`.
    """
    try:
        return schema.model_validate(_merge(schema(), data, source))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        got = f", not {first['input']!r}" if where and not isinstance(first["input"], dict) else ""
        raise ConfigError(f"{source}: {where + ': ' if where else ''}{message[0].lower()}{message[1:]}{got}") from None


def _merge(default: Frozen, data: dict[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    merged = {name: getattr(default, name) for name in type(default).model_fields}
    for key, value in data.items():
        if key not in merged:
            raise ConfigError(f"{source}: unknown key {prefix + key!r}{_advice(type(default), prefix, key)}")
        if isinstance(merged[key], Frozen):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{source}: {prefix + key} is a section; set its keys, "
                    f"for example {_example(prefix + key, merged[key])}"
                )
            merged[key] = _merge(merged[key], value, source, f"{prefix}{key}.")
        else:
            merged[key] = value
    return {k: v.model_dump() if isinstance(v, Frozen) else v for k, v in merged.items()}


def _example(prefix: str, section: Frozen) -> str:
    name = next(iter(type(section).model_fields))
    return f"{prefix}.{name}={getattr(section, name)}"


def _advice(schema: type[Frozen], prefix: str, key: str) -> str:
    names = {name: prefix + name for name, *_ in leaves(schema)}
    last: dict[str, str] = {}
    for name, full in names.items():
        last.setdefault(name.rsplit(".", 1)[-1], full)
    sections = {name: prefix + name for name in schema.model_fields if name not in names}
    candidates = last | names | sections
    near = difflib.get_close_matches(key, candidates, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {candidates[near[0]]!r}?"
    return f"; known here: {', '.join(sorted(schema.model_fields))}"


def dump(config: Frozen) -> dict[str, Any]:
    """The resolved configuration as plain JSON types."""
    return config.model_dump(mode="json")
