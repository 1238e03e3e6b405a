"""The desk at which people label: which question lies before whom, what they say of it, and taking it back.

Everything is a transaction of the store, so that people at several tabs, servers and times do not collide: a label
counts once however often it is sent, and is on disk when it is acknowledged. Left out: pages (see web).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    bindparam,
    delete,
    func,
    insert,
    select,
    update,
)

from plaudit.errors import PlauditError
from plaudit.preferences.order import disagreement, priority, shown_order
from plaudit.preferences.store import (
    COUNTED,
    PreferenceStore,
    chunks,
    count,
    decided,
    indices,
    label_row,
    now,
    order_shown,
    put,
    standing,
)
from plaudit.preferences.tables import claims, comparisons, preferences, questions
from plaudit.preferences.tables import secrets as secrets_table
from plaudit.types import Answer, ranked

Mode = Literal["compare", "best", "rank", "rate"]
#: seconds for which a question that lies before somebody counts as theirs
LEASE = 1800.0
#: a repeat comes after at least this many other labels
GAP = 10
#: seconds for which the number of all questions is taken as it was
FRESH = 10.0
LONGEST_REASON = 2000
BEST_RATING = 7


class Refused(PlauditError):
    """Something a person sent cannot be recorded; ``reason`` is the phrase that says why, nothing was written."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True)
class Asking:
    """How questions are put. ``mode``: two answers, the best of all, a ranking or ratings of all. ``overlap``: how many
    people answer each question. ``check_every`` and ``repeat_every``: one attention check, one repeat every so many
    labels of a person, 0 for none."""

    mode: Mode = "compare"
    overlap: int = 1
    check_every: int = 0
    repeat_every: int = 20


@dataclass(frozen=True)
class Question:
    """What lies before a person. ``answers`` are in the order shown."""

    key: str
    prompt: str
    answers: tuple[Answer, ...]
    #: what was said of it before, where a label is being revised
    before: Said | None = None


@dataclass(frozen=True)
class Said:
    """What a person says, by the places of the answers as shown.

    ``places``: 0 the best, equal places a tie; empty where ``verdict`` is "skip". ``ratings``: 1 to 7, where rated.
    """

    verdict: Literal["ranked", "both_bad", "skip"]
    places: tuple[int, ...] = ()
    ratings: tuple[int, ...] = ()
    reason: str = ""
    seconds: float = 0.0

    @classmethod
    def rated(cls, ratings: Sequence[int], **more: Any) -> Said:
        """Places by ratings: as many answers are before one as are rated higher."""
        return cls("ranked", ranked([-rating for rating in ratings]), tuple(ratings), **more)


@dataclass(frozen=True)
class Progress:
    """``mine``: labels of this person that count; ``open``: questions that wait for this or another person."""

    mine: int
    answered: int
    open: int
    seconds: float


class Desk:
    """Where people label a store."""

    def __init__(self, store: PreferenceStore, asking: Asking, clock: Callable[[], float] = time.time):
        self.store, self.asking, self._clock = store, asking, clock
        self._db = store.database
        # made once: to put these together takes longer than to run them. Those that somebody has begun come first, so
        # that people's agreement shows early.
        self._waiting = [self._to_label(labels) for labels in range(asking.overlap - 1, -1, -1)]
        self._counting = self._counts()
        self._total, self._count_again = 0, 0.0
        if asking.mode == "compare":
            self._make_pairs()

    # --- asking ---

    def next(self, annotator: str) -> Question | None:
        """The question that lies before a person, or a new one; None where nothing is left for them."""
        with self._db.write() as db:
            claim = db.execute(select(claims).where(claims.c.annotator == annotator)).first()
            if claim is None:
                chosen = self._choose(db, annotator)
                if chosen is None:
                    return None
                question, kind, turn = chosen
                asked = _asked(db, question)
                shown = shown_order(asked.fingerprint, indices(asked.asked), annotator, turn)
                claim = self._lay(db, annotator, question, kind, shown)
            else:
                asked = _asked(db, claim.question_id)
            answers = tuple(Answer(asked.answers[i]["text"], asked.answers[i]["ended"]) for i in claim.shown)
            return Question(claim.key, asked.prompt, answers, self._before(db, claim.replaces))

    def _choose(self, db: Connection, annotator: str) -> tuple[int, str, int] | None:
        """(question, kind, how often this person has seen it)."""
        mine = _mine(annotator)
        said = db.execute(select(func.count()).where(mine, preferences.c.said != "skip")).scalar_one()
        turn = said + 1
        if self.asking.check_every and turn % self.asking.check_every == 0:
            found = db.execute(self._open(annotator, questions.c.known.is_not(None)).limit(1)).scalar()
            if found is not None:
                return found, "check", 0
        if self.asking.repeat_every and turn % self.asking.repeat_every == 0:
            found = self._to_repeat(db, annotator)
            if found is not None:
                return found, "repeat", 1
        for waiting in self._waiting:
            found = db.execute(waiting, {"annotator": annotator, "since": self._clock() - LEASE}).scalar()
            if found is not None:
                return found, "label", 0
        return None

    def _to_label(self, labels: int) -> Select[Any]:
        """The first question with so many labels that is free: fewer than ``overlap`` people have answered it or have
        it before them."""
        held = and_(
            claims.c.question_id == questions.c.id,
            claims.c.kind == "label",
            claims.c.annotator != _WHO,
            claims.c.served > bindparam("since"),
        )
        if labels == self.asking.overlap - 1:
            free = ~select(claims.c.annotator).where(held).exists()
        else:
            free = select(func.count(claims.c.annotator)).where(held).scalar_subquery() < self.asking.overlap - labels
        query = self._open(_WHO, questions.c.known.is_(None), questions.c.labels == labels, free)
        return query.order_by(questions.c.priority).limit(1)

    def _open(self, annotator: str | BindParameter[str], *conditions: ColumnElement[bool]) -> Select[Any]:
        """Questions of this mode that this person has not been asked."""
        asked = select(preferences.c.id).where(_mine(annotator), preferences.c.question_id == questions.c.id)
        return select(questions.c.id).where(self._of_mode(), *conditions, ~asked.exists())

    def _of_mode(self) -> ColumnElement[bool]:
        return questions.c.pair if self.asking.mode == "compare" else questions.c.whole

    def _to_repeat(self, db: Connection, annotator: str) -> int | None:
        """A label of this person, some time ago, that was not repeated yet."""
        again = select(preferences.c.question_id).where(_mine(annotator), preferences.c.kind == "repeat")
        query = (
            select(preferences.c.question_id)
            .join(questions)
            .where(
                _mine(annotator),
                self._of_mode(),
                preferences.c.kind == "label",
                preferences.c.said == "ranked",
                preferences.c.question_id.not_in(again),
            )
            .order_by(preferences.c.id.desc())
            .offset(GAP - 1)
            .limit(1)
        )
        return db.execute(query).scalar()

    def _lay(
        self,
        db: Connection,
        annotator: str,
        question: int,
        kind: str,
        shown: Sequence[int],
        *,
        replaces: int | None = None,
    ) -> Row[Any]:
        """Lays a question before a person, before whom none lies."""
        made = insert(claims).values(
            annotator=annotator,
            key=secrets.token_hex(16),
            question_id=question,
            kind=kind,
            shown=list(shown),
            served=self._clock(),
            replaces=replaces,
        )
        return db.execute(made.returning(claims)).one()

    def _before(self, db: Connection, label: int | None) -> Said | None:
        """What was said by a label that is to be replaced."""
        if label is None:
            return None
        query = select(preferences, questions.c.answers.label("asked")).join(questions)
        said = db.execute(query.where(preferences.c.id == label)).first()
        return _said(said) if said is not None else None

    # --- answering ---

    def answer(self, annotator: str, key: str, saying: Callable[[int], Said]) -> bool:
        """Records what a person says of the question that lies before them; true when it is on disk. ``saying`` is
        given the number of its answers.

        False: this answer was recorded before (a double click, a request sent again); it counts once.

        Raises:
            Refused: no such question lies there, or what is said does not fit it.
        """
        with self._db.write() as db:
            # where the answer is refused, the question lies there again
            taken = delete(claims).where(claims.c.annotator == annotator, claims.c.key == key)
            claim = db.execute(taken.returning(claims)).first()
            if claim is None:
                known = select(preferences.c.id).where(preferences.c.key == key, preferences.c.annotator == annotator)
                if db.execute(known).first() is None:
                    raise Refused("gone")
                return False
            said = saying(len(claim.shown))
            _check(said, len(claim.shown))
            # as a question names them
            order = sorted(claim.shown)
            elapsed = max(0.0, self._clock() - claim.served)
            place = dict(zip(claim.shown, said.places, strict=False))
            rating = dict(zip(claim.shown, said.ratings, strict=False))
            row = label_row(
                claim.question_id,
                annotator,
                [place[i] for i in order] if said.places else (),
                claim.shown,
                kind=claim.kind,
                said=said.verdict,
                ratings=[rating[i] for i in order] if said.ratings else (),
                reason=said.reason.strip(),
                # what the page measured leaves out the time it was not looked at, but cannot exceed the clock's
                seconds=round(min(said.seconds, elapsed) if said.seconds > 0 else elapsed, 2),
                key=key,
            )
            put(db, [row])
            if claim.replaces is not None:
                self._withdraw(db, annotator, claim.replaces)
            return True

    def undo(self, annotator: str) -> bool:
        """Takes back a person's latest label and lays its question before them again; false where there is none."""
        with self._db.write() as db:
            latest = (
                select(preferences.c.id)
                .where(_mine(annotator), preferences.c.kind != "verdict", preferences.c.key.is_not(None))
                .order_by(preferences.c.id.desc())
                .limit(1)
            )
            found = db.execute(latest).scalar()
            if found is None:
                return False
            row = self._withdraw(db, annotator, found)
            _clear(db, annotator)
            self._lay(db, annotator, row.question_id, row.kind, row.shown)
            return True

    def revise(self, annotator: str, label: int) -> None:
        """Lays the question of a label before its author again; the label stands until the new one is given.

        Raises:
            Refused: this person has no such label.
        """
        with self._db.write() as db:
            row = db.execute(
                select(preferences).where(_mine(annotator), preferences.c.id == label, preferences.c.kind != "verdict")
            ).first()
            if row is None:
                raise Refused("no_label")
            _clear(db, annotator)
            self._lay(db, annotator, row.question_id, row.kind, row.shown, replaces=label)

    def decide(self, adjudicator: str, question: int, ranks: Sequence[int]) -> None:
        """A verdict over a question that people disagree on, by the answers' order in the store.

        Raises:
            Refused: there is no such question, or the ranks do not fit it.
        """
        with self._db.write() as db:
            asked = db.execute(select(questions.c.answers).where(questions.c.id == question)).scalar()
            if asked is None or len(indices(asked)) != len(ranks) or tuple(ranks) != ranked(ranks):
                raise Refused("no_question")
            earlier = and_(preferences.c.question_id == question, preferences.c.kind == "verdict")
            db.execute(update(preferences).where(earlier).values(withdrawn=now()))
            key = secrets.token_hex(16)
            put(db, [label_row(question, adjudicator, ranks, indices(asked), kind="verdict", key=key)])

    def _withdraw(self, db: Connection, annotator: str, label: int) -> Row[Any]:
        row = db.execute(select(preferences).where(_mine(annotator), preferences.c.id == label)).first()
        if row is None:
            raise Refused("no_label")
        db.execute(update(preferences).where(preferences.c.id == label).values(withdrawn=now()))
        if row.kind == "label" and row.said != "skip":
            count(db, row.question_id, -1)
        return row

    # --- looking ---

    def progress(self, annotator: str) -> Progress:
        with self._db.read() as db:
            mine, seconds, answered = db.execute(self._counting, {"annotator": annotator}).one()
            # to count all takes as long as a page does, and they become more by an import alone
            if time.monotonic() > self._count_again:
                self._count_again = time.monotonic() + FRESH
                self._total = db.execute(self._questions()).scalar_one()
        return Progress(mine, answered, max(0, self._total - answered), seconds)

    def _counts(self) -> Select[Any]:
        """A person's labels, their mean seconds, and how many questions are answered."""
        answered = self._questions().where(questions.c.labels >= self.asking.overlap).scalar_subquery()
        seconds = func.coalesce(func.avg(preferences.c.seconds), 0.0)
        return select(func.count(), seconds, answered).where(_mine(_WHO), COUNTED)

    def _questions(self) -> Select[Any]:
        """The number of all questions that are there to be labelled."""
        return select(func.count()).select_from(questions).where(self._of_mode(), questions.c.known.is_(None))

    def said_by(self, annotator: str, most: int = 200) -> list[dict[str, Any]]:
        """A person's own labels that stand, newest first."""
        query = standing().where(preferences.c.annotator == annotator, preferences.c.kind != "verdict")
        with self._db.read() as db:
            rows = db.execute(query.order_by(None).order_by(preferences.c.id.desc()).limit(most)).all()
        return [_shown(row) for row in rows]

    def disagreements(self, most: int = 100) -> list[list[dict[str, Any]]]:
        """Questions whose labels differ and that nobody has decided, newest first: each a list of its labels."""
        several = select(questions.c.id).where(questions.c.labels > 1, questions.c.known.is_(None))
        query = standing().where(
            COUNTED,
            preferences.c.question_id.in_(several),
            preferences.c.question_id.not_in(decided()),
        )
        said: dict[int, list[Row[Any]]] = {}
        with self._db.read() as db:
            for row in db.execute(query):
                said.setdefault(row.question_id, []).append(row)
        differing = [rows for rows in said.values() if len({tuple(row.ranks) for row in rows}) > 1]
        return [[_shown(row) for row in rows] for rows in reversed(differing[-most:])]

    def secret(self) -> str:
        """The key that signs people's links; made once and kept in the store, so that links outlive a restart."""
        with self._db.write() as db:
            kept = db.execute(select(secrets_table.c.value).where(secrets_table.c.name == "links")).scalar()
            if kept is None:
                kept = secrets.token_urlsafe(32)
                db.execute(insert(secrets_table).values(name="links", value=kept))
            return kept

    def size(self, question: int) -> int:
        """How many answers a question has.

        Raises:
            Refused: there is no such question.
        """
        with self._db.read() as db:
            asked = db.execute(select(questions.c.answers).where(questions.c.id == question)).scalar()
        if asked is None:
            raise Refused("no_question")
        return len(indices(asked))

    # --- what is asked ---

    def _make_pairs(self) -> None:
        """Every two different answers of a longer comparison as a question of its own, once."""
        whole = questions.alias()
        with self._db.write() as db:
            begun = select(questions.c.comparison_id).where(questions.c.pair)
            query = (
                select(comparisons.c.id, comparisons.c.fingerprint, comparisons.c.answers)
                .join(whole, whole.c.comparison_id == comparisons.c.id)
                .where(whole.c.whole, whole.c.known.is_(None), comparisons.c.id.not_in(begun))
            )
            rows = [made for c in db.execute(query) for made in _pairs(c.id, c.fingerprint, c.answers)]
            for part in chunks(rows):
                db.execute(insert(questions), part)

    def open_questions(self) -> Iterator[tuple[int, str, tuple[str, ...]]]:
        """(question, prompt, texts) of all that wait for labels, for who wants to say what should be asked first."""
        query = (
            select(questions.c.id, questions.c.answers.label("asked"), comparisons.c.prompt, comparisons.c.answers)
            .join(comparisons)
            .where(self._of_mode(), questions.c.known.is_(None), questions.c.labels < self.asking.overlap)
        )
        with self._db.read() as db:
            for row in db.execute(query):
                yield row.id, row.prompt, tuple(row.answers[i]["text"] for i in indices(row.asked))

    def ask_first(self, scores: Mapping[int, Sequence[Sequence[float]]]) -> None:
        """Orders questions by what an ensemble of reward models would learn from each: ``scores[question][member]`` are
        the member's scores of its answers."""
        with self._db.write() as db:
            _prioritise(db, ((question, -disagreement(said)) for question, said in scores.items()))

    def ask_at_random(self) -> None:
        """Takes such an order back."""
        query = select(questions.c.id, questions.c.answers, questions.c.whole, comparisons.c.fingerprint)
        with self._db.write() as db:
            ordered = db.execute(query.join(comparisons).where(questions.c.priority <= 0)).all()
            _prioritise(db, ((r.id, priority(r.fingerprint, "" if r.whole else r.answers)) for r in ordered))


def _prioritise(db: Connection, of: Iterable[tuple[int, float]]) -> None:
    """Gives questions their priorities."""
    change = update(questions).where(questions.c.id == bindparam("question")).values(priority=bindparam("given"))
    for part in chunks(of):
        db.execute(change, [{"question": question, "given": given} for question, given in part])


def _asked(db: Connection, question: int) -> Any:
    """A question's comparison, and which of its answers it is about."""
    query = select(
        comparisons.c.fingerprint, comparisons.c.prompt, comparisons.c.answers, questions.c.answers.label("asked")
    ).join(questions)
    return db.execute(query.where(questions.c.id == question)).one()


def _clear(db: Connection, annotator: str) -> None:
    """Takes away what lies before a person."""
    db.execute(delete(claims).where(claims.c.annotator == annotator))


#: the person, where a statement is made before it is known who asks
_WHO: BindParameter[str] = bindparam("annotator")


def _mine(annotator: str | BindParameter[str]) -> ColumnElement[bool]:
    return and_(preferences.c.annotator == annotator, preferences.c.withdrawn.is_(None))


def _check(said: Said, count: int) -> None:
    if len(said.reason) > LONGEST_REASON:
        raise Refused("long_reason")
    if said.verdict != "skip" and (len(said.places) != count or said.places != ranked(said.places)):
        raise Refused("not_answered")
    if said.ratings and (len(said.ratings) != count or not all(1 <= r <= BEST_RATING for r in said.ratings)):
        raise Refused("not_answered")


def _pairs(comparison: int, fingerprint: str, answers: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for i, j in combinations(range(len(answers)), 2):
        if answers[i]["text"] != answers[j]["text"]:
            yield {
                "comparison_id": comparison,
                "answers": f"{i},{j}",
                "whole": False,
                "pair": True,
                "priority": priority(fingerprint, f"{i},{j}"),
                "labels": 0,
                "known": None,
            }


def _said(row: Row[Any]) -> Said:
    """What was said, by the order shown."""
    order = order_shown(row)
    return Said(
        row.said,
        tuple(row.ranks[i] for i in order) if row.ranks else (),
        tuple(row.ratings[i] for i in order) if row.ratings else (),
        row.reason,
        row.seconds,
    )


def _shown(row: Row[Any]) -> dict[str, Any]:
    """A label for a list on a page."""
    return {
        "id": row.id,
        "question": row.question_id,
        "annotator": row.annotator,
        "kind": row.kind,
        "prompt": row.prompt,
        "said": _said(row),
        "answers": [row.answers[i]["text"] for i in row.shown],
        "stored_order": [row.answers[i]["text"] for i in indices(row.asked)],
        "created": row.created,
    }
