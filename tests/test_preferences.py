"""The preference store: what it has acknowledged is on disk, and comes back as it was said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plaudit.algorithms.reward import ranked_answers
from plaudit.errors import DataError
from plaudit.preferences.store import PreferenceStore
from plaudit.tokenizer import Tokenizer
from plaudit.types import Answer, Comparison, Preference


def comparison(prompt: str, *texts: str, ended: bool = True) -> Comparison:
    return Comparison(
        0, prompt, tuple(Answer(t, ended) for t in texts), {"model": "m", "seed": 3, "sampling": {"t": 0.8}}
    )


@pytest.fixture
def store(tmp_path: Path):
    opened = PreferenceStore(tmp_path / "deep" / "down" / "s.sqlite", create=True)
    yield opened
    opened.close()


# --- what comes back --------------------------------------------------------------------------------------------------


def test_comparisons_and_labels_of_several_annotators_come_back_as_they_were(store: PreferenceStore):
    first, second = store.add([comparison("p ä \u2028 '", "a", "b", "c"), comparison("", "x", "", ended=False)])
    assert first.id != second.id
    said = [
        Preference(first, (1, 0, 1), "ann", order=(2, 0, 1), seconds=1.5, created="2020-01-01T00:00:00+00:00"),
        Preference(first, (0, 0, 0), "bob", order=(0, 1, 2), seconds=0.25, created="2020-01-02T00:00:00+00:00"),
        Preference(second, (0, 1), "ann", order=(1, 0), seconds=2.0, created="2020-01-03T00:00:00+00:00"),
    ]
    store.record(said[:2])
    store.record(said[2:])
    store.close()
    again = PreferenceStore(store.path)
    assert again.preferences() == said
    assert again.counts() == {"comparisons": 2, "by ann": 2, "by bob": 1}
    again.close()


def test_time_and_order_are_filled_in_where_they_are_not_given(store: PreferenceStore):
    (stored,) = store.add([comparison("p", "a", "b")])
    store.record([Preference(stored, (0, 1), "ann")])
    (said,) = store.preferences()
    assert said.order == (0, 1) and said.created.endswith("+00:00")


def test_one_annotator_may_say_something_again_and_both_are_kept_in_order(store: PreferenceStore):
    (stored,) = store.add([comparison("p", "a", "b")])
    store.record([Preference(stored, (0, 1), "ann")])
    store.record([Preference(stored, (1, 0), "ann")])
    assert [p.ranks for p in store.preferences()] == [(0, 1), (1, 0)]


def test_unlabelled_is_what_nobody_or_not_this_annotator_has_judged(store: PreferenceStore):
    first, second, third = store.add([comparison(p, "a", "b") for p in "pqr"])
    store.record([Preference(first, (0, 1), "ann"), Preference(second, (1, 0), "bob")])
    assert store.unlabelled() == [third]
    assert store.unlabelled("ann") == [second, third]
    assert store.unlabelled("bob") == [first, third]
    assert store.unlabelled("new") == [first, second, third]


def test_a_comparison_that_is_there_already_is_not_stored_again(store: PreferenceStore):
    """An interrupted collection can be repeated; another text, order or number of answers is another comparison."""
    one = comparison("p", "a", "b")
    (first,) = store.add([one])
    others = [
        comparison("p", "b", "a"),
        comparison("q", "a", "b"),
        comparison("p", "ab", ""),
        comparison("p", "a", "b", ""),
    ]
    again = store.add([one, *others])
    assert again[0].id == first.id
    assert len({c.id for c in again}) == 5
    assert len(store.unlabelled()) == 5


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2), ()])
def test_ranks_that_are_not_one_an_answer_are_refused_and_nothing_of_the_call_is_kept(
    store: PreferenceStore, ranks: tuple[int, ...]
):
    (stored,) = store.add([comparison("p", "a", "b")])
    with pytest.raises(DataError, match=f"comparison {stored.id}: 2 answers but {len(ranks)} ranks"):
        store.record([Preference(stored, (0, 1), "ann"), Preference(stored, ranks, "ann")])
    assert store.preferences() == []


def test_a_label_for_a_comparison_that_is_not_in_the_store_is_refused(store: PreferenceStore):
    with pytest.raises(DataError):
        store.record([Preference(comparison("p", "a", "b"), (0, 1), "ann")])
    assert store.preferences() == []


def test_a_missing_store_is_named_and_not_made(tmp_path: Path):
    with pytest.raises(DataError, match=r"absent\.sqlite: no such preference store"):
        PreferenceStore(tmp_path / "absent.sqlite")
    assert not (tmp_path / "absent.sqlite").exists()


@pytest.mark.parametrize("create", [False, True])
def test_a_file_that_is_no_database_is_named_and_left_as_it_is(tmp_path: Path, create: bool):
    file = tmp_path / "notes.sqlite"
    file.write_text("these are my notes, and they are long enough to be taken for a header\n" * 50)
    before = file.read_bytes()
    with pytest.raises(DataError, match=r"notes\.sqlite"):
        PreferenceStore(file, create=create)
    assert file.read_bytes() == before


def test_a_place_that_cannot_hold_a_store_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file"):
        PreferenceStore(tmp_path / "file" / "s.sqlite", create=True)
    with pytest.raises(DataError, match=tmp_path.name):
        PreferenceStore(tmp_path, create=True)


@pytest.mark.parametrize("name", ["a b", "100%", "what?cache=shared", "a#b", "ä"])
def test_the_store_lies_where_it_was_asked_to_whatever_the_folder_is_called(tmp_path: Path, name: str):
    place = tmp_path / name / "s.sqlite"
    store = PreferenceStore(place, create=True)
    store.add([comparison("p", "a", "b")])
    store.close()
    assert place.is_file() and sorted(p.name for p in tmp_path.iterdir()) == [name]
    assert len(PreferenceStore(place).unlabelled()) == 1


# --- what a pair is ---------------------------------------------------------------------------------------------------


def test_answers_that_differ_only_where_they_are_cut_are_no_pair(tokenizer: Tokenizer):
    """Equal rows have equal scores whatever is learned: a pair of them teaches nothing and cannot be right."""
    said = [
        Preference(comparison("", "good: it ends like this", "poor: it ends like this"), (0, 1), "ann"),
        Preference(comparison("", "x", "y"), (0, 1), "ann"),
    ]
    rows = ranked_answers(said, tokenizer, 8)
    for better, worse in rows.preferred().nonzero().tolist():
        assert rows.tokens[better].tolist() != rows.tokens[worse].tolist()


# --- what is on disk --------------------------------------------------------------------------------------------------


def test_connections_write_ahead_and_wait_for_the_disk(store: PreferenceStore):
    with store.database.engine.connect() as db:
        pragma = {
            name: db.exec_driver_sql(f"PRAGMA {name}").scalar_one()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    full = 2
    assert pragma["journal_mode"] == "wal" and pragma["synchronous"] == full
    assert pragma["foreign_keys"] == 1 and pragma["busy_timeout"] >= 1000


LABELLER = """
import sys
from plaudit.preferences.store import PreferenceStore
from plaudit.types import Answer, Comparison, Preference
store = PreferenceStore(sys.argv[1], create=True)
asked = store.add([Comparison(0, str(i), (Answer("a"), Answer("b"))) for i in range(1000)])
for comparison in asked:
    store.record([Preference(comparison, (0, 1), "ann")])
    print(comparison.prompt, flush=True)
"""


def test_a_killed_process_loses_no_acknowledged_label(tmp_path: Path):
    """The process is killed while it labels; whatever it had said was recorded is there, and the store still works."""
    place = tmp_path / "s.sqlite"
    process = subprocess.Popen([sys.executable, "-c", LABELLER, str(place)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    acknowledged = [process.stdout.readline().strip() for _ in range(25)]
    process.kill()
    acknowledged += process.stdout.read().split()
    assert process.wait() != 0
    store = PreferenceStore(place)
    found = [p.comparison.prompt for p in store.preferences()]
    assert len(acknowledged) >= 25 and acknowledged == found[: len(acknowledged)]
    # One label may have reached the disk and not yet been announced.
    assert len(found) <= len(acknowledged) + 1
    store.record([Preference(store.unlabelled()[0], (1, 0), "bob")])
    assert store.counts()["by bob"] == 1


def test_two_open_stores_see_each_others_labels(store: PreferenceStore):
    (stored,) = store.add([comparison("p", "a", "b")])
    other = PreferenceStore(store.path)
    other.record([Preference(stored, (0, 1), "ann")])
    assert store.unlabelled() == [] and len(store.preferences()) == 1
    other.close()


def test_text_that_no_database_holds_is_stored_with_a_replacement(tmp_path):
    """Half a surrogate pair (JSON can say it) and NUL: in the prompt, in an answer, in a reason."""
    store = PreferenceStore(tmp_path / "s.sqlite", create=True)
    odd = Comparison(0, "a \udc80 b \x00 c", (Answer("\udc80\x00"), Answer("plain")))
    (kept,) = store.add([odd])
    assert store.add([odd])[0].id == kept.id
    store.record([Preference(kept, (0, 1), "ann")])
    (label,) = store.preferences()
    assert label.comparison.prompt == "a \ufffd b \ufffd c"
    store.close()
