"""The page that shows one answer of a PPO run token by token, each shaded by a number, with the sum behind each number.

One file that needs nothing else, or a part of a served page. Left out: where the numbers come from (see
inspection.trace).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from plaudit.inspection.trace import Found, Step, Token, columns, last_step, number, numbers, sums, term
from plaudit.web.words import phrases, sum_words, templates, visible

STATIC = Path(__file__).with_name("static")


@dataclass(frozen=True)
class Likely:
    """A token that might have stood here: its text, and its probability for actor and reference (None: not among the
    likeliest)."""

    text: str
    actor: str
    reference: str
    #: whole percents, for a bar
    share: int
    taken: bool


@dataclass(frozen=True)
class Place:
    """A token as the page shows it: its numbers by name as text, those to shade by, and the sums."""

    text: str
    chosen: bool
    shown: dict[str, str]
    shades: dict[str, float]
    sums: dict[str, str]
    clipped: bool
    alternatives: tuple[Likely, ...]
    steps: tuple[Step, ...]


def shown_text(text: str) -> str:
    """A token's text with what cannot be seen made visible."""
    return visible(text).replace("\n", "⏎\n") or "∅"


def trace_page(found: Found, language: str = "en", *, title: str = "", inline: bool = True) -> str:
    """The page, as HTML: whole in itself, or ``inline=False`` with its style and script beside it."""
    words = phrases(language)
    said, names = sum_words(language), columns(found)
    return (
        templates()
        .get_template("trace.html")
        .render(
            t=words,
            heading=words["trace_title"],
            title=title,
            found=found,
            trace=found.trace,
            rules=found.rules,
            number=number,
            term=term,
            shown_text=shown_text,
            names=names,
            places=[_place(found, i, names, said) for i in range(len(found.trace.tokens))],
            style=_static("style.css", "trace.css") if inline else "",
            code=_static("trace.js") if inline else "",
            inline=inline,
        )
    )


def _static(*names: str) -> Markup:
    return Markup("\n".join((STATIC / name).read_text(encoding="utf-8") for name in names))


def _place(found: Found, at: int, names: Sequence[str], words: dict[str, str]) -> Place:
    token = found.trace.tokens[at]
    values = numbers(token)
    step = last_step(token)
    return Place(
        text=token.text,
        chosen=token.chosen,
        shown={name: number(values[name]) for name in names},
        shades={name: value for name in names if (value := values[name]) is not None},
        sums=sums(found, at, words),
        clipped=bool(step and step.clipped),
        alternatives=_likely(token),
        steps=token.steps,
    )


def _likely(token: Token) -> tuple[Likely, ...]:
    """The actor's likeliest tokens with what the reference gave them; the token itself too, where it is not among
    them."""
    if not token.alternatives:
        return ()
    assert token.id is not None and token.logprob is not None
    theirs: dict[int, float | None] = {a.id: a.logprob for a in token.ref_alternatives}
    theirs |= {token.id: token.ref_logprob}
    mine = {a.id: (a.text, a.logprob) for a in token.alternatives}
    mine.setdefault(token.id, (token.text, token.logprob))

    def share(logprob: float | None) -> str:
        return "–" if logprob is None else f"{math.exp(min(0.0, logprob)):.1%}"

    return tuple(
        Likely(text, share(p), share(theirs.get(id)), round(100 * math.exp(min(0.0, p))), id == token.id)
        for id, (text, p) in mine.items()
    )
