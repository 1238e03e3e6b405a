"""Recorded numbers of other systems against the conventions that bear their names.

A file holds a list of cases (or one case): a PPO step (``system``, ``inputs``, ``hyper``, ``response_lengths``,
``expected``), a reward loss (``loss``, ``chosen``, ``rejected``, ``expected``), or an adaptive KL controller (``init``,
``target``, ``horizon``, ``steps``). Errors are |ours − theirs| / (1 + |theirs|).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plaudit import ops
from plaudit.conventions import PRESETS, Hyper, Positions, assign_credit, losses
from plaudit.errors import DataError

Case = dict[str, Any]
TOLERANCE, TOLERANCE_FLOAT32 = 1e-6, 1e-5


@dataclass
class Result:
    """One system: how many cases, the largest error, and what is wrong (empty: nothing)."""

    system: str
    cases: int = 0
    error: float = 0.0
    fault: str = ""

    @property
    def passed(self) -> bool:
        return not self.fault


def check(files: Sequence[str | Path]) -> list[Result]:
    """One result a system, in the order of their first cases.

    Raises:
        DataError: a file is missing or no JSON, or a case is not of the known form.
    """
    results: dict[str, Result] = {}
    for file in files:
        for where, case in _cases(Path(file)):
            name, compute = _kind(case, where)
            result = results.setdefault(name, Result(name))
            result.cases += 1
            if compute is None:
                result.fault = f"unknown system; known are {', '.join(PRESETS)}"
                continue
            try:
                pairs = list(compute(case))
            except (KeyError, TypeError, ValueError, IndexError, RuntimeError, AttributeError, OverflowError) as error:
                what = f"no {error}" if isinstance(error, KeyError) else str(error).split("\n")[0]
                raise DataError(f"{where}: not of the known form: {what}") from None
            if not pairs:
                result.fault = result.fault or f"FAILED: {where}: nothing is expected, so nothing was compared"
            tolerance = TOLERANCE_FLOAT32 if "float32" in str(case.get("source", "")) else TOLERANCE
            for quantity, ours, theirs in pairs:
                if ours.shape != theirs.shape:
                    shapes = f"{tuple(theirs.shape)}, not {tuple(ours.shape)}"
                    raise DataError(f"{where}: expected.{quantity} has the shape {shapes}")
                off = float(((ours - theirs).abs() / (1 + theirs.abs())).max()) if theirs.numel() else 0.0
                # what is not a number must fail and stay, and every comparison with it is false
                if math.isnan(off) or off > result.error:
                    result.error = off
                if not off <= tolerance and not result.fault:
                    result.fault = f"FAILED: {where}: {quantity} is off by {off:.1e}"
    return list(results.values())


def _cases(path: Path) -> Iterator[tuple[str, Case]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path}: not readable as JSON: {error}") from None
    cases = data if isinstance(data, list) else [data]
    for number, case in enumerate(cases, 1):
        where = f"{path}, case {number}"
        if not isinstance(case, dict):
            raise DataError(f"{where}: an object is expected, not {type(case).__name__}")
        yield where, case


Pairs = Iterator[tuple[str, Tensor, Tensor]]


def _kind(case: Case, where: str) -> tuple[str, Callable[[Case], Pairs] | None]:
    """The line a case is counted on, and what computes it; None where the system is unknown."""
    if "system" in case:
        name = str(case["system"])
        return name, _step if name in PRESETS else None
    if "loss" in case:
        name = str(case["loss"])
        if name not in REWARD_LOSSES:
            raise DataError(f"{where}: unknown loss {name!r}; known are {', '.join(REWARD_LOSSES)}")
        return name, REWARD_LOSSES[name]
    if {"init", "target", "horizon", "steps"} <= case.keys():
        return "adaptive KL", _adaptive
    raise DataError(f"{where}: neither a PPO step (system), a reward loss (loss) nor an adaptive KL (init, steps)")


def _tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


#: a step's inputs, one value a token; scores: one a row
INPUTS = ("logprobs", "ref_logprobs", "values", "scores", "new_logprobs", "new_values")


def _step(case: Case) -> Pairs:
    preset = PRESETS[case["system"]]
    conventions = preset.conventions
    known = {f.name for f in fields(Hyper)}
    if unknown := case["hyper"].keys() - known:
        raise ValueError(f"hyper.{min(unknown)} is unknown; known are {', '.join(sorted(known))}")
    hyper = replace(preset.hyper, **case["hyper"])
    x = {name: _tensor(values) for name, values in case["inputs"].items()}
    shape = x["logprobs"].shape
    for name, values in x.items():
        wanted = shape[:1] if name == "scores" else shape
        if name in INPUTS and values.shape != wanted:
            raise ValueError(f"inputs.{name} has the shape {tuple(values.shape)}, not {tuple(wanted)}")
    lengths, width = case["response_lengths"], shape[1]
    if len(lengths) != shape[0] or not all(type(n) is int and 0 <= n <= width for n in lengths):
        raise ValueError(f"response_lengths: {shape[0]} whole numbers from 0 to {width} are expected, not {lengths}")
    rows = Positions.whole(torch.arange(width) < torch.tensor(lengths)[:, None])
    credit = assign_credit(conventions, hyper, x["scores"], x["logprobs"], x["ref_logprobs"], x["values"], rows)
    loss = losses(conventions, hyper, credit, x["new_logprobs"], x["new_values"], x["logprobs"], x["values"], rows)
    # ziegler19 whitens in place, so the rewards it reports are the whitened ones
    rewards = credit.whitened_rewards if conventions.preset == "ziegler19" else credit.token_rewards
    computed = {
        "token_rewards": rewards,
        "advantages": credit.advantages,
        "returns": credit.returns,
        "policy_loss": loss.policy_loss,
        "value_loss": loss.value_loss,
        "weighted_value_loss": hyper.vf_coef * loss.value_loss,
        "policy_clip_fraction": loss.policy_clip_fraction,
        "approx_kl": loss.approx_kl,
    }
    for name, theirs in case["expected"].items():
        if theirs is not None:
            yield name, computed[name], _tensor(theirs)


def _pairwise(case: Case) -> Pairs:
    margin = 0.0 if case.get("margin") is None else _tensor(case["margin"])
    pairs = ops.bradley_terry(_tensor(case["chosen"]), _tensor(case["rejected"]), margin)
    yield "loss", pairs.mean(), _tensor(case["expected"])


def _every_token(case: Case) -> Pairs:
    ids = {side: torch.tensor(case[f"{side}_ids"]) for side in ("chosen", "rejected")}
    width = ids["chosen"].shape[1]
    # These rows come with padding marked by its id: the first one ends the row.
    padding = {side: (value == case["pad_id"]) for side, value in ids.items()}
    lengths = {side: torch.where(p.any(1), p.int().argmax(1), width) for side, p in padding.items()}
    chosen, rejected = _tensor(case["chosen"]), _tensor(case["rejected"])
    loss = ops.every_token_loss(
        chosen, rejected, ids["chosen"], ids["rejected"], lengths["chosen"], lengths["rejected"]
    )
    yield "expected", loss.mean(), _tensor(case["expected"])
    if case.get("expected_chosen_end") is not None:
        ends = chosen.gather(1, lengths["chosen"][:, None] - 1).squeeze(1)
        yield "expected_chosen_end", ends, _tensor(case["expected_chosen_end"])


REWARD_LOSSES: dict[str, Callable[[Case], Pairs]] = {
    "pairwise": _pairwise,
    "every_token_from_divergence": _every_token,
}


def _adaptive(case: Case) -> Pairs:
    coefficient = float(case["init"])
    for number, step in enumerate(case["steps"], 1):
        coefficient = ops.adaptive_kl_coef(
            coefficient, step["current"], target=case["target"], horizon=case["horizon"], n=step["n_steps"]
        )
        yield f"step {number}", _tensor(coefficient), _tensor(step["value"])
