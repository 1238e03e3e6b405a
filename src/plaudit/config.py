"""What can be configured.

The descriptions below are the reference: ``--help`` and docs/configuration.md are made from them. This module leaves
out how configurations are read (see schema) and what they turn into (see recipes).
"""

from __future__ import annotations

import re
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from plaudit.presets import PRESETS, Conventions, Hyper, Preset
from plaudit.schema import Frozen, overlaid
from plaudit.schema import build as build
from plaudit.schema import read as read
from plaudit.unheard import CRITIC_FREE as CRITIC_FREE
from plaudit.unheard import GROUPED as GROUPED
from plaudit.unheard import changed, reason


class SamplingConfig(Frozen):
    temperature: float = Field(1.0, ge=0, le=10, description="divides the logits; 0 takes the likeliest token")
    max_new_tokens: int = Field(32, ge=1, description="length limit of an answer, in tokens")
    top_p: float = Field(1.0, gt=0, le=1, description="draw from the likeliest tokens that make up this much; 1: all")
    top_k: int = Field(0, ge=0, description="draw from this many likeliest tokens; 0: all")
    stop: list[str] = Field([], description="an answer ends with any of these texts too, which stay a part of it")
    fixed_length: bool = Field(False, description="answers run to the limit; an end token is a token like others")

    @model_validator(mode="after")
    def _stops(self) -> Self:
        if not all(self.stop):
            raise ValueError("stop: an empty text would end every answer at once; leave it out")
        if self.stop and self.fixed_length:
            raise ValueError("stop: with fixed_length no answer ends before the limit; use one of the two")
        return self


class EngineConfig(Frozen):
    kind: Literal["local", "vllm"] = Field(
        "local", description="local: our own sampler; vllm: needs vLLM, in an environment of its own (make verify-vllm)"
    )
    weights: Literal["float32", "bfloat16", "int8", "auto"] = Field(
        "float32",
        description="what sampling multiplies with (above a shared trunk; int8 everywhere): rounded weights are faster "
        "and sample from a slightly other policy, which the importance weight corrects; auto: bfloat16 on a processor "
        "with units for it",
    )
    max_rows: int = Field(128, ge=1, description="answers that are written at the same time")

    @model_validator(mode="after")
    def _ours(self) -> Self:
        if self.kind == "vllm" and self.weights != "float32":
            raise ValueError("weights: vllm has the model's own; use kind=local, or weights=float32")
        return self


class OptimizerConfig(Frozen):
    learning_rate: float = Field(1e-4, ge=0, le=10, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up")
    optimizer: Literal["adamw", "adamw_8bit", "adafactor"] = Field(
        "adamw", description="adafactor ignores betas and eps; adamw_8bit needs bitsandbytes"
    )
    warmup_fraction: float = Field(
        0.0, ge=0, lt=1, description="warm-up as a share of all steps, in the place of warmup_steps; 0: off"
    )
    schedule: Literal["linear", "cosine", "constant"] = Field("linear", description="what follows the warm-up")
    schedule_per: Literal["step", "rollout"] = Field(
        "step", description="whether the rate changes with every optimizer step, or stays for a rollout's steps"
    )
    final_fraction: float = Field(0.0, ge=0, le=1, description="share of the peak rate left at the last step")
    betas: tuple[float, float] = Field((0.9, 0.999), description="AdamW's decay rates of the two moments")
    eps: float = Field(1e-8, gt=0, description="AdamW's epsilon")
    eps_corrected: bool = Field(
        True, description="epsilon beside the bias-corrected second moment; otherwise beside the moment as it is"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay, on matrices only")
    max_grad_norm: float = Field(1.0, ge=0, description="gradient norm is clipped to this; 0 leaves it")
    skip_nonfinite: bool = Field(
        False, description="leave out a step whose loss or gradient is not finite; otherwise the run stops there"
    )
    micro_batch_tokens: int = Field(512, ge=1, description="tokens a forward pass; changes memory, not the result")
    gradient_checkpointing: bool = Field(
        False, description="compute activations again for the backward pass: less memory, more time, the same result"
    )

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

    @model_validator(mode="after")
    def _its_own(self) -> Self:
        if not self.eps_corrected and self.optimizer != "adamw":
            raise ValueError(f"eps_corrected: only adamw has this choice, not {self.optimizer}; leave it true")
        return self


PRECISION = (
    "matrix products of all blocks: float32, bfloat16 (their inputs and results are rounded; weights, gradients and "
    "all else stay float32), or auto: bfloat16 on a processor with units for it"
)


STORE = "the preference store: a file (SQLite), or postgresql://user@host/database"


class RunConfig(Frozen):
    out: str = Field("", description="run folder; it must not hold a run already (or use --resume)")
    seed: int = Field(0, ge=0, le=2**32 - 1, description="seed of every random stream")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps; auto takes a GPU where there is one")


class ModelRunConfig(RunConfig):
    attn_implementation: Literal["auto", "sdpa", "eager"] = Field(
        "auto",
        description="attention in a model's own forward pass; auto: transformers' choice. Sampling and frozen trunk of "
        "Llama-shaped models have PyTorch's own always",
    )


class SFTConfig(ModelRunConfig):
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


class CollectConfig(ModelRunConfig):
    out: str = "runs/collect"
    model: str = Field("runs/sft/model", description="the policy that answers")
    prompts: str = Field(
        "reviews/prompts", description="prompts (column prompt or messages): a file, a hub id, reviews/…"
    )
    count: int = Field(
        64, ge=0, description="number of prompts, taken from the start; 0 samples none (with comparisons)"
    )
    skip: int = Field(0, ge=0, description="prompts left out at the start: what an earlier round has asked")
    k: int = Field(4, ge=2, description="answers a prompt")
    sampling: SamplingConfig = SamplingConfig()
    engine: EngineConfig = EngineConfig()
    store: str = Field("runs/preferences.sqlite", description=STORE)
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


#: addresses that only this machine reaches
LOCAL = ("127.0.0.1", "localhost", "::1")


def reachable(host: str, people: list[str]) -> None:
    """
    Raises:
        ValueError: others reach the page, and it cannot tell who they are.
    """
    if host not in LOCAL and not people:
        raise ValueError(
            f"host: {host} can be reached by others, so each person needs a link; name them with "
            'people=["ann", "ben"], or keep host=127.0.0.1'
        )


class PageConfig(Frozen):
    """The labelling page."""

    store: str = Field("runs/preferences.sqlite", description=STORE)
    host: str = Field("127.0.0.1", description="address to serve on; another than this machine's own needs people")
    port: int = Field(8111, ge=0, le=65535, description="port to serve on; 0: any that is free")
    mode: Literal["compare", "best", "rank", "rate"] = Field(
        "compare", description="what is asked: the better of two, the best of all, a ranking of all, ratings of all"
    )
    overlap: int = Field(1, ge=1, description="how many people answer each question")
    next: Literal["random", "uncertain"] = Field(
        "random", description="which question comes first; uncertain: where the reward models disagree most"
    )
    reward: list[str] = Field([], description="uncertain: two or more reward models' folders, which are asked")
    device: str = Field("auto", description="uncertain: where they run, as for training")
    check_every: int = Field(20, ge=0, description="every so many labels an attention check, where the store has any")
    repeat_every: int = Field(20, ge=0, description="every so many labels a person is asked something again; 0: never")
    guidelines: str = Field("", description="a Markdown file that is shown beside every question")
    render: Literal["text", "markdown"] = Field("text", description="how models' texts are shown")
    people: list[str] = Field(
        [], description="names of who may label: each gets a link of their own; empty: anybody here"
    )
    admin: str = Field("admin", description="with people: the name that gets the link to the overview")
    link_days: float = Field(30.0, gt=0, description="days for which a link is good")

    @model_validator(mode="after")
    def _served(self) -> Self:
        reachable(self.host, self.people)
        if self.next == "uncertain" and len(self.reward) < 2:
            raise ValueError('next: uncertain asks an ensemble; name two or more folders with reward=["…", "…"]')
        if self.reward and self.next != "uncertain":
            raise ValueError("reward: has no effect with next=random; use next=uncertain")
        if self.admin in self.people:
            raise ValueError(f"admin: {self.admin} is one of the people; the overview needs a name of its own")
        if len(set(self.people)) < len(self.people):
            raise ValueError("people: a name stands there twice")
        return self


class JudgeConfig(Frozen):
    """A language model that labels."""

    model: str = Field(
        "",
        max_length=150,
        description="a language model that labels: smollm2, tiny, a folder or a hub id; with judge.endpoint its name "
        "there; empty: the oracle labels",
    )
    criterion: str = Field("Which answer is better?", description="what it is asked of two answers, A and B")
    batch_tokens: int = Field(4096, ge=1, description="a model on this machine: tokens a forward pass")
    endpoint: str = Field(
        "", description="an OpenAI-compatible server's address, as http://host:8000/v1; empty: the model runs here"
    )
    api_key_env: str = Field(
        "OPENAI_API_KEY",
        description="endpoint: the environment variable that holds the key, which is written nowhere; empty: send none",
    )
    concurrency: int = Field(4, ge=1, le=256, description="endpoint: requests at the same time")
    requests_per_minute: float = Field(
        0.0, ge=0, description="endpoint: at most this many, those that are tried again included; 0: no limit"
    )
    timeout: float = Field(60.0, gt=0, description="endpoint: seconds to wait for an answer")
    retries: int = Field(
        5,
        ge=0,
        le=100,
        description="endpoint: how often a request is tried again after 429, 5xx, a timeout or a broken connection; "
        "the wait doubles, or is what the server asks for",
    )
    max_tokens: int = Field(
        8, ge=1, description="endpoint: length limit of a reply, in tokens; a model that thinks first needs more"
    )

    @model_validator(mode="after")
    def _heard(self) -> Self:
        """Every key that was set has an effect."""
        local = ("batch_tokens",)
        remote = ("api_key_env", "concurrency", "requests_per_minute", "timeout", "retries", "max_tokens")
        for key in changed(self, type(self).model_construct()):
            if not self.model:
                raise ValueError(f"{key}: has no effect here, because no model judges; use --judge MODEL")
            if key in remote and not self.endpoint:
                raise ValueError(f"{key}: has no effect here, because the model runs on this machine; set endpoint")
            if key in local and self.endpoint:
                raise ValueError(f"{key}: has no effect here, because the endpoint batches by itself; take it out")
        return self

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if not self.criterion.strip():
            raise ValueError("criterion: is empty, so the judge would be asked nothing; write a question")
        if not re.fullmatch(r"([A-Z_][A-Z0-9_]*)?", self.api_key_env):
            # somebody may have written the key itself
            raise ValueError("api_key_env: no environment variable's name; write one in capitals, as OPENAI_API_KEY")
        if not self.endpoint:
            return self
        try:
            url = urlsplit(self.endpoint)
            whole = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
        except ValueError:
            raise ValueError("endpoint: no address; write it as http://host:8000/v1") from None
        if url.username is not None or url.password is not None or url.query or url.fragment:
            # the configuration is written into the run folder
            raise ValueError(
                "endpoint: an address with a key or password in it; name an environment variable instead, "
                "with api_key_env"
            )
        if not whole:
            raise ValueError("endpoint: no address; write it as http://host:8000/v1")
        return self


class LabelConfig(RunConfig):
    """Labelling by a programme or a model."""

    out: str = "runs/label"
    store: str = Field("runs/preferences.sqlite", description=STORE)
    limit: int = Field(0, ge=0, description="label this many comparisons; 0 labels all that have no label yet")
    judge: JudgeConfig = JudgeConfig()


class RewardConfig(ModelRunConfig):
    out: str = "runs/reward"
    model: str = Field("runs/sft/model", description="the language model to start from")
    store: str = Field("runs/preferences.sqlite", description=STORE)
    held_out: float = Field(0.2, gt=0, lt=1, description="share of comparisons kept for measuring, split by prompt")
    loss: Literal["pairwise", "averaged_losers", "plackett_luce", "pick_best", "every_token"] = Field(
        "pairwise",
        description="all pairs of a ranking (their mean); each winner against the mean of those it beats; the ranking "
        "drawn place by place; the best by softmax; or pairs compared at every token from where they part",
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="pairwise: how often a label is taken to be wrong; moves targets towards ½"
    )
    ties: Literal["skip", "half"] = Field(
        "skip", description="pairwise: equal places say nothing (and are counted), or pull the two scores together"
    )
    margins: bool = Field(False, description="pairwise: scores differ by the comparison's margin, where it has one")
    centring: float = Field(0.0, ge=0, description="weight of the squared mean of a comparison's scores")
    max_length: int = Field(96, ge=2, description="longer texts lose their beginning")
    train_blocks: int = Field(
        4, ge=0, description="train only the top blocks, over a frozen trunk; 0 trains all weights"
    )
    precision: Literal["float32", "bfloat16", "auto"] = Field("float32", description=PRECISION)
    epochs: int = Field(1, ge=1, description="passes over the comparisons")
    batch_answers: int = Field(32, ge=2, description="answers an optimizer step; a comparison is never cut")
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=1.25e-4, warmup_steps=5, micro_batch_tokens=1024)

    @model_validator(mode="after")
    def _heard(self) -> Self:
        if self.loss != "pairwise":
            for key, off in (("label_smoothing", 0.0), ("ties", "skip"), ("margins", False)):
                if getattr(self, key) != off:
                    raise ValueError(f"{key}: loss={self.loss} does not know it; use loss=pairwise or {key}={off!r}")
        return self


class ArrangementConfig(Frozen):
    kind: Literal["separate", "shared_trunk", "frozen_trunk"] = Field(
        "frozen_trunk",
        description="separate: four models; shared_trunk: the critic is a head on the actor; "
        "frozen_trunk: all roles share frozen lower blocks, computed once a rollout",
    )
    blocks: int = Field(4, ge=1, description="frozen_trunk: how many top blocks each role owns and trains")
    precision: Literal["float32", "bfloat16", "auto"] = Field(
        "float32",
        description="matrix products of a frozen trunk, of the critic and of the actor's gradients, as for SFT; what "
        "actor, reference and reward model compute above a trunk is float32 always, so that the ratio is exact",
    )


class KLConfig(Frozen):
    coef: float = Field(0.05, ge=0, description="price of one nat, charged at every token")
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = Field(
        "k1", description="per-token estimate, or full: the exact sum over the vocabulary; see docs/ppo.md"
    )
    place: Literal["reward", "loss"] = Field(
        "reward", description="charged in the token rewards, or added to the policy loss (with the KL's own gradient)"
    )
    controller: Literal["fixed", "adaptive"] = Field(
        "fixed", description="adaptive steers the coefficient to the target"
    )
    target: float = Field(6.0, gt=0, description="adaptive: KL a response, in nats")
    horizon: float = Field(10000.0, gt=0, description="adaptive: responses over which the coefficient adjusts")


class SourceConfig(Frozen):
    source: str = Field("", description="a reward model's folder, or a Python function")
    weight: float = Field(1.0, description="what its score counts in the sum; may be negative")
    clip: float = Field(0.0, ge=0, description="its score is limited to ± this before it is weighed; 0 leaves it")
    normalise: bool = Field(False, description="by the running mean and deviation of its own scores, before the clip")


class EnsembleConfig(Frozen):
    members: list[str] = Field([], description="further reward models that judge together with `reward`")
    combine: Literal["mean", "lower", "worst"] = Field(
        "mean", description="mean; mean − coef · standard deviation; or the least of the members"
    )
    coef: float = Field(1.0, ge=0, description="lower: how many standard deviations are taken off")


class PoolConfig(Frozen):
    size: int = Field(1, ge=1, description="rollouts kept; minibatches are drawn from all of them")
    max_age: int = Field(
        0, ge=0, description="a rollout this many versions older than the sampling policy still serves"
    )
    refresh_every: int = Field(1, ge=1, description="iterations between updates of the policy that samples")
    overlap: bool = Field(
        False, description="sample the next answers while the policy is improved: they are one update older"
    )
    importance_cap: float = Field(
        0.0, ge=0, description="weigh tokens by min(this, π_trainer / π_engine) for the engine's rounding; 0: off"
    )

    @property
    def lags(self) -> bool:
        """Whether what samples may be older than what is trained."""
        return self.refresh_every > 1 or self.overlap

    @property
    def on_policy(self) -> bool:
        """Whether every first minibatch is of the policy that is trained."""
        return self.size == 1 and not self.lags


class PTXConfig(Frozen):
    coef: float = Field(0.0, ge=0, description="weight of the language-model loss in each optimizer step; 0: none")
    data: str = Field("", description="its texts: a file, a hub id or reviews/sft")
    batch_size: int = Field(8, ge=1, description="its rows an optimizer step")
    max_length: int = Field(64, ge=2, description="longer rows are cut to this many tokens")

    @model_validator(mode="after")
    def _fed(self) -> Self:
        if self.coef and not self.data:
            raise ValueError("ptx.coef needs ptx.data: a file of texts, or for example reviews/sft")
        return self


class ValidationConfig(Frozen):
    prompts: str = Field("", description="held-out prompts; empty: no validation")
    judge: str = Field("", description="who judges: a reward model's folder or a function, never a gold judge")
    every: int = Field(5, ge=1, description="iterations between validations")
    count: int = Field(64, ge=1, description="prompts, from the start")
    keep_best: bool = Field(True, description="the model is that of the best validation; otherwise the last one")
    patience: int = Field(0, ge=0, description="stop after this many validations without a better one; 0: never")

    @model_validator(mode="after")
    def _judged(self) -> Self:
        if bool(self.prompts) != bool(self.judge):
            raise ValueError("validation needs both prompts and judge, or neither")
        if self.judge in ("gold", "vader"):
            raise ValueError(f"judge: {self.judge} is kept for the evaluation and steers nothing; use another one")
        return self


def falls_due(iteration: int, every: int, last: int) -> bool:
    """Every so many iterations, and at ``last``: validation.patience may end a run before it."""
    return iteration % every == 0 or iteration == last


class TraceConfig(Frozen):
    every: int = Field(
        5,
        ge=1,
        description="iterations between traces; the first is traced anyway, and the last unless validation.patience "
        "stops the run before it",
    )
    answers: int = Field(4, ge=0, description="of each such iteration, this many answers token by token; 0: none")
    alternatives: int = Field(5, ge=1, le=50, description="likeliest tokens kept in each token's place")

    def due(self, iteration: int, last: int) -> bool:
        """Whether an iteration, counted from 1, is traced."""
        return self.answers > 0 and (iteration == 1 or falls_due(iteration, self.every, last))


class ProbeConfig(Frozen):
    prompts: int = Field(4, ge=0, description="the first so many prompts are answered over and over; 0: off")
    every: int = Field(
        10,
        ge=1,
        description="iterations between such answers; they are given at the start anyway, and at the end unless "
        "validation.patience stops the run before it",
    )


class FunctionsConfig(Frozen):
    token_rewards: str = Field("", description="file.py:name, called (rewards, rollout) → token rewards (B, S)")
    advantages: str = Field(
        "", description="file.py:name, called (rewards, values, mask) → advantages and returns (B, S)"
    )
    policy_loss: str = Field(
        "", description="file.py:name, called (logprobs, old_logprobs, advantages) → losses (B, S), for the clipped one"
    )
    callbacks: list[str] = Field(
        [], description="file.py:name each, called (verb, state, record) after every verb of an iteration"
    )


class PPOConfig(ModelRunConfig):
    out: str = "runs/ppo"
    conventions: Conventions = Conventions()
    model: str = Field("runs/sft/model", description="the actor's start, and the frozen reference")
    reward: str = Field(
        "runs/reward/model", description="a reward model's folder, or a Python function: file.py:name or module:name"
    )
    reward_weight: float = Field(1.0, description="what its score counts beside extra_rewards")
    reward_normalise: bool = Field(False, description="by the running mean and deviation of its scores")
    reward_clip: float = Field(0.0, ge=0, description="the sum of all scores is limited to ± this; 0 leaves it")
    extra_rewards: list[SourceConfig] = Field([], description="further sources; the weighted scores are added up")
    ensemble: EnsembleConfig = EnsembleConfig()
    dense_reward: bool = Field(
        False, description="pay each token what it changes in the score of the prefix, instead of once at the end"
    )
    truncation: Literal["subtract", "replace"] = Field(
        "subtract", description="the penalty of an unended answer is taken off its score, or stands in its place"
    )
    truncation_penalty: float = Field(1.0, ge=0, description="taken off the score of an answer that did not end itself")
    length_penalty: float = Field(0.0, ge=0, description="taken off the score for every token of the answer")
    whiten_rewards: bool = Field(False, description="token rewards are scaled to unit variance, as conventions say")
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
    critic_head: Literal["auto", "zero", "random"] = Field(
        "auto", description="the critic's head: the reward model's, or zero where it has none; zero; or random"
    )
    critic_warmup: int = Field(0, ge=0, description="first iterations in which only the critic is trained")
    sampling: SamplingConfig = SamplingConfig(temperature=0.8)
    engine: EngineConfig = EngineConfig()
    iterations: int = Field(30, ge=1, description="rounds of act, judge, assign credit, improve, publish")
    batch_size: int = Field(64, ge=1, description="prompts an iteration")
    samples_per_prompt: int = Field(1, ge=1, description="answers to each of them")
    epochs: int = Field(2, ge=1, description="passes over each iteration's experience")
    minibatches: int = Field(2, ge=1, description="optimizer steps a pass")
    gamma: float = Field(1.0, gt=0, le=1, description="discount")
    lam: float = Field(0.95, ge=0, le=1, description="GAE's lambda: 0 one step, 1 the whole return")
    estimator: Literal["gae", "n_step", "reinforce", "rloo", "grpo", "reinforce++"] = Field(
        "gae", description="of the advantages; the last four need no critic"
    )
    n_steps: int = Field(1, ge=1, description="n_step: rewards before the critic's estimate takes over")
    value_target: Literal["lambda_return", "discounted_sum"] = Field(
        "lambda_return", description="what the critic learns: advantage + value, or the rewards that came"
    )
    bootstrap_truncated: bool = Field(
        False, description="continue an answer that was cut by the critic's estimate, instead of by 0"
    )
    clip_range: float = Field(0.2, gt=0, description="the ratio is clipped to 1 ± this")
    clip_range_above: float = Field(0.0, ge=0, description="another limit above 1; 0: the same")
    dual_clip: float = Field(0.0, ge=0, description="a negative advantage costs no more than this times itself; 0: off")
    value_clip_range: float = Field(0.2, ge=0, description="values are clipped to the old ones ± this; 0 leaves them")
    vf_coef: float = Field(0.5, ge=0, description="weight of the value loss where the trunk is shared")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    loss_reduction: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = Field(
        "token-mean", description="how the policy loss is averaged: over tokens, or over answers' sums or means"
    )
    stop_kl: float = Field(
        0.0, ge=0, description="stop an iteration's updates once ½(new − old)² passes this on average; 0: never"
    )
    kl: KLConfig = KLConfig(coef=0.06)
    pool: PoolConfig = PoolConfig()
    ptx: PTXConfig = PTXConfig()
    ema_decay: float = Field(
        0.0, ge=0, lt=1, description="the saved model averages the actor's weights over its steps by this; 0: the last"
    )
    actor: OptimizerConfig = OptimizerConfig(learning_rate=4e-4, warmup_steps=4, final_fraction=0.1)
    critic: OptimizerConfig = OptimizerConfig(learning_rate=4e-4, warmup_steps=8, final_fraction=0.1)
    functions: FunctionsConfig = FunctionsConfig()
    validation: ValidationConfig = ValidationConfig()
    trace: TraceConfig = TraceConfig()
    probe: ProbeConfig = ProbeConfig()
    monitors: list[str] = Field(
        [], description="judges that only watch: gold, vader, or functions (file.py:name); they never steer"
    )
    profile: bool = Field(
        False, description="measure each phase of an iteration: seconds, tokens a second, share of the products' rate"
    )
    checkpoint_every: int = Field(10, ge=1, description="iterations between checkpoints")
    sample_every: int = Field(1, ge=1, description="iterations between samples written to samples.jsonl")

    def rebased(self, data: dict[str, Any]) -> Self:
        """The defaults of the preset that the user's keys name: its choices, coefficients, optimizers and schedules.

        GRPO is defined with the KL in the loss, so it brings that; an engine that rounds brings the correction for it.
        """
        name = _said(data, "conventions", "preset")
        preset = PRESETS.get(name) if isinstance(name, str) else None
        base = self if preset is None or name == "plaudit" else overlaid(self, preset_keys(preset))
        if data.get("estimator") == "grpo":
            base = overlaid(base, {"kl": {"place": "loss"}})
        rounds = _said(data, "engine", "weights") in ("bfloat16", "int8", "auto")
        return overlaid(base, {"pool": {"importance_cap": 2.0}}) if rounds else base

    @model_validator(mode="before")
    @classmethod
    def _based(cls, data: Any) -> Any:
        """The same for a configuration that is made in Python, where no file is read."""
        if not isinstance(data, dict) or not {"conventions", "estimator", "engine"} & data.keys():
            return data
        base = cls.model_construct().rebased(data)
        return {name: getattr(base, name) for name in cls.model_fields if name not in data} | data

    def hyper(self) -> Hyper:
        """The coefficients of a step."""
        above = self.clip_range_above or self.clip_range
        return Hyper(
            kl_coef=self.kl.coef,
            kl_estimator=self.kl.estimator,
            gamma=self.gamma,
            lam=self.lam,
            clip=(self.clip_range, above),
            value_clip=self.value_clip_range or None,
            vf_coef=self.vf_coef,
            reward_clip=self.reward_clip or None,
            whiten_rewards=self.whiten_rewards,
            dual_clip=self.dual_clip or None,
            policy_loss_reduction=self.loss_reduction,
        )

    @property
    def logprob_temperature(self) -> float:
        """What the logits are divided by where log-probabilities are taken."""
        return self.sampling.temperature if self.conventions.tempered_logprobs else 1.0

    @property
    def answers(self) -> int:
        """Answers an iteration."""
        return self.batch_size * self.samples_per_prompt

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.sampling.temperature == 0:
            raise ValueError("sampling.temperature: PPO needs sampled answers; 0 is greedy. Use for example 0.8")
        for key, off in (("top_p", 1.0), ("top_k", 0)):
            if getattr(self.sampling, key) != off:
                raise ValueError(
                    f"sampling.{key}: PPO samples from the whole distribution, or the ratio of new to old policy would "
                    f"be wrong; use sampling.{key}={off}, and a lower sampling.temperature for likelier answers"
                )
        if self.arrangement.kind == "shared_trunk" and self.critic_from == "reward":
            raise ValueError(
                "critic_from: with shared_trunk the critic is a new head on the actor; use critic_from=auto"
            )
        if self.minibatches > self.answers:
            raise ValueError(
                f"minibatches ({self.minibatches}) exceeds batch_size ({self.batch_size}) × samples_per_prompt; "
                "lower it or raise batch_size"
            )
        if 0 < self.conventions.skip_above_mean_ratio <= 1:
            raise ValueError(
                "conventions.skip_above_mean_ratio: the mean ratio is about 1, so this would skip every minibatch; use "
                "for example 10, or 0 for off"
            )
        if self.dual_clip and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, not {self.dual_clip:g} (3 is usual), or 0 for none")
        if self.whiten_rewards and self.answers == 1:
            raise ValueError("whiten_rewards over one row leaves nothing; raise batch_size, or whiten_rewards=false")
        self._estimated()
        self._combined()
        self._heard()
        return self

    def _heard(self) -> None:
        """Every key that was set has an effect."""
        base = type(self).model_construct()
        said = {"conventions": self.conventions, "estimator": self.estimator, "engine": self.engine}
        base = base.rebased(said)
        for key in changed(self, base):
            if why := reason(self, key):
                raise ValueError(f"{key}: has no effect here, because {why}")

    def _estimated(self) -> None:
        if self.estimator in GROUPED and self.samples_per_prompt < 2:
            raise ValueError(
                f"estimator={self.estimator} compares answers to one prompt, and samples_per_prompt is 1; "
                "use samples_per_prompt=4, or estimator=gae"
            )
        if self.estimator == "n_step" and self.functions.advantages:
            raise ValueError("functions.advantages replaces estimator=n_step; use estimator=gae with it")
        if self.estimator == "grpo" and self.kl.place == "reward" and self.kl.coef:
            raise ValueError(
                "kl.place: in groups of equal scores GRPO would blow up the KL of the rewards; use kl.place=loss"
            )
        if self.estimator in CRITIC_FREE and self.functions.advantages:
            raise ValueError(f"functions.advantages: estimator={self.estimator} is one already; use estimator=gae")

    def _combined(self) -> None:
        if not all(extra.source for extra in self.extra_rewards):
            raise ValueError("extra_rewards: each names its source, a reward model's folder or a function")
        if self.dense_reward and (self.ensemble.members or self.extra_rewards or self.reward_normalise):
            raise ValueError(
                "dense_reward pays one reward model's prefix scores; leave out ensemble.members, extra_rewards and "
                "reward_normalise, or set dense_reward=false"
            )
        if self.pool.max_age < self.pool.size - 1:
            raise ValueError(
                f"pool.size={self.pool.size} keeps rollouts up to {self.pool.size - 1} updates old, and pool.max_age "
                f"drops them after {self.pool.max_age}; use pool.max_age={self.pool.size - 1}"
            )
        if self.critic_warmup and self.arrangement.kind == "shared_trunk":
            raise ValueError(
                "critic_warmup: with shared_trunk actor and critic step together; use arrangement.kind=frozen_trunk"
            )
        if self.pool.importance_cap and self.logprob_temperature != self.sampling.temperature:
            raise ValueError(
                "pool.importance_cap compares log-probabilities at the sampling temperature; use "
                "conventions.tempered_logprobs=true, or sampling.temperature=1.0"
            )
        if self.critic_warmup >= self.iterations:
            raise ValueError(f"critic_warmup ({self.critic_warmup}) leaves no iteration of {self.iterations}; lower it")
        if self.pool.refresh_every > self.iterations:
            raise ValueError(
                f"pool.refresh_every ({self.pool.refresh_every}) exceeds iterations ({self.iterations}): the policy "
                "that samples would never change; lower it"
            )
        if self.pool.overlap and self.pool.refresh_every > 1:
            raise ValueError("pool.overlap renews the policy that samples every iteration; use pool.refresh_every=1")
        if self.stop_kl and not self.pool.on_policy:
            raise ValueError(
                "stop_kl measures the distance to the policy that sampled, which is not 0 at first where experience "
                "is older; use stop_kl=0.0, or pool.size=1, pool.refresh_every=1 and pool.overlap=false"
            )
        if self.sampling.fixed_length and self.truncation_penalty:
            raise ValueError("truncation_penalty: with sampling.fixed_length no answer ends itself; use 0.0")
        if self.kl.controller == "adaptive" and not self.kl.coef:
            raise ValueError("kl.coef: an adaptive coefficient that starts at 0 stays there; use for example 0.05")


def _said(data: dict[str, Any], section: str, key: str) -> Any:
    """A section's key as the user has it, in a file or made in Python; None where it is not said."""
    made = data.get(section)
    return made.get(key) if isinstance(made, dict) else getattr(made, key, None)


def preset_keys(preset: Preset) -> dict[str, Any]:
    """A preset as nested keys of :class:`PPOConfig`."""
    h = preset.hyper
    assert not isinstance(h.clip, tuple)
    keys: dict[str, Any] = {
        "conventions": preset.conventions.model_dump(),
        "kl": {"coef": h.kl_coef, "estimator": h.kl_estimator},
        "gamma": h.gamma,
        "lam": h.lam,
        "clip_range": h.clip,
        "value_clip_range": h.value_clip or 0.0,
        "vf_coef": h.vf_coef,
        "reward_clip": h.reward_clip or 0.0,
        "whiten_rewards": h.whiten_rewards,
        "dual_clip": h.dual_clip or 0.0,
        "loss_reduction": h.policy_loss_reduction,
    }
    for section, values in preset.training.items():
        keys[section] = keys.get(section, {}) | dict(values) if isinstance(values, dict) else values
    return keys


class DPOConfig(ModelRunConfig):
    out: str = "runs/dpo"
    model: str = Field("runs/sft/model", description="the policy's start, and the frozen reference")
    store: str = Field("runs/preferences.sqlite", description=STORE)
    held_out: float = Field(0.2, gt=0, lt=1, description="share of comparisons kept for measuring, split by prompt")
    beta: float = Field(0.1, gt=0, description="price of distance from the reference: scales the log ratios")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="how often a label is taken to be wrong")
    max_length: int = Field(96, ge=2, description="longer texts lose their beginning")
    train_blocks: int = Field(
        4, ge=0, description="train only the top blocks, over a frozen trunk; 0 trains all weights"
    )
    precision: Literal["float32", "bfloat16", "auto"] = Field("float32", description=PRECISION)
    epochs: int = Field(1, ge=1, description="passes over the comparisons")
    batch_pairs: int = Field(16, ge=1, description="pairs an optimizer step")
    max_pairs: int = Field(
        6, ge=1, description="of one comparison at most this many pairs are taken, at random; a ranking has many"
    )
    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=5e-5, warmup_steps=5)


class EvaluateConfig(ModelRunConfig):
    out: str = "runs/evaluate"
    model: str = Field("runs/ppo/model", description="the model to judge")
    reference: str = Field("runs/sft/model", description="the model it is compared with")
    reward: str = Field("", description="reward model whose scores are shown beside the judges; empty: none")
    prompts: str = Field("reviews/evaluation", description="held-out prompts: a file, a hub id or reviews/evaluation")
    count: int = Field(256, ge=0, description="number of prompts, from the start; 0 uses all")
    sampling: SamplingConfig = SamplingConfig(temperature=0.8)
    engine: EngineConfig = EngineConfig()
    precision: Literal["float32", "bfloat16", "auto"] = Field(
        "float32", description="matrix products of the blocks that all models share, as for SFT"
    )
    judges: list[str] = Field(
        ["gold", "vader"],
        min_length=1,
        description="gold, vader or functions (file.py:name); the first decides the win rate",
    )


class QuickstartConfig(RunConfig):
    out: str = "runs/quickstart"
    model: str = Field("smollm2", description="smollm2, a folder or a hub id")
    rounds: int = Field(
        1,
        ge=1,
        le=99,
        description="times round the loop: the newest policy answers further prompts, the labels are added to those "
        "before, and a new reward model trains a new policy from the SFT model",
    )
    sft: SFTConfig = SFTConfig(rows=720, precision="auto")
    collect: CollectConfig = CollectConfig(comparisons="reviews/comparisons", engine=EngineConfig(weights="auto"))
    label: LabelConfig = LabelConfig(limit=48)
    reward: RewardConfig = RewardConfig(precision="auto")
    ppo: PPOConfig = PPOConfig(monitors=["gold", "vader"], arrangement=ArrangementConfig(precision="auto"))
    evaluate: EvaluateConfig = EvaluateConfig(precision="auto")

    @model_validator(mode="after")
    def _wired(self) -> Self:
        """The quickstart connects its stages itself; a key that it would overwrite is refused, not ignored."""
        if self.rounds > 1 and not self.collect.count:
            raise ValueError("collect.count: 0 leaves later rounds nothing to label; use for example 64, or rounds=1")
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
    "collect": ("model", "store", "skip"),
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


class CompareConfig(Frozen):
    """Two models answer what a person asks, and the person votes."""

    store: str = Field("runs/compare.sqlite", description="where votes go: a file, or postgresql://user@host/database")
    host: str = Field("127.0.0.1", description="address to serve on; another than this machine's own needs people")
    port: int = Field(8113, ge=0, le=65535, description="port to serve on; 0: any that is free")
    people: list[str] = Field(
        [], description="names of who may vote: each gets a link of their own; empty: anybody here"
    )
    sampling: SamplingConfig = SamplingConfig(temperature=0.8, max_new_tokens=128)
    seed: int = Field(0, ge=0, description="seed of the answers")
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps; auto takes a GPU where there is one")
    raw: bool = Field(False, description="complete the prompt as it stands, without the chat template")
    render: Literal["text", "markdown"] = Field("text", description="how models' texts are shown")

    @model_validator(mode="after")
    def _served(self) -> Self:
        reachable(self.host, self.people)
        return self


class ScoreConfig(Frozen):
    device: str = Field("auto", description="auto, cpu, cuda, cuda:N or mps; auto takes a GPU where there is one")
    out: str = Field("", description="file for the scores (JSONL); empty: print them")
