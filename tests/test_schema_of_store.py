"""The store's schema: what is made is what the code expects; older and newer ones are recognised."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from plaudit.errors import DataError
from plaudit.preferences.store import PreferenceStore
from plaudit.preferences.tables import Database, metadata
from plaudit.recipes.stores import store_upgrade


def run(path: Path, statement: str) -> None:
    """Does something to a database behind the store's back."""
    db = sqlite3.connect(path)
    db.execute(statement)
    db.commit()
    db.close()


def old(path: Path) -> Path:
    """A store as it was before questions were kept apart."""
    db = sqlite3.connect(path)
    db.executescript(
        """
        CREATE TABLE comparisons (id INTEGER NOT NULL, fingerprint VARCHAR(64) NOT NULL, prompt TEXT NOT NULL,
            answers JSON NOT NULL, provenance JSON NOT NULL, PRIMARY KEY (id), UNIQUE (fingerprint));
        CREATE TABLE preferences (id INTEGER NOT NULL, comparison_id INTEGER NOT NULL, annotator VARCHAR(200) NOT NULL,
            ranks JSON NOT NULL, shown JSON NOT NULL, seconds FLOAT NOT NULL, created VARCHAR(40) NOT NULL,
            PRIMARY KEY (id), FOREIGN KEY(comparison_id) REFERENCES comparisons (id));
        CREATE INDEX ix_preferences_comparison_id ON preferences (comparison_id);
        CREATE INDEX ix_preferences_annotator ON preferences (annotator);
        """
    )
    answers = json.dumps([{"text": t, "ended": True} for t in "abc"])
    for i in (4, 9):
        db.execute("INSERT INTO comparisons VALUES (?, ?, ?, ?, ?)", (i, f"f{i}", f"p{i}", answers, '{"model": "m"}'))
    db.execute(
        "INSERT INTO preferences VALUES (3, 9, 'ann', '[1, 0, 1]', '[2, 1, 0]', 1.5, '2026-01-01T00:00:00+00:00')"
    )
    db.commit()
    db.close()
    return path


def test_the_revisions_make_the_tables_that_the_code_knows(tmp_path):
    database = Database(tmp_path / "s.sqlite", create=True)
    with database.read() as db:
        assert compare_metadata(MigrationContext.configure(db), metadata) == []
    database.close()


def test_an_older_store_is_named_left_alone_and_upgraded_when_asked(tmp_path):
    path = old(tmp_path / "s.sqlite")
    before = path.read_bytes()
    with pytest.raises(DataError, match="older Plaudit.*plaudit store upgrade"):
        PreferenceStore(path)
    assert path.read_bytes() == before
    store_upgrade(str(path))
    assert (tmp_path / "s.sqlite.0001.bak").read_bytes() == before
    opened = PreferenceStore(path)
    (label,) = opened.preferences()
    assert (label.comparison.id, label.ranks, label.order, label.annotator) == (9, (1, 0, 1), (2, 1, 0), "ann")
    assert [c.id for c in opened.unlabelled()] == [4]
    opened.record([label])
    opened.close()
    database = Database(path)
    with database.read() as db:
        assert compare_metadata(MigrationContext.configure(db), metadata) == []
    database.close()


def test_a_newer_store_and_a_foreign_database_are_named_and_left_alone(tmp_path):
    path = tmp_path / "s.sqlite"
    PreferenceStore(path, create=True).close()
    run(path, "UPDATE alembic_version SET version_num = '9999'")
    for create in (False, True):
        with pytest.raises(DataError, match="newer Plaudit"):
            PreferenceStore(path, create=create)
    foreign = tmp_path / "f.sqlite"
    run(foreign, "CREATE TABLE cats (name TEXT)")
    for create in (False, True):
        with pytest.raises(DataError, match="no preference store"):
            PreferenceStore(foreign, create=create)
    db = sqlite3.connect(foreign)
    assert [row[0] for row in db.execute("SELECT name FROM sqlite_master")] == ["cats"]
    db.close()
