"""Labels from other tools' files and back into files: nothing is lost, nothing counts twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plaudit.data import comparisons
from plaudit.errors import DataError
from plaudit.preferences.store import PreferenceStore
from plaudit.recipes.stores import store_backup, store_export, store_forget, store_import
from plaudit.types import Answer, Comparison, Preference

DIALOGUE = "\n\nHuman: hello\n\nAssistant:"
USER, YES, NO = ({"role": r, "content": c} for r, c in (("user", "hello"), ("assistant", "yes"), ("assistant", "no")))
LABEL_STUDIO = {
    "data": {"prompt": "hello", "text1": "yes", "text2": "no"},
    "annotations": [
        {
            "completed_by": 7,
            "lead_time": 3.5,
            "created_at": "2026-01-02T03:04:05Z",
            "result": [{"type": "pairwise", "to_name": "text1,text2", "value": {"selected": "right"}}],
        },
        {"completed_by": 8, "result": [{"type": "pairwise", "to_name": "a,b", "value": {"selected": "left"}}]},
        {"completed_by": 9, "result": [{"type": "choices", "value": {"choices": ["x"]}}]},
    ],
}
ARGILLA_FLAT = {
    "prompt": "hello",
    "response1": "yes",
    "response2": "no",
    "preference": [
        {"user_id": "u1", "value": {"rank": [2, 1], "value": ["response1", "response2"]}, "status": "submitted"},
        {"user_id": "u2", "value": [{"rank": 1, "value": "response1"}, {"rank": 1, "value": "response2"}]},
        {"user_id": "u3", "value": {"rank": [1, 2], "value": ["response1", "response2"]}, "status": "discarded"},
    ],
}
ARGILLA = {
    "fields": {"instruction": "hello", "response_a": "yes", "response_b": "no"},
    "responses": {"better": [{"user_id": "u1", "value": "response_b"}]},
}


def write(folder: Path, rows: list[Any], name: str = "a.jsonl") -> str:
    file = folder / name
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def said(made: comparisons.Judged) -> tuple[str, list[str], tuple[int, ...]]:
    return made.comparison.prompt, [a.text for a in made.comparison.answers], made.ranks


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "hello", "chosen": "yes", "rejected": "no"}, "hello"),
        ({"chosen": "yes", "rejected": "no"}, ""),
        ({"chosen": DIALOGUE + "yes", "rejected": DIALOGUE + "no"}, DIALOGUE),
        ({"prompt": [USER], "chosen": [YES], "rejected": [NO]}, "user: hello"),
        ({"prompt": "hello", "chosen": [YES], "rejected": [NO]}, "user: hello"),
        ({"chosen": [USER, YES], "rejected": [USER, NO]}, "user: hello"),
    ],
)
def test_every_form_of_a_preference_gives_the_same_comparison(tmp_path, row, prompt):
    (made,) = comparisons.read(write(tmp_path, [row]))
    assert said(made) == (prompt, ["yes", "no"], (0, 1))
    if prompt.startswith("user"):
        assert made.comparison.messages == [USER]


def test_label_studio_and_argilla_are_read_with_who_said_what(tmp_path):
    studio = list(comparisons.read(write(tmp_path, [LABEL_STUDIO])))
    assert [(*said(m), m.annotator, m.seconds) for m in studio] == [
        ("hello", ["yes", "no"], (1, 0), "label-studio 7", 3.5),
        ("hello", ["yes", "no"], (0, 1), "label-studio 8", 0.0),
    ]
    flat = list(comparisons.read(write(tmp_path, [ARGILLA_FLAT])))
    assert [(*said(m), m.annotator) for m in flat] == [
        ("hello", ["yes", "no"], (1, 0), "argilla u1"),
        ("hello", ["yes", "no"], (0, 0), "argilla u2"),
    ]
    (made,) = comparisons.read(write(tmp_path, [ARGILLA]))
    assert said(made) == ("hello", ["yes", "no"], (1, 0))


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ({"prompt": "p", "answers": ["a"]}, "two or more"),
        ({"prompt": "p", "answers": ["a", 3]}, "two or more"),
        ({"prompt": "p", "answers": ["a", "b"], "ranks": [0]}, "'ranks'"),
        ({"prompt": "p", "answers": ["a", "b"], "ranks": [1, 2]}, "ranks [1, 2]"),
        ({"prompt": "p", "answers": ["a", "b"], "ranks": ["x", 0]}, "'ranks'"),
        ({"prompt": "p", "answers": ["a", "b"], "said": "maybe"}, "said"),
        ({"prompt": "p", "answers": ["a", "b"], "kind": "wish", "ranks": [0, 1]}, "kind"),
        ({"chosen": [USER], "rejected": [NO]}, "assistant"),
        ({"chosen": [{"role": "user"}], "rejected": [NO]}, "'chosen'"),
        ({"data": {"x": "a", "y": "b"}, "annotations": [LABEL_STUDIO["annotations"][0]]}, "two answers"),
        ({"fields": {"a": "x"}, "responses": {"q": [{"user_id": 1, "value": 5}]}}, "fields"),
        ({"text": "a"}, "'chosen'"),
    ],
)
def test_a_row_of_no_known_form_is_named(tmp_path, row, found):
    with pytest.raises(DataError) as error:
        list(comparisons.read(write(tmp_path, [{"chosen": "a", "rejected": "b"}, row])))
    assert "row 2" in str(error.value) and found in str(error.value)


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "s.sqlite"
    opened = PreferenceStore(path, create=True)
    two, three = opened.add(
        [
            Comparison(0, "p", (Answer("a"), Answer("b", ended=False)), {"model": "m", "seed": 3}),
            Comparison(0, 'q "ü"\n', (Answer("x"), Answer("y"), Answer("z")), {"model": "m"}),
        ]
    )
    opened.record(
        [
            Preference(two, (1, 0), "annabel", (1, 0), 2.5, "2026-01-01T00:00:00+00:00"),
            Preference(two, (0, 1), "ben", (0, 1), 1.5, "2026-01-02T00:00:00+00:00"),
            Preference(three, (1, 0, 1), "annabel", (2, 1, 0), 4.0, "2026-01-03T00:00:00+00:00"),
        ]
    )
    opened.close()
    return str(path)


def preferences(path: str) -> list[Preference]:
    opened = PreferenceStore(path)
    found = opened.preferences()
    opened.close()
    return found


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_export_of_labels_comes_back_as_it_was(store, tmp_path, suffix):
    file = str(tmp_path / f"out.{suffix}")
    assert store_export(store, file) == 3
    assert store_import(str(tmp_path / "new.sqlite"), file) == {"comparisons": 2, "labels": 3, "checks": 0}
    assert preferences(str(tmp_path / "new.sqlite")) == preferences(store)
    # the same file once more adds nothing
    assert store_import(str(tmp_path / "new.sqlite"), file)["labels"] == 0
    assert len(preferences(str(tmp_path / "new.sqlite"))) == 3


@pytest.mark.parametrize(
    ("form", "suffix"),
    [("explicit", "csv"), ("explicit", "jsonl"), ("explicit", "parquet"), ("conversational", "jsonl"),
     ("conversational", "parquet"), ("implicit", "jsonl")],
)  # fmt: skip
def test_preferred_pairs_come_back_in_every_form(store, tmp_path, form, suffix):
    file = str(tmp_path / f"out.{suffix}")
    assert store_export(store, file, form) == 4
    made = [said(m) for m in comparisons.read(file)]
    before = "p" if form == "implicit" else ""
    assert [(texts, ranks) for _, texts, ranks in made][:2] == [
        ([f"{before}b", f"{before}a"], (0, 1)),
        ([f"{before}a", f"{before}b"], (0, 1)),
    ]
    assert [m.annotator for m in comparisons.read(file)] == ["annabel", "ben", "annabel", "annabel"]


def test_a_malformed_import_adds_nothing(store, tmp_path):
    with pytest.raises(DataError):
        store_import(store, write(tmp_path, [{"chosen": "new", "rejected": "newer"}, {"chosen": "x"}]))
    assert len(preferences(store)) == 3


@pytest.mark.parametrize("name", ["out.txt", "s.sqlite", "deep/out.csv"])
def test_what_cannot_be_written_is_named_and_nothing_is_overwritten(store, tmp_path, name):
    before = Path(store).read_bytes()
    with pytest.raises(DataError, match="out|s.sqlite"):
        store_export(store, str(tmp_path / name))
    assert Path(store).read_bytes() == before


def test_a_person_is_forgotten_entirely(store):
    assert store_forget(store, "annabel") == 2
    assert [p.annotator for p in preferences(store)] == ["ben"]
    opened = PreferenceStore(store)
    assert len(opened.unlabelled()) == 1
    opened.close()
    assert b"annabel" not in Path(store).read_bytes()


def test_a_backup_is_whole_and_overwrites_nothing(store, tmp_path):
    opened = PreferenceStore(store)
    target = str(tmp_path / "copy.sqlite")
    store_backup(store, target)
    opened.close()
    assert preferences(target) == preferences(store)
    with pytest.raises(DataError, match="there already"):
        store_backup(store, target)
