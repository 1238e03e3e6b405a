"""The preference store's tables, and how a database is opened: made, recognised, brought to today's schema."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    JSON,
    URL,
    Boolean,
    Column,
    Connection,
    Dialect,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    create_engine,
    event,
    inspect,
    make_url,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, SQLAlchemyError

from plaudit.errors import ConfigError, DataError, first_line

metadata = MetaData()
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def _where(*conditions: str) -> dict[str, Any]:
    """The rows that an index holds, in the words of the queries: SQLite compares those, and its truths are ``= 1``."""
    return {
        "sqlite_where": text(" AND ".join(c if " " in c else f"{c} = 1" for c in conditions)),
        "postgresql_where": text(" AND ".join(conditions)),
    }


class Words(TypeDecorator[str]):
    """Text as a model or a person wrote it. Half a surrogate pair and NUL, which a database cannot hold in text, become
    the replacement character."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else _UNSTORABLE.sub("\ufffd", value)


comparisons = Table(
    "comparisons",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("fingerprint", String(64), nullable=False, unique=True),
    Column("prompt", Words, nullable=False),
    Column("answers", JSON, nullable=False),
    Column("provenance", JSON, nullable=False),
)

#: what is put to somebody: a comparison's answers, all (``whole``) or two of them (``pair``; where there are two: both)
#: ``priority``: lower is asked earlier. ``labels`` counts what stands of ``preferences`` and says something.
#: ``known``: the ranks that a careful person gives, where the question is there to see whether people are careful.
questions = Table(
    "questions",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("comparison_id", ForeignKey("comparisons.id"), nullable=False),
    Column("answers", String(200), nullable=False),
    Column("whole", Boolean, nullable=False),
    Column("pair", Boolean, nullable=False),
    Column("priority", Float, nullable=False),
    Column("labels", Integer, nullable=False),
    Column("known", JSON(none_as_null=True)),
    UniqueConstraint("comparison_id", "answers"),
    # each for one way of asking, and just what it reads: the next question is its first row, progress counts its rows
    Index("ix_questions_whole", "labels", "priority", **_where("whole", "known IS NULL")),
    Index("ix_questions_pair", "labels", "priority", **_where("pair", "known IS NULL")),
    Index("ix_questions_known", "id", **_where("known IS NOT NULL")),
)

#: ``kind``: label, repeat (the same person again, to see whether they agree with themselves), check (a question with
#: known ranks) or verdict (a disagreement decided). ``said``: ranked, both_bad or skip (``ranks`` is null).
#: ``shown``: the answers' indices in the order shown. ``key`` makes a label that is sent twice count once.
#: ``withdrawn``: when it was taken back or replaced; null while it stands.
preferences = Table(
    "preferences",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("question_id", ForeignKey("questions.id"), nullable=False, index=True),
    Column("annotator", String(200), nullable=False),
    Column("kind", String(10), nullable=False),
    Column("said", String(10), nullable=False),
    Column("ranks", JSON(none_as_null=True)),
    Column("ratings", JSON(none_as_null=True)),
    Column("reason", Words, nullable=False),
    Column("shown", JSON, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("created", String(40), nullable=False),
    Column("withdrawn", String(40)),
    Column("key", String(40), unique=True),
    Index("ix_preferences_annotator", "annotator", "question_id"),
)

#: the question that lies open before a person: one each, so that two tabs show the same
claims = Table(
    "claims",
    metadata,
    Column("annotator", String(200), primary_key=True),
    Column("key", String(40), nullable=False),
    Column("question_id", ForeignKey("questions.id"), nullable=False, index=True),
    Column("kind", String(10), nullable=False),
    Column("shown", JSON, nullable=False),
    Column("served", Float, nullable=False),
    Column("replaces", Integer),
)

#: the key that signs people's links
secrets = Table(
    "secrets", metadata, Column("name", String(20), primary_key=True), Column("value", Text, nullable=False)
)


def is_url(place: str) -> bool:
    return "://" in place


class Database:
    """An open database of today's schema. Writing transactions follow one another; what is committed is on disk."""

    def __init__(self, place: str | Path, *, create: bool = False, upgrade: bool = False):
        """Opens a file of SQLite, or a PostgreSQL database by its URL.

        Raises:
            ConfigError: the URL cannot be read, or its driver is not installed.
            DataError: there is none and ``create`` is false, it is no store, cannot be written, or has the schema of
                another version of Plaudit (an older one is brought up to date where ``upgrade`` is true).
        """
        self.place = str(place)
        self.engine = self._engine(create)
        event.listen(self.engine, "begin", _begin)
        self.reading = self.engine.execution_options(plaudit_reading=True)
        if self.engine.dialect.name == "postgresql":
            # a statement sees what was committed before it, in a transaction or not; this way costs it no two more
            self.reading = self.reading.execution_options(isolation_level="AUTOCOMMIT")
        self._writing = threading.Lock()
        with self.named():
            self._recognise(create, upgrade)
            self._write_ahead()

    def _engine(self, create: bool) -> Engine:
        if is_url(self.place):
            try:
                url = make_url(self.place)
                if url.drivername in ("postgresql", "postgres"):
                    url = url.set(drivername="postgresql+psycopg")
                # a session that lost its connection asks for a new one
                return create_engine(url, pool_pre_ping=True, pool_size=16)
            except ModuleNotFoundError as error:
                raise ConfigError(f'{self.place}: needs {error.name}; run `pip install "plaudit[postgres]"`') from None
            except (ArgumentError, SQLAlchemyError) as error:
                raise ConfigError(f"{self.place}: no address of a database ({first_line(error)})") from None
        path = Path(self.place)
        if not create and not path.exists():
            raise DataError(f"{path}: no such preference store; `plaudit collect` makes one")
        if not create and path.is_file() and not path.stat().st_size:
            raise DataError(f"{path}: an empty file and no preference store; `plaudit collect` makes one")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"{path}: cannot be made: {error}") from None
        engine = create_engine(URL.create("sqlite", database=str(path)), pool_size=16)
        event.listen(engine, "connect", _durable)
        return engine

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors of the database as one line that names the store."""
        try:
            yield
        except DBAPIError as error:
            raise DataError(
                f"{self.shown}: cannot be used as a preference store: {first_line(error.orig or error)}"
            ) from None
        except SQLAlchemyError as error:
            raise DataError(f"{self.shown}: cannot be used as a preference store: {first_line(error)}") from None

    @property
    def shown(self) -> str:
        """The place as it may be printed: without a password."""
        return make_url(self.place).render_as_string(hide_password=True) if is_url(self.place) else self.place

    @contextmanager
    def read(self) -> Iterator[Connection]:
        with self.named(), self.reading.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """A transaction that no other writing one overlaps: what it reads is still so when it writes."""
        # threads wait for one another here: SQLite would have them ask again and again, and leave one out for long
        with self.named(), self.engine.connect() as connection, self._writing, connection.begin():
            if connection.dialect.name == "postgresql":
                connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
            yield connection

    def _recognise(self, create: bool, upgrade: bool) -> None:
        with self.reading.connect() as connection:
            there = set(inspect(connection).get_table_names())
            revision = MigrationContext.configure(connection).get_current_revision()
        script = ScriptDirectory.from_config(_alembic())
        if revision is None and {"comparisons", "preferences"} <= there:
            revision = _FIRST
        if revision == script.get_current_head():
            return
        if revision is None:
            if there or (not create and not is_url(self.place)):
                raise DataError(f"{self.shown}: a database, but no preference store; `plaudit collect` makes one")
            self._migrate(None)
            return
        if revision not in {known.revision for known in script.walk_revisions()}:
            raise DataError(
                f"{self.shown}: its schema ({revision}) is of a newer Plaudit; install that one to use this store"
            )
        if not upgrade:
            raise DataError(
                f"{self.shown}: its schema ({revision}) is of an older Plaudit; bring it up to date with "
                f"`plaudit store upgrade {self.shown}`"
            )
        if not is_url(self.place):
            shutil.copy2(self.place, f"{self.place}.{revision}.bak")
        self._migrate(revision)

    def _write_ahead(self) -> None:
        """The write-ahead log, so that people read while others write. It is a property of the file, so a database that
        is not ours must not get it."""
        if self.engine.dialect.name == "sqlite":
            with self.engine.connect() as connection:
                raw = connection.connection.driver_connection
                assert raw is not None
                raw.execute("PRAGMA journal_mode=WAL")

    def _migrate(self, since: str | None) -> None:
        with self.write() as connection:
            settings = _alembic()
            settings.attributes["connection"] = connection
            if since == _FIRST and MigrationContext.configure(connection).get_current_revision() is None:
                command.stamp(settings, _FIRST)
            command.upgrade(settings, "head")

    def close(self) -> None:
        self.engine.dispose()


#: the revision of stores made before revisions were kept
_FIRST = "0001"
#: PostgreSQL's name for the lock of writing transactions
_LOCK = 7_283_518


def _alembic() -> Config:
    settings = Config()
    settings.set_main_option("script_location", str(Path(__file__).with_name("schema")))
    return settings


def _durable(connection: Any, _record: Any) -> None:
    # transactions are begun by us (see _begin), not by the driver
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        reading = connection.get_execution_options().get("plaudit_reading")
        connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
