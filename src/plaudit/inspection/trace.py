"""One answer of a PPO run, token by token: every number as the update used it, and the sum that makes it up.

A trace is taken from the tensors of an iteration, kept as JSON beside the run's metrics, and read back as the same
records. Left out: how it looks (see web.trace and pages.tracing).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from plaudit.config import CRITIC_FREE, PPOConfig
from plaudit.errors import RunError, first_line
from plaudit.runs import trace_place, traced_steps

if TYPE_CHECKING:
    from torch import Tensor

    from plaudit.algorithms.ppo import Account
    from plaudit.presets import Whitening
    from plaudit.tokenizer import Tokenizer


@dataclass(frozen=True)
class Alternative:
    """A token that might have stood in another's place, and how likely it was, in nats."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class Step:
    """What one optimizer step saw of a token: the actor's log-probability then, the ratio to the old policy, whether
    the clip took its gradient away, the entropy in nats, the policy loss; the critic's value and the value loss.

    Where a role was not trained on the token in this step its numbers are None. ``taken``: the actor made the step; it
    is false where the step was refused (a mean ratio out of bounds, a gradient that is not finite).
    """

    update: int
    taken: bool
    logprob: float | None
    ratio: float | None
    clipped: bool | None
    entropy: float | None
    policy_loss: float | None
    value: float | None
    value_loss: float | None


@dataclass(frozen=True)
class Token:
    """One token with all that was made of it. Log-probabilities, KL and entropies are in nats.

    ``chosen`` is false where the policy did not choose: a token fed after the answer, or a place beyond the row (its
    ``id`` is None, and so is what a network would have said), where a convention looks there. ``kl_charged``,
    ``counted`` and ``valued`` say whether KL is charged here, whether the recursion of the advantages runs here, and
    whether V counts; ``score`` and ``dense`` are what is paid here of the answer's score and of a dense reward.
    ``value`` is as that recursion saw it.
    """

    id: int | None
    text: str
    chosen: bool
    logprob: float | None
    ref_logprob: float | None
    kl: float
    kl_charged: bool
    counted: bool
    valued: bool
    score: float
    dense: float
    reward: float
    whitened_reward: float
    value: float
    raw_advantage: float
    advantage: float
    returns: float
    importance: float
    alternatives: tuple[Alternative, ...]
    ref_alternatives: tuple[Alternative, ...]
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Scaling:
    """out = (x − shift) / deviation: what whitening did to a batch, where it reached."""

    shift: float
    deviation: float


@dataclass(frozen=True)
class Rules:
    """What the sums of an iteration are made with; named as in the configuration. ``kl_coef`` is the iteration's own.

    ``own`` names the user's functions that stood in the place of ours.
    """

    kl_coef: float
    kl_place: str
    kl_estimator: str
    temperature: float
    estimator: str
    gamma: float
    lam: float
    value_target: str
    clip_below: float
    clip_above: float
    rewards: Scaling | None
    advantages: Scaling | None
    own: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trace:
    """One answer: the ``row``-th of its iteration. ``score`` is the sources' sum, ``paid`` what is left of it after
    clip and penalties; ``bootstrap`` what the critic expected after an answer that was cut."""

    row: int
    prompt: str
    response: str
    ended: bool
    score: float
    sources: dict[str, float]
    paid: float
    bootstrap: float
    tokens: tuple[Token, ...]


@dataclass(frozen=True)
class Traces:
    """An iteration's traced answers, and the rules that all of them share."""

    step: int
    rules: Rules
    answers: tuple[Trace, ...]


_FORM = TypeAdapter(Traces)


# --- taking ----------------------------------------------------------------------------------------------------------


def traces(config: PPOConfig, account: Account, tokenizer: Tokenizer, responses: Sequence[str], step: int) -> Traces:
    """The traced answers of an iteration; ``responses`` are the answers as text."""
    c, hyper, credit = config.conventions, config.hyper(), account.credit
    below, above = hyper.clip if isinstance(hyper.clip, tuple) else (hyper.clip, hyper.clip)
    rules = Rules(
        kl_coef=account.kl_coef,
        kl_place=config.kl.place,
        kl_estimator=config.kl.estimator,
        temperature=config.logprob_temperature,
        estimator=config.estimator,
        gamma=config.gamma,
        lam=config.lam,
        value_target=config.value_target,
        clip_below=below,
        clip_above=above,
        rewards=_scaling(c.reward_whitening, credit.token_rewards, credit.whitened_rewards, account),
        advantages=_scaling(c.advantage_whitening, credit.raw_advantages, credit.advantages, account),
        own=tuple(n for n in ("token_rewards", "advantages", "policy_loss") if getattr(config.functions, n)),
    )
    places = _Places.of(config, account)
    rows = range(account.notes.count)
    return Traces(step, rules, tuple(_trace(account, places, tokenizer, responses, row) for row in rows))


def _scaling(w: Whitening, before: Tensor, after: Tensor, account: Account) -> Scaling | None:
    """What whitening did; None where it was not done."""
    if before is after:
        return None
    from plaudit.ops import whitening

    over = account.positions.span(w.over)
    mean, factor = (float(x) for x in whitening(before, over, unbiased=w.unbiased, floor=w.floor))
    # with the mean kept, (x − m) · f + m
    return Scaling(mean - mean / factor if w.keep_mean else mean, 1 / factor)


@dataclass(frozen=True)
class _Places:
    """What each place of a batch is, bool (B, S): shown at all; where KL is charged, the score paid, V counts, the
    critic trained."""

    shown: Tensor
    charged: Tensor
    paid: Tensor
    valued: Tensor
    trained: Tensor

    @classmethod
    def of(cls, config: PPOConfig, account: Account) -> _Places:
        c, positions = config.conventions, account.positions
        return cls(
            # the recursion may run beyond the row, on places that no network reads
            shown=(positions.span(c.widest()) & account.rows.real()) | account.counted,
            charged=positions.span(c.kl_over),
            paid=positions.paid_at(c.score_position),
            valued=positions.span(c.values_over),
            trained=positions.span(c.value_loss_over),
        )


def _trace(account: Account, places: _Places, tokenizer: Tokenizer, responses: Sequence[str], row: int) -> Trace:
    rows, read, credit, facts = account.rows, account.read, account.credit, account.facts
    at_end = float((account.paid - facts.dense.sum(1))[row])
    real, seen = rows.real()[row], _seen(account, row)
    mine, theirs = (account.notes.alternatives[role][row] for role in ("actor", "reference"))
    tokens = []
    for s in places.shown[row].nonzero().flatten().tolist():
        there, chosen, valued = bool(real[s]), bool(rows.mask[row, s]), bool(places.valued[row, s])
        id = int(rows.tokens[row, s]) if there else None
        tokens.append(
            Token(
                id=id,
                text="" if id is None else tokenizer.token(id),
                chosen=chosen,
                logprob=float(read.logprobs[row, s]) if there else None,
                ref_logprob=float(read.ref_logprobs[row, s]) if there else None,
                kl=float(read.kl[row, s]),
                kl_charged=bool(places.charged[row, s]),
                counted=bool(account.counted[row, s]),
                valued=valued,
                score=at_end if bool(places.paid[row, s]) else 0.0,
                dense=float(facts.dense[row, s]),
                reward=float(credit.token_rewards[row, s]),
                whitened_reward=float(credit.whitened_rewards[row, s]),
                value=float(facts.values[row, s]) if valued else 0.0,
                raw_advantage=float(credit.raw_advantages[row, s]),
                advantage=float(credit.advantages[row, s]),
                returns=float(credit.returns[row, s]),
                importance=float(account.importance[row, s]),
                alternatives=_alternatives(mine[s], tokenizer) if chosen else (),
                ref_alternatives=_alternatives(theirs[s], tokenizer) if chosen else (),
                steps=_steps(seen, account.notes.refused, s, chosen, bool(places.trained[row, s])),
            )
        )
    return Trace(
        row=row,
        prompt=rows.prompts[row].text,
        response=responses[row],
        ended=bool(rows.terminated[row]),
        score=float(account.judgement.scores[row]),
        sources={name: float(x[row]) for name, x in account.judgement.sources.items()},
        paid=float(account.paid[row]),
        bootstrap=float(facts.bootstrap[row]),
        tokens=tuple(tokens),
    )


def _alternatives(found: Tensor, tokenizer: Tokenizer) -> tuple[Alternative, ...]:
    logprobs, ids = found.tolist()
    return tuple(Alternative(int(i), tokenizer.token(int(i)), p) for p, i in zip(logprobs, ids, strict=True))


def _seen(account: Account, row: int) -> dict[int, dict[str, Tensor]]:
    """What each step saw of an answer, f32 (S,) by name: actor and critic in their own records, put together."""
    found: dict[int, dict[str, Tensor]] = {}
    for seen in account.notes.seen:
        for at in (seen.number == account.notes.first + row).nonzero().flatten().tolist():
            found.setdefault(seen.update, {}).update({name: x[at] for name, x in seen.values.items()})
    return found


def _steps(
    seen: dict[int, dict[str, Tensor]], refused: set[int], s: int, chosen: bool, valued: bool
) -> tuple[Step, ...]:
    """What the steps saw of a token: the actor where the policy chose it, the critic where its loss is taken."""
    made = []
    for update, rows in sorted(seen.items()):
        v = {name: float(x[s]) for name, x in rows.items() if s < len(x)}
        mine = v if chosen else {}
        critics = v if valued else {}
        clipped = mine.get("clipped")
        made.append(
            Step(
                update=update + 1,
                taken=update not in refused,
                logprob=mine.get("new_logprobs"),
                ratio=mine.get("ratio"),
                clipped=None if clipped is None else bool(clipped),
                entropy=mine.get("entropy"),
                policy_loss=mine.get("policy_loss"),
                value=critics.get("new_values"),
                value_loss=critics.get("value_loss"),
            )
        )
    return tuple(made)


# --- keeping and finding ----------------------------------------------------------------------------------------------


def plain(made: Traces) -> dict[str, Any]:
    """As JSON has it."""
    return _FORM.dump_python(made, mode="json")


def read(run: Path, step: int) -> Traces:
    """
    Raises:
        RunError: there are no traces of that iteration, or they cannot be read.
    """
    file = run / trace_place(step)
    try:
        found = _FORM.validate_python(json.loads(file.read_bytes(), parse_constant=_not_finite))
    except FileNotFoundError:
        there = traced_steps(run)
        shown = ", ".join(map(str, there[:12])) + (" …" if len(there) > 12 else "")
        raise RunError(f"{run}: iteration {step} is not traced; traced are {shown or 'none'}") from None
    except ValidationError:
        raise RunError(f"{file}: was made by another version of Plaudit, or by other hands; it is no trace") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{file}: cannot be read as a trace ({first_line(error)})") from None
    if not found.answers or not all(answer.tokens for answer in found.answers):
        raise RunError(f"{file}: holds an answer without a token, or none; it is no trace")
    return found


def _not_finite(name: str) -> None:
    raise ValueError(f"it holds {name}, which is no number")


@dataclass(frozen=True)
class Found:
    """A traced answer with its iteration and the rules of its sums."""

    step: int
    rules: Rules
    trace: Trace


def find(run: Path, step: int | None = None, row: int | None = None, prompt: str = "") -> Found:
    """The answer asked for: of the newest traced iteration where none is named, the first one whose prompt contains
    ``prompt``; with ``prompt`` alone, the newest iteration that has such a one.

    Raises:
        RunError: there is no such answer; with what there is.
    """
    there = traced_steps(run)
    if not there:
        raise RunError(
            f"{run}: holds no traces; a PPO run keeps them while trace.answers is not 0, from its first iteration on"
        )
    looked = [step] if step is not None else there[::-1] if prompt else there[-1:]
    for number in looked:
        found = read(run, number)
        for trace in found.answers:
            if (row is None or trace.row == row) and prompt.casefold() in trace.prompt.casefold():
                return Found(number, found.rules, trace)
    if row is not None and row < 0:
        raise RunError(f"{run}: rows are counted from 0, not {row}")
    if row is not None and not prompt:
        rows = len(found.answers)
        raise RunError(
            f"{run}: iteration {number} has no traced row {row}, only 0 to {rows - 1}; a run with trace.answers="
            f"{row + 1} keeps it"
        )
    shown = "; ".join(repr(t.prompt[:60]) for t in read(run, looked[0]).answers)
    raise RunError(f"{run}: no traced answer has {prompt!r} in its prompt; iteration {looked[0]} has {shown}")


# --- the sums ---------------------------------------------------------------------------------------------------------


def number(x: float | None, digits: int = 3) -> str:
    """A number as it is shown, with more digits where these would say 0; a dash where there is none."""
    if x is None:
        return "–"
    if 0 < abs(x) < 0.1:
        # so that sums of small numbers come out
        digits += 1
    if 0 < abs(x) < 0.5 * 10**-digits:
        return f"{x:.1e}".replace("-", "−")
    return f"{x:.{digits}f}".replace("-", "−")


def term(x: float) -> str:
    """A number that follows an operator."""
    return f"({number(x)})" if x < 0 else number(x)


def sums(found: Found, place: int, words: Mapping[str, str]) -> dict[str, str]:
    """How each number of a token was made, by the number's name: the sum with its terms. ``words``: what it is said
    with (see web.words.sum_words)."""
    rules, trace = found.rules, found.trace
    token = trace.tokens[place]
    following = next((t for t in trace.tokens[place + 1 :] if t.counted), None)
    made = {
        "kl": _kl_sum(rules, token, words) if token.logprob is not None else "",
        "reward": _reward_sum(rules, trace, token, words),
        "value": words["value"] if token.valued else words["no_value"],
        "advantage": _advantage_sum(rules, trace, token, following, words),
        "returns": _return_sum(rules, token, words),
    }
    if rules.estimator in CRITIC_FREE:
        del made["value"], made["returns"]
    if token.logprob is None:
        # no network reads a place beyond the row
        del made["kl"]
    if last := last_step(token):
        made["ratio"] = _ratio_sum(rules, token, last, words)
    return made


def last_step(token: Token) -> Step | None:
    """The last step that trained the actor on this token."""
    return next((s for s in reversed(token.steps) if s.ratio is not None and s.logprob is not None and s.taken), None)


def columns(found: Found) -> tuple[str, ...]:
    """The numbers that an answer has, in the order in which they come about."""
    names = ("logprob", "ref_logprob", "kl", "reward", "value", "advantage", "returns", "ratio", "entropy")
    free = found.rules.estimator in CRITIC_FREE
    return tuple(name for name in names if not (free and name in ("value", "returns")))


def numbers(token: Token) -> dict[str, float | None]:
    """A token's numbers by name; ratio and entropy are those of the last step that trained the actor on it."""
    step = last_step(token)
    made: dict[str, float | None] = {
        name: getattr(token, name)
        for name in ("logprob", "ref_logprob", "kl", "reward", "value", "advantage", "returns")
    }
    return made | {"ratio": step.ratio if step else None, "entropy": step.entropy if step else None}


def _estimate(name: str, difference: float) -> float:
    """A KL estimate of log π − log π_ref (see ops.kl_estimate), to see whether a limit was at work."""
    return {
        "k1": difference,
        "k2": difference**2 / 2,
        "k3": math.expm1(-difference) + difference,
        "abs": abs(difference),
    }[name]


def _kl_sum(rules: Rules, token: Token, words: Mapping[str, str]) -> str:
    if rules.kl_estimator == "full":
        return f"{words['vocabulary']} π (log π − log π_ref): {number(token.kl)}"
    assert token.logprob is not None and token.ref_logprob is not None
    difference = token.logprob - token.ref_logprob
    text = f"log π − log π_ref = {number(token.logprob)} − {term(token.ref_logprob)} = {number(difference)}"
    made = _estimate(rules.kl_estimator, difference)
    if rules.kl_estimator != "k1":
        text += f"; {words['estimate'].format(name=rules.kl_estimator)}: {number(made)}"
    return text if _same(made, token.kl) else f"{text}; {words['limited']}: {number(token.kl)}"


def _same(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-4)


def _reward_sum(rules: Rules, trace: Trace, token: Token, words: Mapping[str, str]) -> str:
    terms, total = [], token.score + token.dense
    if rules.kl_place == "reward" and token.kl_charged:
        terms.append(f"−{rules.kl_coef:.3g} × {term(token.kl)}")
        total -= rules.kl_coef * token.kl
    terms += [f"{words[name]} {term(x)}" for name, x in (("score", token.score), ("prefix", token.dense)) if x]
    text = f"{' + '.join(terms) or words['nothing']} = {number(total)}"
    if token.score and trace.paid != trace.score:
        change = trace.paid - trace.score
        signed = f"{'−' if change < 0 else '+'} {number(abs(change))}"
        text += f";  {words['penalties'].format(score=number(trace.score), change=signed)}"
    if "token_rewards" in rules.own:
        text += f";  {words['own'].format(name='functions.token_rewards', made=number(token.reward))}"
    return text + _scaled(rules.rewards, token.reward, token.whitened_reward, words)


def _scaled(scale: Scaling | None, before: float, after: float, words: Mapping[str, str]) -> str:
    """How whitening took one number to the other, as a further sentence."""
    if scale is None:
        return ""
    if not _same((before - scale.shift) / scale.deviation, after):
        return f";  {words['not_whitened'].format(made=number(after))}"
    sum = f"({number(before)} − {term(scale.shift)}) / {number(scale.deviation)} = {number(after)}"
    return f";  {words['whitened']}: {sum}"


def _advantage_sum(
    rules: Rules, trace: Trace, token: Token, following: Token | None, words: Mapping[str, str]
) -> str:
    raw = token.raw_advantage
    if not token.counted:
        return words["no_advantage"]
    if "advantages" in rules.own:
        text = f"functions.advantages: {number(raw)}"
    elif rules.estimator == "gae":
        then = following.value if following else trace.bootstrap
        delta = token.whitened_reward + rules.gamma * then - token.value
        later = following.raw_advantage if following else 0.0
        text = (
            f"δ = r + γ V′ − V = {number(token.whitened_reward)} + {rules.gamma:g} × {term(then)} − "
            f"{term(token.value)} = {number(delta)};  A = δ + γλ A′ = {number(delta)} + {rules.gamma * rules.lam:g} × "
            f"{term(later)} = {number(raw)}"
        )
    else:
        text = f"{rules.estimator}: {number(raw)}"
    return text + _scaled(rules.advantages, raw, token.advantage, words)


def _return_sum(rules: Rules, token: Token, words: Mapping[str, str]) -> str:
    if not token.valued:
        return words["no_value"]
    if "advantages" in rules.own:
        return f"functions.advantages: {number(token.returns)}"
    if rules.value_target == "discounted_sum":
        return f"{words['discounted'].format(gamma=f'{rules.gamma:g}')}: {number(token.returns)}"
    return f"A + V = {number(token.raw_advantage)} + {term(token.value)} = {number(token.returns)}"


def _ratio_sum(rules: Rules, token: Token, step: Step, words: Mapping[str, str]) -> str:
    assert step.logprob is not None and step.ratio is not None and token.logprob is not None
    ratio = math.exp(step.logprob - token.logprob)
    text = (
        f"{words['step'].format(update=step.update)}: exp(new − old) = exp({number(step.logprob)} − "
        f"{term(token.logprob)}) = {number(ratio)}"
    )
    if not _same(ratio, step.ratio):
        text += f"; {words['limited']}: {number(step.ratio)}"
    if step.clipped and "policy_loss" not in rules.own:
        edge = 1 + rules.clip_above if token.advantage > 0 else 1 - rules.clip_below
        text += f", {words['clipped'].format(edge=f'{edge:g}')}"
    if token.importance != 1:
        text += f"; {words['weighs'].format(weight=number(token.importance))}"
    return text
