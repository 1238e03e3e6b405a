"""The preference store: comparisons and what was said of them, in one SQLite file or a PostgreSQL database.

What a method has acknowledged is on disk (write-ahead log, synchronous=FULL). Left out: asking people one question
after another (see desk), and how the database is laid out and opened (see tables).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Row, Select, delete, func, insert, select, update

from plaudit.errors import DataError
from plaudit.preferences.agreement import Label
from plaudit.preferences.order import priority
from plaudit.preferences.tables import Database, claims, comparisons, is_url, preferences, questions
from plaudit.types import Answer, Comparison, Preference

T = TypeVar("T")
#: rows a statement
CHUNK = 500


class PreferenceStore:
    """Comparisons and preferences; who fills it (people, judges, programmes) is all the same to it."""

    def __init__(self, path: str | Path, *, create: bool = False):
        """Opens a store: a file, or ``postgresql://user@host/database``.

        Raises:
            ConfigError: no readable address, or its driver is not installed.
            DataError: there is none and ``create`` is false, it is no store, of another schema, or cannot be written.
        """
        self.path = path
        self.database = Database(path, create=create)

    def add(self, asked: Sequence[Comparison]) -> list[Comparison]:
        """Stores comparisons; they come back with their ids. One that is there already is not stored again, so that an
        interrupted collection can simply be repeated."""
        stored = []
        with self.database.write() as db:
            for part in chunks(asked):
                prints = [_fingerprint(c) for c in part]
                known = _ids(db, prints)
                # the same comparison may stand in the list twice
                new = {f: c for f, c in zip(prints, part, strict=True) if f not in known}
                if new:
                    db.execute(insert(comparisons), [_row(f, c) for f, c in new.items()])
                    known |= _ids(db, list(new))
                    db.execute(insert(questions), [_whole(known[f], f, len(c.answers)) for f, c in new.items()])
                stored += [
                    Comparison(known[f], c.prompt, c.answers, c.provenance) for f, c in zip(prints, part, strict=True)
                ]
        return stored

    def record(self, said: Sequence[Preference]) -> None:
        """Stores what was said of stored comparisons, each as a whole.

        Raises:
            DataError: a preference does not rank exactly the answers of its comparison, or that is not in the store.
        """
        for p in said:
            if len(p.ranks) != len(p.comparison.answers):
                raise DataError(
                    f"comparison {p.comparison.id}: {len(p.comparison.answers)} answers but {len(p.ranks)} ranks"
                )
        with self.database.write() as db:
            for part in chunks(said):
                asked = {p.comparison.id for p in part}
                question = whole_questions(db, asked)
                if absent := asked - question.keys():
                    raise DataError(f"{self.database.shown}: holds no comparison {min(absent)}; add it first")
                put(
                    db,
                    [
                        label_row(
                            question[p.comparison.id],
                            p.annotator,
                            p.ranks,
                            p.order,
                            seconds=p.seconds,
                            created=p.created,
                        )
                        for p in part
                    ],
                )

    def preferences(self) -> list[Preference]:
        """What was said and stands, oldest first, to train from: each with the answers that were asked about.

        Left out are skipped questions, repeats and attention checks. Where a disagreement was decided, the verdict
        stands for all.
        """
        query = standing().where(
            preferences.c.said != "skip",
            (preferences.c.kind == "verdict") | (COUNTED & preferences.c.question_id.not_in(decided())),
        )
        with self.database.read() as db:
            return [preference(row) for row in db.execute(query)]

    def unlabelled(self, annotator: str | None = None) -> list[Comparison]:
        """Comparisons of which nobody (or not this annotator) has said anything, oldest first."""
        said = select(questions.c.comparison_id).join(preferences).where(preferences.c.withdrawn.is_(None))
        if annotator is not None:
            said = said.where(preferences.c.annotator == annotator)
        query = select(comparisons).where(comparisons.c.id.not_in(said)).order_by(comparisons.c.id)
        with self.database.read() as db:
            return [Comparison(r.id, r.prompt, _answers(r.answers), r.provenance) for r in db.execute(query)]

    def counts(self) -> dict[str, int]:
        """Number of comparisons, and of preferences that stand by annotator."""
        standing = preferences.c.withdrawn.is_(None)
        each = select(preferences.c.annotator, func.count()).where(standing).group_by(preferences.c.annotator)
        with self.database.read() as db:
            said = {f"by {name}": n for name, n in db.execute(each.order_by(preferences.c.annotator))}
            return {"comparisons": db.execute(select(func.count()).select_from(comparisons)).scalar_one()} | said

    def labels(self, *, several: bool = False) -> list[Label]:
        """Everything that stands, for figures of agreement; ``ranks`` is empty where a question was skipped.

        ``several``: just what was said of questions that have more labels than one.
        """
        query = (
            select(preferences, questions.c.answers.label("asked"), questions.c.known)
            .join(questions)
            .where(preferences.c.withdrawn.is_(None))
            .order_by(preferences.c.id)
        )
        if several:
            query = query.where(questions.c.labels > 1)
        with self.database.read() as db:
            return [
                Label(
                    row.question_id,
                    row.annotator,
                    tuple(row.ranks or ()),
                    order_shown(row),
                    row.kind,
                    tuple(row.known) if row.known else None,
                    row.seconds,
                    row.created,
                )
                for row in db.execute(query)
            ]

    def forget(self, annotator: str) -> int:
        """Deletes everything that a person said, what was taken back included, and returns how much that was."""
        with self.database.write() as db:
            mine = preferences.c.annotator == annotator
            for question, n in db.execute(
                select(preferences.c.question_id, func.count())
                .where(mine, COUNTED, preferences.c.withdrawn.is_(None))
                .group_by(preferences.c.question_id)
            ).all():
                count(db, question, -n)
            gone = db.execute(delete(preferences).where(mine)).rowcount
            db.execute(delete(claims).where(claims.c.annotator == annotator))
        if not is_url(str(self.path)):
            # a deleted text stays in the file's free pages until they are written again
            with self.database.named(), self.database.engine.connect() as connection:
                raw = connection.connection.driver_connection
                assert raw is not None
                raw.execute("VACUUM")
                raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return gone

    def backup(self, target: str | Path) -> None:
        """A whole copy while others go on writing.

        Raises:
            DataError: the target is there already or cannot be written, or the store is no file.
        """
        if is_url(str(self.path)):
            raise DataError(f"{self.database.shown}: is backed up by PostgreSQL's own pg_dump")
        if Path(target).exists():
            raise DataError(f"{target}: is there already, and is left as it is; name another file")
        try:
            with closing(sqlite3.connect(self.path)) as source, closing(sqlite3.connect(target)) as copy:
                source.backup(copy)
        except sqlite3.Error as error:
            raise DataError(f"{target}: the backup could not be written: {error}") from None

    def close(self) -> None:
        self.database.close()


def standing() -> Select[Any]:
    """Preferences that are not taken back, with their questions and comparisons, oldest first."""
    return (
        select(
            preferences,
            questions.c.comparison_id,
            questions.c.answers.label("asked"),
            comparisons.c.prompt,
            comparisons.c.answers,
            comparisons.c.provenance,
        )
        .join(questions, preferences.c.question_id == questions.c.id)
        .join(comparisons)
        .where(preferences.c.withdrawn.is_(None))
        .order_by(preferences.c.id)
    )


def preference(row: Row[Any]) -> Preference:
    """A row of :func:`standing` that has ranks."""
    asked = indices(row.asked)
    answers = _answers(row.answers)
    return Preference(
        Comparison(row.comparison_id, row.prompt, tuple(answers[i] for i in asked), row.provenance),
        tuple(row.ranks),
        row.annotator,
        order_shown(row),
        row.seconds,
        row.created,
    )


def order_shown(row: Row[Any]) -> tuple[int, ...]:
    """The order in which a question's answers were shown, by their places among those that were asked about."""
    asked = indices(row.asked)
    return tuple(asked.index(i) for i in row.shown)


def decided() -> Select[Any]:
    """Questions over which a verdict stands."""
    return select(preferences.c.question_id).where(preferences.c.kind == "verdict", preferences.c.withdrawn.is_(None))


def indices(asked: str) -> tuple[int, ...]:
    """Which answers of its comparison a question is about."""
    return tuple(map(int, asked.split(",")))


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


#: labels that say something and are neither asked again nor there to check attention
COUNTED = (preferences.c.kind == "label") & (preferences.c.said != "skip")


def label_row(
    question: int,
    annotator: str,
    ranks: Sequence[int],
    shown: Sequence[int] = (),
    *,
    kind: str = "label",
    said: str = "ranked",
    ratings: Sequence[int] = (),
    reason: str = "",
    seconds: float = 0.0,
    created: str = "",
    key: str | None = None,
) -> dict[str, Any]:
    """A row of the table: ``ranks`` empty for a skipped question, ``shown`` empty for the order of the ranks."""
    return {
        "question_id": question,
        "annotator": annotator,
        "kind": kind,
        "said": said,
        "ranks": list(ranks) or None,
        "ratings": list(ratings) or None,
        "reason": reason,
        "shown": list(shown or range(len(ranks))),
        "seconds": seconds,
        "created": created or now(),
        "key": key,
    }


def put(db: Connection, rows: Sequence[dict[str, Any]]) -> None:
    """Stores labels, and counts them with their questions."""
    if rows:
        db.execute(insert(preferences), list(rows))
    for row in rows:
        if row["kind"] == "label" and row["said"] != "skip":
            count(db, row["question_id"], 1)


def count(db: Connection, question: int, by: int) -> None:
    """A question has ``by`` more labels that stand and say something."""
    db.execute(update(questions).where(questions.c.id == question).values(labels=questions.c.labels + by))


def whole_questions(db: Connection, asked: Iterable[int]) -> dict[int, int]:
    """Comparison -> the question about all of its answers, for those that are in the store."""
    query = select(questions.c.comparison_id, questions.c.id).where(
        questions.c.whole, questions.c.comparison_id.in_(asked)
    )
    return {row.comparison_id: row.id for row in db.execute(query)}


def _row(fingerprint: str, c: Comparison) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint,
        "prompt": c.prompt,
        "answers": [{"text": a.text, "ended": a.ended} for a in c.answers],
        "provenance": c.provenance,
    }


def _whole(comparison: int, fingerprint: str, count: int) -> dict[str, Any]:
    return {
        "comparison_id": comparison,
        "answers": ",".join(map(str, range(count))),
        "whole": True,
        "pair": count == 2,
        "priority": priority(fingerprint),
        "labels": 0,
    }


def _ids(db: Connection, fingerprints: Sequence[str]) -> dict[str, int]:
    query = select(comparisons.c.fingerprint, comparisons.c.id).where(comparisons.c.fingerprint.in_(fingerprints))
    return {row.fingerprint: row.id for row in db.execute(query)}


def _answers(stored: list[dict[str, Any]]) -> tuple[Answer, ...]:
    return tuple(Answer(a["text"], a["ended"]) for a in stored)


def chunks(things: Iterable[T]) -> Iterator[list[T]]:
    rest = iter(things)
    while part := list(islice(rest, CHUNK)):
        yield part


def _fingerprint(comparison: Comparison) -> str:
    """Equal for comparisons with the same prompt and answers."""
    asked = json.dumps([comparison.prompt, [a.text for a in comparison.answers]], ensure_ascii=False)
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()
