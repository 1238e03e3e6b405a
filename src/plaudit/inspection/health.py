"""Signs that training is going wrong, from the numbers of a run so far: what is seen, why it matters, what to try.

A policy can win score without getting better. Each sign compares the present with the run's own beginning or best, over
a few iterations, so that one noisy batch raises no alarm. Left out: where the numbers come from, and who is told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

Lines = Sequence[dict[str, float]]
#: iterations over which a level is taken
SPAN = 3
#: iterations after which something has lasted for long
LONG = 10
#: iterations over which a judge that only watches is averaged: few answers make its mean noisy
WATCHED = 5
#: how many standard errors a fall must exceed; the best of many levels is a lucky one, so it is more than for one look
BEYOND_NOISE = 4.0


@dataclass(frozen=True)
class Sign:
    """A named sign: what was seen, with numbers; why it matters; what to try."""

    kind: str
    seen: str
    why: str
    advice: str
    iteration: int = 0

    @property
    def message(self) -> str:
        return f"iteration {self.iteration}: {self.seen}. {self.why}. {self.advice}"


def signs(lines: Lines, monitors: Sequence[str] = (), *, on_policy: bool = True) -> list[Sign]:
    """The signs present at the last of ``lines``, one dictionary an iteration (as in metrics.jsonl).

    ``on_policy``: every iteration's first minibatch is of the policy that is trained, so that its ratio is 1.
    """
    if not lines:
        return []
    found = [sign for check in CHECKS if (sign := check(lines)) is not None]
    found += [sign for name in monitors if (sign := _parted(lines, name)) is not None]
    if on_policy and (sign := _first_ratio(lines)) is not None:
        found.append(sign)
    step = int(lines[-1].get("step", len(lines)))
    return [Sign(s.kind, s.seen, s.why, s.advice, step) for s in found]


def _level(lines: Lines, key: str, span: int = SPAN) -> float | None:
    """The mean of the last ``span`` values, None where there are too few."""
    values = [line[key] for line in lines[-span:] if key in line]
    return sum(values) / len(values) if len(values) == span else None


def _noise(values: Sequence[float]) -> float:
    """The standard deviation of a series around its own course: of two neighbours' difference it is √2 times that, and
    the median of such a difference's size, which a jump or two do not move, is 0.6745 of its deviation."""
    return median(abs(b - a) for a, b in pairwise(values)) / (0.6745 * math.sqrt(2))


def _start(lines: Lines, key: str) -> float | None:
    return _level(lines[:SPAN], key)


def _vanishing(lines: Lines) -> Sign | None:
    first, now = lines[0].get("response_tokens"), lines[-1].get("response_tokens")
    empty = lines[-1].get("empty", 0.0)
    if first and now is not None and len(lines) > 1 and (now < 0.4 * first or empty > 0.3):
        return Sign(
            "collapse",
            f"answers shrink: {now:.1f} tokens on average after {first:.1f} at the start, {empty:.0%} are empty",
            "The reward may pay for brevity, or every token costs more KL than it earns",
            "Look at samples.jsonl, raise kl.coef, lower actor.learning_rate",
        )
    return None


def _growing(lines: Lines) -> Sign | None:
    first, now, tie = _start(lines, "response_tokens"), _level(lines, "response_tokens"), _level(lines, "score_length")
    if first and now and tie is not None and (now > 2.5 * first or (now > 1.5 * first and tie > 0.4)):
        return Sign(
            "length",
            f"answers grow: {now:.1f} tokens after {first:.1f} (correlation of score and length {tie:.2f})",
            "Reward models like long answers for their length, and people do not",
            "Check the reward model for length, or set length_penalty",
        )
    return None


def _repeating(lines: Lines) -> Sign | None:
    spread, first = _level(lines, "distinct2"), _start(lines, "distinct2")
    repeated, before = _level(lines, "repeated3"), _start(lines, "repeated3")
    if spread is not None and first and spread < 0.6 * first:
        return Sign(
            "diversity",
            f"answers become alike: distinct-2 {spread:.2f} after {first:.2f}",
            "One phrase that the reward likes is taking over, and answers that are all the same teach nothing",
            "Raise kl.coef or entropy_coef, or stop earlier",
        )
    if repeated is not None and before is not None and repeated > max(0.1, 3 * before):
        return Sign(
            "repetition",
            f"{repeated:.0%} of word triples repeat within their answer, {before:.0%} at the start",
            "The reward reads repetition as emphasis; a person reads it as broken",
            "Raise kl.coef, and look at samples.jsonl",
        )
    return None


def _runaway(lines: Lines) -> Sign | None:
    """KL is large already and doubles within a few iterations."""
    now, before = _level(lines, "kl"), _level(lines[: -2 * SPAN], "kl")
    if now is not None and before is not None and now > max(20.0, 2 * before):
        return Sign(
            "kl_runaway",
            f"KL runs away: {now:.1f} nats an answer, {before:.1f} six iterations before",
            "So far from the reference the reward model judges texts that it has never seen",
            "Raise kl.coef, use kl.controller=adaptive, or lower actor.learning_rate",
        )
    return None


def _overspent(lines: Lines) -> Sign | None:
    """KL goes on growing while the score stands still."""
    if len(lines) < 4 * SPAN or not all("kl" in line and "score" in line for line in lines):
        return None
    before, now = lines[: -2 * SPAN], lines
    kl_was, kl_is = _level(before, "kl"), _level(now, "kl")
    score_was, score_is = _level(before, "score"), _level(now, "score")
    assert kl_was is not None and kl_is is not None and score_was is not None and score_is is not None
    gained = max(line["score"] for line in lines) - lines[0]["score"]
    if kl_is > max(5.0, 1.3 * kl_was) and score_is - score_was < 0.02 * max(gained, 0.1):
        return Sign(
            "kl_spent",
            f"KL rose from {kl_was:.1f} to {kl_is:.1f} nats an answer, the score did not",
            "The distance from the reference is paid for and buys nothing",
            "Stop here, or raise kl.coef",
        )
    return None


def _clipping(lines: Lines) -> Sign | None:
    share = _level(lines, "actor/clip_fraction")
    if share is not None and share > 0.4:
        return Sign(
            "clipping",
            f"{share:.0%} of tokens are clipped",
            "Steps are so large that most tokens no longer teach anything",
            "Lower actor.learning_rate, or use fewer epochs",
        )
    return None


def _blind_critic(lines: Lines) -> Sign | None:
    values = [line["explained_variance"] for line in lines[-LONG:] if "explained_variance" in line]
    # a critic that starts from nothing is below 0 for a while, and one batch is below by chance
    if len(lines) >= 2 * LONG and len(values) == LONG and max(values) < 0:
        return Sign(
            "critic",
            f"the critic has explained nothing for {LONG} iterations (explained variance {values[-1]:.2f})",
            "Advantages from it are noisier than the rewards alone",
            "Raise critic.learning_rate, or give it critic_warmup",
        )
    return None


def _entropy(lines: Lines) -> Sign | None:
    first, now = _start(lines, "actor/entropy_nats_per_token"), _level(lines, "actor/entropy_nats_per_token")
    if first and now is not None and now < 0.15 * first:
        return Sign(
            "entropy",
            f"the policy no longer explores: entropy {now:.2f} nats a token after {first:.2f}",
            "What it does not try it cannot learn, and all answers become one",
            "Raise entropy_coef or kl.coef, or lower actor.learning_rate",
        )
    return None


def _scale(lines: Lines) -> Sign | None:
    """What answers differ by in score, beside what a nat of KL costs."""
    spread, price = _level(lines, "score_std"), _level(lines, "kl_coef")
    if spread is None or price is None:
        return None
    if price and 0 < spread < 0.2 * price:
        return Sign(
            "reward_scale",
            f"scores differ by {spread:.2g} between answers (standard deviation), and one nat of KL costs {price:.2g}",
            "The price of KL drowns the reward, so the policy hardly moves",
            "Lower kl.coef, raise reward_weight, or set reward_normalise=true",
        )
    if spread > max(50.0, 2000 * price):
        return Sign(
            "reward_scale",
            f"scores differ by {spread:.3g} between answers (standard deviation), and one nat of KL costs {price:.2g}",
            "On such a scale KL holds nothing back and the clipped value loss cannot follow",
            "Set reward_normalise=true, or lower reward_weight",
        )
    return None


def _first_ratio(lines: Lines) -> Sign | None:
    off = lines[-1].get("first_log_ratio_max", 0.0)
    if off > 1e-4:
        return Sign(
            "first_ratio",
            f"the ratio at the first minibatch is off 1 by {off:.1e}",
            "The trainer does not see what was sampled, so every update rests on wrong probabilities",
            "Use float32, and look for a changed model",
        )
    return None


def _parted(lines: Lines, name: str) -> Sign | None:
    """The score climbs while a judge that only watches falls from its best."""
    if len(lines) < 2 * WATCHED or not all(name in line for line in lines):
        return None
    upto = [lines[: i + 1] for i in range(WATCHED - 1, len(lines))]
    levels = [_level(part, name, WATCHED) or 0.0 for part in upto]
    scores = [_level(part, "score", WATCHED) or 0.0 for part in upto]
    best = max(range(len(levels)), key=levels.__getitem__)
    gained, lost = levels[best] - levels[0], levels[best] - levels[-1]
    # what is lost must be a good part of the range that was seen, and more than the noise of two such means
    chance = BEYOND_NOISE * _noise([line[name] for line in lines]) * math.sqrt(2 / WATCHED)
    if scores[-1] > scores[best] and lost > max(0.3 * gained, 0.05 * abs(levels[best]), 0.02, chance):
        return Sign(
            f"parted_{name}",
            f"the score still rises and {name} falls ({levels[best]:.2f} at its best, now {levels[-1]:.2f})",
            "The reward is being gamed",
            "Take an earlier checkpoint, raise kl.coef, or improve the reward model",
        )
    return None


CHECKS: tuple[Callable[[Lines], Sign | None], ...] = (
    _vanishing,
    _growing,
    _repeating,
    _runaway,
    _overspent,
    _clipping,
    _blind_critic,
    _entropy,
    _scale,
)
