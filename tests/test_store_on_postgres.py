"""The store and the labelling page on a PostgreSQL server: PLAUDIT_TEST_POSTGRES names it, else all is skipped."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Iterator

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from fastapi.testclient import TestClient

from plaudit.config import PageConfig
from plaudit.errors import DataError
from plaudit.pages.labelling import label_page
from plaudit.preferences.exchange import exported
from plaudit.preferences.store import PreferenceStore
from plaudit.preferences.tables import Database, metadata
from plaudit.recipes.stores import store_upgrade
from plaudit.types import Answer, Comparison

SERVER = os.environ.get("PLAUDIT_TEST_POSTGRES", "")
pytestmark = pytest.mark.skipif(not SERVER, reason="PLAUDIT_TEST_POSTGRES names no server")


@pytest.fixture
def place() -> Iterator[str]:
    """An empty schema of its own, as an address."""
    import psycopg

    schema = f"plaudit_test_{secrets.token_hex(4)}"
    with psycopg.connect(SERVER, autocommit=True) as db:
        db.execute(f"CREATE SCHEMA {schema}")
        try:
            yield f"{SERVER}{'&' if '?' in SERVER else '?'}options=-csearch_path%3D{schema}"
        finally:
            db.execute(f"DROP SCHEMA {schema} CASCADE")


def filled(place: str, count: int) -> PreferenceStore:
    store = PreferenceStore(place, create=True)
    store.add([Comparison(0, f"prompt {i}", (Answer(f"{i} a"), Answer(f"{i} b")), {"i": i}) for i in range(count)])
    return store


def page(place: str, name: str, **keys) -> TestClient:
    client = TestClient(label_page(PageConfig(store=place, **keys)).app, base_url="http://127.0.0.1")
    client.post("/enter", data={"name": name})
    return client


def answer(client: TestClient, choice: str = "1") -> str | None:
    """The key of the label that was acknowledged; None where nothing was asked."""
    asked = re.search(r'name="key" value="(\w+)"', client.get("/").text)
    if asked is None:
        return None
    sent = client.post("/answer", data={"key": asked[1], "choice": choice}, follow_redirects=False)
    assert sent.status_code == 303
    return asked[1]


def run(place: str, statement: str) -> None:
    """Does something to a database behind the store's back."""
    database = Database(place)
    with database.engine.begin() as db:
        db.exec_driver_sql(statement)
    database.close()


@pytest.mark.parametrize("servers", [1, 2])
def test_people_who_answer_at_once_lose_and_double_no_label(place, servers):
    """Also where two servers share the database, whose threads know nothing of each other."""
    store = filled(place, 40)
    apps = [label_page(PageConfig(store=place, overlap=2, repeat_every=0)).app for _ in range(servers)]
    acknowledged: list[str] = []
    failed: list[BaseException] = []

    def labels(i: int) -> None:
        try:
            client = TestClient(apps[i % servers], base_url="http://127.0.0.1")
            client.post("/enter", data={"name": f"person {i}"})
            while key := answer(client):
                acknowledged.append(key)
        except BaseException as error:
            failed.append(error)

    people = [threading.Thread(target=labels, args=(i,)) for i in range(4)]
    for thread in people:
        thread.start()
    for thread in people:
        thread.join()
    assert not failed
    # a question that lies before somebody when another looks is theirs, and is asked: nothing stays behind
    said = store.preferences()
    by_question = Counter(p.comparison.prompt for p in said)
    assert len(said) == len(acknowledged) == len(set(acknowledged)) == 80
    assert set(by_question.values()) == {2} and len(by_question) == 40
    assert max(Counter((p.comparison.prompt, p.annotator) for p in said).values()) == 1
    store.close()


def test_a_resent_answer_counts_once_and_undo_asks_again(place):
    store = filled(place, 3)
    client = page(place, "ann")
    key = answer(client)
    assert client.post("/answer", data={"key": key, "choice": "2"}).status_code == 200
    assert len(store.preferences()) == 1
    first = store.preferences()[0].comparison.prompt
    client.post("/undo")
    assert store.preferences() == [] and first in client.get("/").text
    answer(client, "equal")
    assert [(p.comparison.prompt, p.ranks) for p in store.preferences()] == [(first, (0, 0))]
    store.close()


def test_labels_come_out_as_they_were_given(place):
    store = filled(place, 3)
    client = page(place, "ann")
    answer(client, "1")
    answer(client, "skip")
    rows = list(exported(store, "labels"))
    assert [row["said"] for row in rows] == ["ranked", "skip"]
    assert rows[0]["ranks"] == [int(i != rows[0]["shown"][0]) for i in range(2)] and rows[1]["ranks"] is None
    assert all(row["annotator"] == "ann" and row["provenance"] == {"i": int(row["prompt"][7:])} for row in rows)
    assert client.get("/export.jsonl").text.count("\n") == 2
    assert "1" in client.get("/admin").text
    store.close()


def test_another_server_goes_on_where_the_first_was(place):
    store = filled(place, 5)
    made = label_page(PageConfig(store=place, people=["ann"]))
    way = dict(made.ways)["ann"]
    client = TestClient(made.app, base_url="http://127.0.0.1")
    client.get(way)
    answer(client)
    before = client.get("/").text
    again = TestClient(label_page(PageConfig(store=place, people=["ann"])).app, base_url="http://127.0.0.1")
    # neither the link nor the question that lay open is another
    assert again.get(way).text == before
    answer(again)
    assert len(store.preferences()) == 2
    store.close()


def test_the_schema_is_what_the_code_knows_and_older_and_newer_ones_are_recognised(place):
    filled(place, 4).close()
    answer(page(place, "ann"))
    database = Database(place)
    with database.read() as db:
        assert compare_metadata(MigrationContext.configure(db), metadata) == []
    database.close()
    # as the second revision left it
    database = Database(place)
    with database.engine.begin() as db:
        for mode in ("whole", "pair"):
            db.exec_driver_sql(f"DROP INDEX ix_questions_{mode}")
            db.exec_driver_sql(f"CREATE INDEX ix_questions_{mode} ON questions ({mode}, labels, priority)")
        db.exec_driver_sql("DROP INDEX ix_questions_known")
        db.exec_driver_sql("UPDATE alembic_version SET version_num = '0002'")
    database.close()
    with pytest.raises(DataError, match="older Plaudit.*plaudit store upgrade"):
        PreferenceStore(place)
    store_upgrade(place)
    store = PreferenceStore(place)
    assert len(store.preferences()) == 1 and len(store.unlabelled()) == 3
    with store.database.read() as db:
        assert compare_metadata(MigrationContext.configure(db), metadata) == []
    store.close()
    run(place, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(DataError, match="newer Plaudit"):
        PreferenceStore(place)


def test_a_connection_that_the_server_closed_is_made_anew(place):
    store = filled(place, 2)
    name = f"plaudit_test_{secrets.token_hex(4)}"
    client = page(f"{place}&application_name={name}", "ann")
    answer(client)
    run(place, f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = '{name}'")
    assert client.get("/").status_code == 200
    answer(client)
    assert len(store.preferences()) == 2
    store.close()
