"""The choices in which public PPO systems disagree, and the presets: one system's choices under its name.

Left out: what a choice computes (see conventions).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from plaudit.schema import Frozen

if TYPE_CHECKING:
    # the commands read configurations before they load torch
    from plaudit.ops import KLEstimator, Reduction

#: filled below, once the classes are there
PRESETS: dict[str, Preset] = {}

#: Positions of a row whose response has n tokens: those n; the one after them too, where the row has it; or all.
Span = Literal["response", "one_after", "row"]
PresetName = Literal["plaudit", "ziegler19", "trl-0.7", "trl-1", "deepspeed-chat", "openrlhf", "verl"]


class Whitening(Frozen):
    """Scaling to unit variance."""

    over: Span = Field("response", description="the positions whose mean and variance are taken")
    unbiased: bool = Field(False, description="divide the squared deviations by N − 1 instead of N")
    floor: bool = Field(False, description="divide by √max(variance, 1e-8) instead of √(variance + 1e-8)")
    keep_mean: bool = Field(False, description="add the mean back")
    reset: bool = Field(True, description="what lies outside is 0; otherwise it goes through the same map")

    def __str__(self) -> str:
        words = [f"over {self.over}", "unbiased" if self.unbiased else "biased"]
        words += ["floored variance"] * self.floor + ["mean kept"] * self.keep_mean
        return ", ".join(words + ["padding goes through the map too"] * (not self.reset))


class KLClamp(Frozen):
    """Limits on the per-token KL estimate."""

    argument: float = Field(0.0, ge=0, description="limit ± of the log-ratio the estimate is made of; 0: none")
    estimate: float = Field(0.0, ge=0, description="limit ± of the estimate; 0: none")
    only: Literal["", "k1", "k2", "k3", "abs", "full"] = Field(
        "", description="the one estimator that is limited; empty: every one"
    )

    def __str__(self) -> str:
        limits = [f"{name} ± {v:g}" for name, v in (("log-ratio", self.argument), ("estimate", self.estimate)) if v]
        return ", ".join(limits + [f"{self.only} only"] * bool(limits and self.only)) or "none"


class Conventions(Frozen):
    """The choices of one step. The defaults are Plaudit's own."""

    @model_validator(mode="before")
    @classmethod
    def _chosen(cls, data: Any) -> Any:
        """What is not given is the named preset's."""
        name = data.get("preset") if isinstance(data, dict) else None
        preset = PRESETS.get(name) if isinstance(name, str) else None
        return data if preset is None else preset.conventions.model_dump() | data

    preset: PresetName = Field(
        "plaudit", description="a system's choices by name; it sets the defaults of all keys below and of its step"
    )
    score_position: Literal["last", "after_end", "row_end"] = Field(
        "last",
        description="where the score is paid: at the last response token; one after it (at it, where the row ends "
        "there); or at the last position of the row",
    )
    kl_over: Span = Field("response", description="where KL is charged")
    values_over: Span = Field("response", description="where V counts; it is 0 elsewhere")
    credit_over: Span = Field(
        "response", description="where the recursion of the advantages runs, beside the places where something is paid"
    )
    value_loss_over: Span = Field("response", description="where the value loss is taken")
    kl_clamp: KLClamp = Field(KLClamp(), description="limits of the per-token KL estimate")
    kl_gradient: Literal["kl", "estimator"] = Field(
        "kl", description="KL in the loss: its own gradient whatever the estimate, or that of the estimate as it stands"
    )
    reward_whitening: Whitening = Field(
        Whitening(keep_mean=True), description="how rewards are whitened, where that is asked for (whiten_rewards)"
    )
    whiten_advantages: bool = Field(True, description="whether advantages are whitened")
    advantage_whitening: Whitening = Field(Whitening(), description="how advantages are whitened")
    ratio_clamp: float = Field(0.0, ge=0, description="limit ± of the log-ratio of new to old policy; 0: none")
    skip_above_mean_ratio: float = Field(
        0.0, ge=0, description="a minibatch whose mean ratio is above this (more than 1) changes nothing; 0: off"
    )
    tempered_logprobs: bool = Field(
        True, description="log-probabilities at the sampling temperature; otherwise at 1, whatever was sampled at"
    )

    def widest(self) -> Span:
        """The span of every position at which a network is read."""
        spans = {self.kl_over, self.values_over, self.value_loss_over}
        return "row" if "row" in spans else "one_after" if "one_after" in spans else "response"


@dataclass(frozen=True)
class Hyper:
    """The coefficients of one step: what a run may set without leaving a convention.

    ``kl_clamp`` replaces the convention's limit of the KL estimate; ``vf_coef`` weighs the value loss in a joint total.
    """

    kl_coef: float = 0.05
    kl_estimator: KLEstimator = "k1"
    gamma: float = 1.0
    lam: float = 0.95
    clip: float | tuple[float, float] = 0.2
    value_clip: float | None = 0.2
    vf_coef: float = 0.5
    reward_clip: float | None = None
    kl_clamp: float | None = None
    whiten_rewards: bool = False
    dual_clip: float | None = None
    policy_loss_reduction: Reduction = "token-mean"


@dataclass(frozen=True)
class Preset:
    """A system's choices, its coefficients, and as nested keys of a PPO run what else it trains with."""

    conventions: Conventions
    hyper: Hyper
    training: Mapping[str, Any] = field(default_factory=dict)


def _optimizer(**changes: Any) -> dict[str, Any]:
    # the price of an unended answer is Plaudit's own
    return {"actor": changes, "critic": changes, "truncation_penalty": 0.0}


#: Ziegler et al. 2019: the defaults of its controller, which TRL took over
ADAPTIVE = {"controller": "adaptive", "target": 6.0, "horizon": 10000.0}

PRESETS |= {
    p.conventions.preset: p
    for p in (
        Preset(Conventions(), Hyper()),
        Preset(
            Conventions(
                preset="ziegler19",
                score_position="row_end",
                kl_over="row",
                values_over="row",
                credit_over="row",
                value_loss_over="row",
                reward_whitening=Whitening(over="row", keep_mean=True),
                advantage_whitening=Whitening(over="row"),
            ),
            Hyper(kl_coef=0.15, vf_coef=0.1, whiten_rewards=True),
            {"kl": ADAPTIVE, "sampling": {"fixed_length": True}}
            | _optimizer(
                eps=1e-5, eps_corrected=False, max_grad_norm=0.0, schedule="linear", final_fraction=0.0, warmup_steps=0
            ),
        ),
        Preset(
            Conventions(
                preset="trl-0.7",
                credit_over="row",
                reward_whitening=Whitening(unbiased=True, keep_mean=True, reset=False),
                advantage_whitening=Whitening(unbiased=True),
                skip_above_mean_ratio=10.0,
                tempered_logprobs=False,
            ),
            Hyper(kl_coef=0.2, vf_coef=0.1),
            {"kl": ADAPTIVE} | _optimizer(max_grad_norm=0.0, schedule="constant", warmup_steps=0),
        ),
        Preset(
            Conventions(
                preset="trl-1",
                score_position="after_end",
                values_over="one_after",
                credit_over="one_after",
                value_loss_over="one_after",
                reward_whitening=Whitening(over="one_after", unbiased=True, keep_mean=True),
                advantage_whitening=Whitening(unbiased=True),
            ),
            Hyper(kl_coef=0.05, vf_coef=0.1),
            _optimizer(
                max_grad_norm=0.0, schedule="linear", schedule_per="rollout", final_fraction=0.0, warmup_steps=0
            ),
        ),
        Preset(
            Conventions(
                preset="deepspeed-chat",
                score_position="after_end",
                kl_over="one_after",
                values_over="one_after",
                credit_over="one_after",
                whiten_advantages=False,
                tempered_logprobs=False,
            ),
            Hyper(kl_coef=0.1, reward_clip=5.0),
            _optimizer(betas=(0.9, 0.95), schedule="cosine", final_fraction=0.0, warmup_steps=100),
        ),
        Preset(
            Conventions(
                preset="openrlhf",
                kl_clamp=KLClamp(estimate=10.0),
                advantage_whitening=Whitening(floor=True),
                ratio_clamp=20.0,
            ),
            Hyper(kl_coef=0.01, lam=1.0, value_clip=0.5, reward_clip=10.0),
            _optimizer(betas=(0.9, 0.95), schedule="cosine", final_fraction=0.1, warmup_steps=0, warmup_fraction=0.03),
        ),
        Preset(
            Conventions(
                preset="verl",
                kl_gradient="estimator",
                kl_clamp=KLClamp(argument=20.0, estimate=10.0, only="k3"),
                advantage_whitening=Whitening(unbiased=True),
                ratio_clamp=20.0,
            ),
            Hyper(kl_coef=0.0, kl_estimator="k3", lam=1.0, value_clip=0.5, dual_clip=3.0),
            {"kl": {"place": "loss"}} | _optimizer(schedule="constant", warmup_steps=0, skip_nonfinite=True),
        ),
    )
}
