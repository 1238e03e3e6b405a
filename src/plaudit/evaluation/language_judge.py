"""A language model in a person's place: it is asked which of two answers is better, in both orders.

A model likes what stands first, or last. A pair has a winner only where both orders name it, and is a tie otherwise.
Left out: models behind an address (see endpoint).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, islice
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from plaudit import device as devices
from plaudit.errors import DataError, ModelError
from plaudit.learner import Scorer
from plaudit.models.load import context_length, load_language_model
from plaudit.models.network import LanguageHead, Network, Outputs, at
from plaudit.models.stack import WholeStack
from plaudit.preferences.order import shown_order
from plaudit.runs import Run, read_jsonl
from plaudit.types import Comparison, Preference, Sequences, ranked

#: what a model on this machine is asked between two points at which it can be stopped
BATCH = 32

Letter = Literal["A", "B", ""]


@dataclass(frozen=True)
class Ask:
    """Which of two answers of a comparison is better? ``first`` is shown as A and ``second`` as B, in ``text``."""

    comparison: int
    first: int
    second: int
    text: str

    @property
    def key(self) -> tuple[int, int, int]:
        return self.comparison, self.first, self.second


@dataclass(frozen=True)
class Reply:
    """``letter`` is empty where no preference is to be read from ``said``; ``seconds`` is what it took."""

    letter: Letter
    said: str
    seconds: float


@dataclass(frozen=True)
class Refusal:
    """This question cannot be put to the judge, and others can: the comparison stays without its label."""

    reason: str


Said = list[tuple[Ask, Reply | Refusal]]


class Asker(Protocol):
    """Puts questions to a model."""

    def replies(self, asks: Iterable[Ask], stopped: Callable[[], bool]) -> Iterator[Said]:
        """What it says, as it comes, in any order. Once ``stopped`` is true it begins nothing new."""
        ...


def question(criterion: str, prompt: str, a: str, b: str) -> str:
    """The text that a judge reads. Texts that stand alone have no prompt."""
    asked = f"Prompt:\n{prompt}\n\n" if prompt else ""
    return f"{asked}Answer A:\n{a}\n\nAnswer B:\n{b}\n\n{criterion} Reply with one letter, A or B."


class Journal:
    """What the judge said to each question, in ``judgements.jsonl`` as it comes: a run that goes on asks none twice."""

    name = "judgements.jsonl"

    def __init__(self, run: Run):
        self._run = run
        self.replies: dict[tuple[int, int, int], Reply] = {}
        for row in read_jsonl(run.path(self.name)):
            key = row["comparison"], row["first"], row["second"]
            self.replies[key] = Reply(row["letter"], row["said"], row["seconds"])

    def add(self, said: Sequence[tuple[Ask, Reply]]) -> None:
        rows: list[dict[str, Any]] = []
        for ask, reply in said:
            self.replies[ask.key] = reply
            rows.append({"comparison": ask.comparison, "first": ask.first, "second": ask.second} | asdict(reply))
        if rows:
            self._run.jsonl.append(self.name, rows)


class LanguageJudge:
    """Ranks answers by what a model says of their pairs. Two answers cost two questions, k answers k (k − 1): all
    pairs, in both orders. Places follow from how many pairs each wins, a tie counting half for both."""

    def __init__(self, model: str, criterion: str, asker: Asker, journal: Journal):
        #: no person may be called so: their names have no colon
        self.name = f"judge:{model}"
        self.asker, self.journal, self._criterion = asker, journal, criterion
        #: comparison -> why it stays without a label
        self.left_out: dict[int, str] = {}

    def label(self, comparisons: Sequence[Comparison], stopped: Callable[[], bool]) -> Iterator[list[Preference]]:
        """See :class:`~plaudit.preferences.source.PreferenceSource`.

        Raises:
            DataError: not one of the comparisons could be put to the judge.
        """
        by_id = {c.id: c for c in comparisons}
        if known := [p for c in comparisons if (p := self._preference(c))]:
            yield known
        for said in self.asker.replies(self._missing(comparisons), stopped):
            self.journal.add([(ask, reply) for ask, reply in said if isinstance(reply, Reply)])
            for ask, reply in said:
                if isinstance(reply, Refusal):
                    self.left_out.setdefault(ask.comparison, reply.reason)
            heard = dict.fromkeys(ask.comparison for ask, _ in said)
            yield [p for i in heard if (p := self._preference(by_id[i]))]
        if self.left_out and not self.journal.replies:
            raise DataError(f"no comparison could be put to the judge; {next(iter(self.left_out.values()))}")

    def left(self, comparisons: Sequence[Comparison]) -> int:
        """How many questions about these are not answered yet."""
        replies = self.journal.replies
        return sum((c.id, *pair) not in replies for c in comparisons for pair in self.orders(c))

    def orders(self, comparison: Comparison) -> list[tuple[int, int]]:
        """The pairs as they are asked: in the order in which a person would see the answers, then turned round."""
        pairs = list(combinations(self.shown(comparison), 2))
        return pairs + [(second, first) for first, second in pairs]

    def shown(self, comparison: Comparison) -> tuple[int, ...]:
        return shown_order(str(comparison.id), range(len(comparison.answers)), self.name)

    def _missing(self, comparisons: Sequence[Comparison]) -> Iterator[Ask]:
        for c in comparisons:
            for first, second in self.orders(c):
                if (c.id, first, second) not in self.journal.replies and c.id not in self.left_out:
                    text = question(self._criterion, c.prompt, c.answers[first].text, c.answers[second].text)
                    yield Ask(c.id, first, second, text)

    def _preference(self, c: Comparison) -> Preference | None:
        """The label of a comparison, once every question about it has been answered."""
        asked = {(first, second): self.journal.replies.get((c.id, first, second)) for first, second in self.orders(c)}
        replies = {pair: reply for pair, reply in asked.items() if reply is not None}
        if len(replies) < len(asked):
            return None
        letters = {pair: reply.letter for pair, reply in replies.items()}
        seconds = sum(reply.seconds for reply in replies.values())
        return Preference(c, places(letters, len(c.answers)), self.name, self.shown(c), seconds)


def places(letters: dict[tuple[int, int], Letter], count: int) -> tuple[int, ...]:
    """The places of ``count`` answers, from the letter that was said to each pair (shown as A, shown as B)."""
    won = [0.0] * count
    for i, j in combinations(range(count), 2):
        said = letters[i, j], letters[j, i]
        points = 1.0 if said == ("A", "B") else 0.0 if said == ("B", "A") else 0.5
        won[i] += points
        won[j] += 1 - points
    return ranked([-points for points in won])


@dataclass(frozen=True)
class Ballots(Sequences):
    """Questions as token rows; ``letters`` i64 (B, 2): the token with which the reply would go on if it were A, B."""

    letters: Int[Tensor, "B 2"]


def margins(outputs: Outputs, rows: Sequences) -> Float[Tensor, " B"]:
    """log p(A) − log p(B) of each row's next token."""
    assert isinstance(rows, Ballots) and outputs.network.language is not None
    last = at(outputs.hidden, rows.lengths - 1)
    chosen = outputs.network.language(last).gather(1, rows.letters)
    return (chosen[:, 0] - chosen[:, 1]).float()


class LocalAsker:
    """Asks a model on this machine. Nothing is sampled: the letter is the one whose token is the likelier next."""

    def __init__(self, model: str, device: str, batch_tokens: int):
        place = devices.pick(device)
        loaded, self._tokenizer = load_language_model(model)
        self._model = model
        self._context = context_length(loaded)
        network = Network(WholeStack(loaded.base_model), LanguageHead(loaded)).to(place)
        self._scorer = Scorer(network, place, batch_tokens)

    def replies(self, asks: Iterable[Ask], stopped: Callable[[], bool]) -> Iterator[Said]:
        """
        Raises:
            ModelError: the model's output is no number.
        """
        waiting = iter(asks)
        while not stopped() and (part := list(islice(waiting, BATCH))):
            started = time.time()
            encoded = {ask: self._encode(ask.text) for ask in part}
            said: Said = []
            for ask, (ids, _) in encoded.items():
                if self._context and len(ids) > self._context:
                    said.append((ask, Refusal(f"comparison {ask.comparison}: {self._too_long(len(ids))}")))
            put = [ask for ask in part if ask not in dict(said)]
            found = self._ask([encoded[ask] for ask in put])
            seconds = (time.time() - started) / len(part)
            for ask, margin in zip(put, found, strict=True):
                letter: Letter = "A" if margin > 0 else "B" if margin < 0 else ""
                said.append((ask, Reply(letter, f"log p(A)/p(B) = {margin:.4f}", seconds)))
            yield said

    def _too_long(self, tokens: int) -> str:
        return (
            f"its question is {tokens} tokens long and the context of {self._model} {self._context}; "
            "name a model with a longer one"
        )

    def _ask(self, encoded: Sequence[tuple[list[int], tuple[int, int]]]) -> list[float]:
        if not encoded:
            return []
        letters = torch.tensor([pair for _, pair in encoded], dtype=torch.long)
        rows = Ballots.pack([ids for ids, _ in encoded], [[False] * len(ids) for ids, _ in encoded], letters=letters)
        found = self._scorer.evaluate(rows, margins)
        if not torch.isfinite(found).all():
            raise ModelError(f"{self._model}: what it makes of a question is no number; its weights are damaged")
        return found.tolist()

    def _encode(self, text: str) -> tuple[list[int], tuple[int, int]]:
        """A question's tokens, and the first in which the replies A and B differ. What both share (a space that is a
        token of its own) is part of the question."""
        a, b = (self._with(text, letter) for letter in "AB")
        shared = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        return a[:shared], (a[shared], b[shared])

    def _with(self, text: str, letter: str) -> list[int]:
        inner = self._tokenizer.inner
        if not inner.chat_template:
            return self._tokenizer.text_ids(f"{text}\nAnswer: {letter}")
        # cut where the letter begins, so that both are tokenised together
        before = self._tokenizer.chat_prompt([{"role": "user", "content": text}]).text
        ids: list[int] = inner(before + letter, add_special_tokens=False, verbose=False)["input_ids"]
        return ids
