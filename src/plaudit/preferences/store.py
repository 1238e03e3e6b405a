"""The preference store: comparisons and what was said of them, in one SQLite file. The only user of SQLAlchemy."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import (
    JSON,
    URL,
    Column,
    Float,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
    func,
    insert,
    select,
)
from sqlalchemy.exc import DatabaseError, SQLAlchemyError

from plaudit.errors import DataError
from plaudit.types import Answer, Comparison, Preference

_metadata = MetaData()
_comparisons = Table(
    "comparisons",
    _metadata,
    Column("id", Integer, primary_key=True),
    Column("fingerprint", String(64), nullable=False, unique=True),
    Column("prompt", Text, nullable=False),
    Column("answers", JSON, nullable=False),
    Column("provenance", JSON, nullable=False),
)
_preferences = Table(
    "preferences",
    _metadata,
    Column("id", Integer, primary_key=True),
    Column("comparison_id", ForeignKey("comparisons.id"), nullable=False, index=True),
    Column("annotator", String(200), nullable=False, index=True),
    Column("ranks", JSON, nullable=False),
    Column("shown", JSON, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("created", String(40), nullable=False),
)


class PreferenceStore:
    """Comparisons and preferences. What a method has acknowledged is on disk: write-ahead log, synchronous=FULL."""

    def __init__(self, path: str | Path, *, create: bool = False):
        """Opens a store.

        Raises:
            DataError: there is none and ``create`` is false, or the file is no store or cannot be written.
        """
        self.path = Path(path)
        if not create and not self.path.exists():
            raise DataError(f"{path}: no such preference store; `plaudit collect` makes one")
        if not create and self.path.is_file() and not self.path.stat().st_size:
            raise DataError(f"{path}: an empty file and no preference store; `plaudit collect` makes one")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{path}: cannot be made: {error}") from None
        self._engine = create_engine(URL.create("sqlite", database=str(self.path)))
        event.listen(self._engine, "connect", _durable)
        with self._named():
            _metadata.create_all(self._engine)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except DatabaseError as error:
            raise DataError(f"{self.path}: cannot be used as a preference store: {error.orig}") from None
        except SQLAlchemyError as error:
            raise DataError(f"{self.path}: cannot be used as a preference store: {error}") from None

    def add(self, comparisons: Sequence[Comparison]) -> list[Comparison]:
        """Stores comparisons; they come back with their ids. One that is there already is not stored again, so that an
        interrupted collection can simply be repeated."""
        stored = []
        with self._named(), self._engine.begin() as db:
            for c in comparisons:
                fingerprint = _fingerprint(c)
                known = select(_comparisons.c.id).where(_comparisons.c.fingerprint == fingerprint)
                if (found := db.execute(known).scalar_one_or_none()) is not None:
                    stored.append(Comparison(found, c.prompt, c.answers, c.provenance))
                    continue
                values = {
                    "fingerprint": fingerprint,
                    "prompt": c.prompt,
                    "answers": [{"text": a.text, "ended": a.ended} for a in c.answers],
                    "provenance": c.provenance,
                }
                key = db.execute(insert(_comparisons).values(**values)).inserted_primary_key
                stored.append(Comparison(key[0] if key else 0, c.prompt, c.answers, c.provenance))
        return stored

    def record(self, preferences: Sequence[Preference]) -> None:
        """Stores what was said of stored comparisons.

        Raises:
            DataError: a preference does not rank exactly the answers of its comparison.
        """
        with self._named(), self._engine.begin() as db:
            for p in preferences:
                if len(p.ranks) != len(p.comparison.answers):
                    raise DataError(
                        f"comparison {p.comparison.id}: {len(p.comparison.answers)} answers but {len(p.ranks)} ranks"
                    )
                created = p.created or datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                db.execute(
                    insert(_preferences).values(
                        comparison_id=p.comparison.id,
                        annotator=p.annotator,
                        ranks=list(p.ranks),
                        shown=list(p.order or range(len(p.ranks))),
                        seconds=p.seconds,
                        created=created,
                    )
                )

    def preferences(self) -> list[Preference]:
        """Everything that was said, oldest first."""
        query = select(_preferences, _comparisons).join(_comparisons).order_by(_preferences.c.id)
        with self._named(), self._engine.connect() as db:
            return [
                Preference(
                    Comparison(row.comparison_id, row.prompt, _answers(row.answers), row.provenance),
                    tuple(row.ranks),
                    row.annotator,
                    tuple(row.shown),
                    row.seconds,
                    row.created,
                )
                for row in db.execute(query)
            ]

    def unlabelled(self, annotator: str | None = None) -> list[Comparison]:
        """Comparisons of which nobody (or not this annotator) has said anything, oldest first."""
        said = select(_preferences.c.comparison_id)
        if annotator is not None:
            said = said.where(_preferences.c.annotator == annotator)
        query = select(_comparisons).where(_comparisons.c.id.not_in(said)).order_by(_comparisons.c.id)
        with self._named(), self._engine.connect() as db:
            return [Comparison(r.id, r.prompt, _answers(r.answers), r.provenance) for r in db.execute(query)]

    def counts(self) -> dict[str, int]:
        """Number of comparisons, and of preferences by annotator."""
        with self._named(), self._engine.connect() as db:
            said = db.execute(select(_preferences.c.annotator, func.count()).group_by(_preferences.c.annotator))
            total = db.execute(select(func.count()).select_from(_comparisons)).scalar_one()
            return {"comparisons": total} | {f"by {name}": n for name, n in said}

    def close(self) -> None:
        self._engine.dispose()


def _durable(connection, _record) -> None:
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _answers(stored: list[dict]) -> tuple[Answer, ...]:
    return tuple(Answer(a["text"], a["ended"]) for a in stored)


def _fingerprint(comparison: Comparison) -> str:
    """Equal for comparisons with the same prompt and answers."""
    asked = json.dumps([comparison.prompt, [a.text for a in comparison.answers]], ensure_ascii=False)
    return hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()
