"""Labels in and out of a store: files that were read become rows, rows become files of several forms."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import insert, select, update

from plaudit.data.comparisons import Judged
from plaudit.errors import DataError
from plaudit.preferences.store import PreferenceStore, indices, now, standing
from plaudit.preferences.tables import preferences, questions
from plaudit.types import Comparison

Form = Literal["labels", "explicit", "implicit", "conversational"]
SUFFIXES = (".jsonl", ".csv", ".parquet")


def imported(store: PreferenceStore, judged: Iterable[Judged], *, checks: bool = False) -> dict[str, int]:
    """Adds what was read; what is there already is not added again, so that an import can be repeated.

    ``checks``: the ranks are what a careful person says; the comparisons become attention checks, nobody's labels.

    Raises:
        DataError: a row to check attention with has no ranks.
    """
    rows = list(judged)
    if checks and (bare := next((i for i, r in enumerate(rows, 1) if not r.ranks), 0)):
        raise DataError(f"row {bare}: has no ranks (or chosen and rejected), which attention checks need")
    stored = store.add([r.comparison for r in rows])
    with store.database.write() as db:
        ids = {c.id for c in stored}
        question: dict[int, int] = {}
        said: set[tuple[int, str, str]] = set()
        for part in _parts(sorted(ids)):
            found = select(questions.c.comparison_id, questions.c.id)
            for row in db.execute(found.where(questions.c.whole, questions.c.comparison_id.in_(part))):
                question[row.comparison_id] = row.id
            known = select(preferences.c.question_id, preferences.c.annotator, preferences.c.kind).join(questions)
            there = questions.c.comparison_id.in_(part) & preferences.c.withdrawn.is_(None)
            said |= {tuple(row) for row in db.execute(known.where(there))}
        new = []
        for c, r in zip(stored, rows, strict=True):
            if checks:
                db.execute(update(questions).where(questions.c.id == question[c.id]).values(known=list(r.ranks)))
            elif r.labelled and (key := (question[c.id], r.annotator, r.kind)) not in said:
                said.add(key)
                new.append(_label(key[0], r))
        if new:
            db.execute(insert(preferences), new)
        for label in new:
            if label["kind"] == "label" and label["said"] != "skip":
                counted = questions.c.id == label["question_id"]
                db.execute(update(questions).where(counted).values(labels=questions.c.labels + 1))
    return {"comparisons": len(ids), "labels": len(new), "checks": len(rows) if checks else 0}


def _label(question: int, r: Judged) -> dict[str, Any]:
    return {
        "question_id": question,
        "annotator": r.annotator[:200],
        "kind": r.kind,
        "said": r.said,
        "ranks": list(r.ranks) or None,
        "ratings": list(r.ratings) or None,
        "reason": r.reason,
        "shown": list(r.order or range(len(r.comparison.answers))),
        "seconds": r.seconds,
        "created": r.created or now(),
    }


def _parts(ids: list[int], size: int = 500) -> Iterator[list[int]]:
    for start in range(0, len(ids), size):
        yield ids[start : start + size]


def exported(store: PreferenceStore, form: Form) -> Iterator[dict[str, Any]]:
    """Rows of a form: every label with all that is known of it, or chosen and rejected for every ordered pair."""
    if form == "labels":
        with store.database.read() as db:
            for row in db.execute(standing()):
                asked = indices(row.asked)
                place = {answer: i for i, answer in enumerate(asked)}
                yield {
                    "prompt": row.prompt,
                    "answers": [row.answers[i] for i in asked],
                    "ranks": row.ranks,
                    "said": row.said,
                    "ratings": row.ratings,
                    "reason": row.reason,
                    "annotator": row.annotator,
                    "kind": row.kind,
                    "shown": [place[i] for i in row.shown],
                    "seconds": row.seconds,
                    "created": row.created,
                    "provenance": row.provenance,
                }
        return
    for p in store.preferences():
        places = range(len(p.ranks))
        for i, j in ((i, j) for a, b in combinations(places, 2) for i, j in ((a, b), (b, a))):
            if p.ranks[i] < p.ranks[j]:
                chosen, rejected = p.comparison.answers[i].text, p.comparison.answers[j].text
                yield _formed(form, p.comparison, chosen, rejected) | {
                    "annotator": p.annotator,
                    "created": p.created,
                    "provenance": json.dumps(p.comparison.provenance, ensure_ascii=False),
                }


def _formed(form: Form, comparison: Comparison, chosen: str, rejected: str) -> dict[str, Any]:
    prompt = comparison.prompt
    if form == "explicit":
        return {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    if form == "implicit":
        return {"chosen": prompt + chosen, "rejected": prompt + rejected}
    asked = comparison.provenance.get("messages") or ([{"role": "user", "content": prompt}] if prompt else [])
    said = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
    return {"prompt": asked} | dict(zip(("chosen", "rejected"), said, strict=True))


def write(store: PreferenceStore, target: str | Path, form: Form) -> int:
    """Writes a file of JSON lines, CSV or Parquet, by its ending; returns the number of rows.

    Raises:
        DataError: another ending, a form that CSV cannot hold, nothing to write, or the file is there already.
    """
    path = Path(target)
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise DataError(f"{target}: cannot tell the kind of file; use {', '.join(SUFFIXES)}")
    if suffix == ".csv" and form not in ("explicit", "implicit"):
        raise DataError(f"{target}: CSV holds text alone; use format=explicit, or a .jsonl file")
    if path.exists():
        raise DataError(f"{target}: is there already, and is left as it is; name another file")
    rows = list(exported(store, form))
    if not rows:
        raise DataError(f"{store.database.shown}: holds no {'label' if form == 'labels' else 'preference'} to export")
    scratch = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".jsonl":
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            scratch.write_bytes(text.encode("utf-8", "replace"))
        else:
            import datasets

            if form == "labels":
                rows = [row | {"provenance": json.dumps(row["provenance"], ensure_ascii=False)} for row in rows]
            table = datasets.Dataset.from_list(rows)
            table.to_csv(str(scratch)) if suffix == ".csv" else table.to_parquet(str(scratch))
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise DataError(f"{target}: cannot be written ({error.strerror})") from None
    return len(rows)
