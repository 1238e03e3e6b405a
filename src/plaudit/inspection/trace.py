"""One answer of a PPO run, token by token: every number as the update used it, and the sum that makes it up.

A trace is taken from the tensors of an iteration, kept as JSON beside the run's metrics, and read back as the same
records. Left out: how it looks (see web.trace and recipes.tracing).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from plaudit.config import CRITIC_FREE, PPOConfig
from plaudit.errors import RunError

if TYPE_CHECKING:
    from torch import Tensor

    from plaudit.algorithms.ppo import Account
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

    Where a role was not trained in the step its numbers are None.
    """

    update: int
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

    ``chosen`` is false where the policy did not choose: a token fed after the answer, where a convention looks there.
    ``kl_charged`` and ``counted`` say whether KL is charged here and whether the recursion of the advantages runs here;
    ``score`` and ``dense`` are what is paid here of the answer's score and of a dense reward. ``value`` is as that
    recursion saw it.
    """

    id: int
    text: str
    chosen: bool
    logprob: float
    ref_logprob: float
    kl: float
    kl_charged: bool
    counted: bool
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
    """out = (x − shift) / deviation: what whitening did to a batch."""

    shift: float = 0.0
    deviation: float = 1.0


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
    rewards: Scaling
    advantages: Scaling
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
FOLDER = "traces"


# --- taking ----------------------------------------------------------------------------------------------------------


def traces(config: PPOConfig, account: Account, tokenizer: Tokenizer, responses: Sequence[str], step: int) -> Traces:
    """The traced answers of an iteration; ``responses`` are the answers as text."""
    rules = Rules(
        kl_coef=account.kl_coef,
        kl_place=config.kl.place,
        kl_estimator=config.kl.estimator,
        temperature=config.logprob_temperature,
        estimator=config.estimator,
        gamma=config.gamma,
        lam=config.lam,
        value_target=config.value_target,
        clip_below=config.clip_range,
        clip_above=config.clip_range_above or config.clip_range,
        rewards=_scaling(account.credit.token_rewards, account.credit.whitened_rewards, account.rows.mask),
        advantages=_scaling(account.credit.raw_advantages, account.credit.advantages, account.rows.mask),
        own=tuple(n for n in ("token_rewards", "advantages", "policy_loss") if getattr(config.functions, n)),
    )
    count = min(config.trace.answers, len(account.rows))
    return Traces(step, rules, tuple(_trace(config, account, tokenizer, responses, row) for row in range(count)))


def _scaling(before: Tensor, after: Tensor, mask: Tensor) -> Scaling:
    """The map that took one to the other, from its two extremes: whitening is the same line for every token."""
    x, y = before[mask].double(), after[mask].double()
    if not len(x) or float(x.max() - x.min()) < 1e-12:
        return Scaling(float(x.mean() - y.mean()) if len(x) else 0.0, 1.0)
    high, low = int(x.argmax()), int(x.argmin())
    slope = float((y[high] - y[low]) / (x[high] - x[low]))
    return Scaling(float(x[low] - y[low] / slope), 1 / slope) if slope else Scaling(float(x.mean()), math.inf)


def _trace(config: PPOConfig, account: Account, tokenizer: Tokenizer, responses: Sequence[str], row: int) -> Trace:
    c, rows, positions = config.conventions, account.rows, account.positions
    whole = positions.span(c.widest()) | positions.paid_at(c.score_position)
    places = (whole[row] & rows.real()[row]).nonzero().flatten().tolist()
    charged, paid_at = positions.span(c.kl_over)[row], positions.paid_at(c.score_position)[row]
    counted, valued = account.credited(c)[row], positions.span(c.values_over)[row]
    at_end = account.paid - account.facts.dense.sum(1)
    read, credit, facts = account.read, account.credit, account.facts
    seen = _seen(account, row)
    tokens = []
    for s in places:
        tokens.append(
            Token(
                id=int(rows.tokens[row, s]),
                text=tokenizer.token(int(rows.tokens[row, s])),
                chosen=bool(rows.mask[row, s]),
                logprob=float(read.logprobs[row, s]),
                ref_logprob=float(read.ref_logprobs[row, s]),
                kl=float(read.kl[row, s]),
                kl_charged=bool(charged[s]),
                counted=bool(counted[s]),
                score=float(at_end[row]) if bool(paid_at[s]) else 0.0,
                dense=float(facts.dense[row, s]),
                reward=float(credit.token_rewards[row, s]),
                whitened_reward=float(credit.whitened_rewards[row, s]),
                value=float(facts.values[row, s]) if bool(valued[s]) else 0.0,
                raw_advantage=float(credit.raw_advantages[row, s]),
                advantage=float(credit.advantages[row, s]),
                returns=float(credit.returns[row, s]),
                importance=float(account.importance[row, s]),
                alternatives=_alternatives(account.alternatives["actor"], tokenizer, row, s),
                ref_alternatives=_alternatives(account.alternatives["reference"], tokenizer, row, s),
                steps=_steps(seen, s),
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


def _alternatives(found: Tensor, tokenizer: Tokenizer, row: int, s: int) -> tuple[Alternative, ...]:
    if s >= found.shape[1]:
        return ()
    logprobs, ids = found[row, s].tolist()
    # where the policy had no choice nothing was looked up, and all is 0
    return tuple(
        Alternative(int(i), tokenizer.token(int(i)), p) for p, i in zip(logprobs, ids, strict=True) if any(logprobs)
    )


def _seen(account: Account, row: int) -> dict[int, dict[str, Tensor]]:
    """What each step saw of an answer, f32 (S,) by name: actor and critic in their own records, put together."""
    found: dict[int, dict[str, Tensor]] = {}
    for seen in account.seen:
        for at in (seen.number == account.number + row).nonzero().flatten().tolist():
            found.setdefault(seen.update, {}).update({name: x[at] for name, x in seen.values.items()})
    return found


def _steps(seen: dict[int, dict[str, Tensor]], s: int) -> tuple[Step, ...]:
    """What the steps saw of a token."""
    names = {"logprob": "new_logprobs", "value": "new_values"}
    made = []
    for update, rows in sorted(seen.items()):
        values = {name: float(x[s]) for name, x in rows.items() if s < len(x)}
        said: dict[str, Any] = {f.name: values.get(names.get(f.name, f.name)) for f in fields(Step)}
        clipped = said["clipped"]
        made.append(Step(**said | {"update": update + 1, "clipped": None if clipped is None else bool(clipped)}))
    return tuple(made)


# --- keeping and finding ----------------------------------------------------------------------------------------------


def place(step: int) -> str:
    """The file of an iteration's traces, within the run folder."""
    return f"{FOLDER}/iteration-{step:06d}.json"


def plain(made: Traces) -> dict[str, Any]:
    """As JSON has it."""
    return _FORM.dump_python(made, mode="json")


def forget_after(run: Path, step: int) -> None:
    """Drops traces later than ``step``: a resumed run takes them again."""
    for number in steps(run):
        if number > step:
            (run / place(number)).unlink()


def steps(run: Path) -> list[int]:
    """The traced iterations of a run, in order."""
    found = (run / FOLDER).glob("iteration-*.json")
    return sorted(int(n) for path in found if (n := path.stem.removeprefix("iteration-")).isdecimal())


def read(run: Path, step: int) -> Traces:
    """
    Raises:
        RunError: there are no traces of that iteration, or they cannot be read.
    """
    file = run / place(step)
    try:
        return _FORM.validate_json(file.read_bytes())
    except FileNotFoundError:
        there = steps(run)
        shown = ", ".join(map(str, there[:12])) + (" …" if len(there) > 12 else "")
        raise RunError(f"{run}: iteration {step} is not traced; traced are {shown or 'none'}") from None
    except (OSError, ValidationError) as error:
        raise RunError(f"{file}: cannot be read as a trace ({str(error).splitlines()[0]})") from None


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
    there = steps(run)
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
    if row is not None and not prompt:
        rows = len(found.answers)
        raise RunError(
            f"{run}: iteration {number} has no traced row {row}, only 0 to {rows - 1}; a run with trace.answers="
            f"{row + 1} keeps it"
        )
    shown = "; ".join(repr(t.prompt[:60]) for t in read(run, looked[0]).answers)
    raise RunError(f"{run}: no traced answer has {prompt!r} in its prompt; iteration {looked[0]} has {shown}")


# --- the sums ---------------------------------------------------------------------------------------------------------

#: the words that the sums are said with; a page in another language brings its own
WORDS = {
    "score": "score",
    "prefix": "step of the prefix's score",
    "nothing": "nothing is paid here",
    "penalties": "the score {score} {change} for penalties and limits",
    "own": "{name} makes {made} of it",
    "whitened": "whitened",
    "vocabulary": "Σ over the vocabulary of",
    "estimate": "estimate {name} of it",
    "value": "V before this token, by the critic from before the update",
    "discounted": "rewards from here on, discounted by γ = {gamma}",
    "step": "step {update}",
    "clipped": "beyond {edge}: clipped, so this token pulls no further",
}
#: the numbers that have a sum, in the order in which they come about
NAMES = ("kl", "reward", "value", "advantage", "returns", "ratio")


def number(x: float | None, digits: int = 3) -> str:
    """A number as it is shown, with more digits where these would say 0; a dash where there is none."""
    if x is None:
        return "–"
    if x and abs(x) < 0.5 * 10**-digits:
        return f"{x:.1e}".replace("-", "−")
    return f"{x:.{digits}f}".replace("-", "−")


def term(x: float) -> str:
    """A number that follows an operator."""
    return f"({number(x)})" if x < 0 else number(x)


def sums(found: Found, place: int, words: Mapping[str, str] = WORDS) -> dict[str, str]:
    """How each number of a token was made, by the number's name: the sum with its terms."""
    rules, trace = found.rules, found.trace
    token = trace.tokens[place]
    following = next((t for t in trace.tokens[place + 1 :] if t.counted), None)
    made = {
        "kl": _kl_sum(rules, token, words),
        "reward": _reward_sum(rules, trace, token, words),
        "value": words["value"],
        "advantage": _advantage_sum(rules, trace, token, following, words),
        "returns": _return_sum(rules, token, words),
    }
    if rules.estimator in CRITIC_FREE:
        del made["value"], made["returns"]
    if token.chosen and (last := last_step(token)):
        made["ratio"] = _ratio_sum(rules, token, last, words)
    return made


def last_step(token: Token) -> Step | None:
    """The last step that trained the actor on this token."""
    return next((s for s in reversed(token.steps) if s.ratio is not None), None)


def _kl_sum(rules: Rules, token: Token, words: Mapping[str, str]) -> str:
    if rules.kl_estimator == "full":
        return f"{words['vocabulary']} π (log π − log π_ref) = {number(token.kl)}"
    difference = token.logprob - token.ref_logprob
    text = f"log π − log π_ref = {number(token.logprob)} − {term(token.ref_logprob)} = {number(difference)}"
    if rules.kl_estimator == "k1" and abs(token.kl - difference) < 1e-6:
        return text
    return f"{text}; {words['estimate'].format(name=rules.kl_estimator)}: {number(token.kl)}"


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
    if token.whitened_reward != token.reward:
        text += f";  {_scaled(rules.rewards, token.reward, token.whitened_reward, words)}"
    return text


def _scaled(scale: Scaling, before: float, after: float, words: Mapping[str, str]) -> str:
    return (
        f"{words['whitened']}: ({number(before)} − {term(scale.shift)}) / {number(scale.deviation)} = {number(after)}"
    )


def _advantage_sum(
    rules: Rules, trace: Trace, token: Token, following: Token | None, words: Mapping[str, str]
) -> str:
    raw = token.raw_advantage
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
    if token.advantage != raw and token.chosen:
        text += f";  {_scaled(rules.advantages, raw, token.advantage, words)}"
    return text


def _return_sum(rules: Rules, token: Token, words: Mapping[str, str]) -> str:
    if "advantages" in rules.own:
        return f"functions.advantages: {number(token.returns)}"
    if rules.value_target == "discounted_sum":
        return f"{words['discounted'].format(gamma=f'{rules.gamma:g}')}: {number(token.returns)}"
    return f"A + V = {number(token.raw_advantage)} + {term(token.value)} = {number(token.returns)}"


def _ratio_sum(rules: Rules, token: Token, step: Step, words: Mapping[str, str]) -> str:
    assert step.logprob is not None
    text = (
        f"{words['step'].format(update=step.update)}: exp(new − old) = exp({number(step.logprob)} − "
        f"{term(token.logprob)}) = {number(step.ratio)}"
    )
    if step.clipped:
        edge = 1 + rules.clip_above if token.advantage > 0 else 1 - rules.clip_below
        text += f", {words['clipped'].format(edge=f'{edge:g}')}"
    return text
