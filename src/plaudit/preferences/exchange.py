"""Labels in and out of a store: files that were read become rows, rows become files of several forms."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import select, update

from plaudit.data.comparisons import Judged
from plaudit.errors import DataError
from plaudit.preferences.store import (
    PreferenceStore,
    chunks,
    indices,
    label_row,
    order_shown,
    put,
    standing,
    whole_questions,
)
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
        for part in chunks(sorted(ids)):
            question |= whole_questions(db, part)
            known = select(preferences.c.question_id, preferences.c.annotator, preferences.c.kind).join(questions)
            there = questions.c.comparison_id.in_(part) & preferences.c.withdrawn.is_(None)
            said |= {tuple(row) for row in db.execute(known.where(there))}
        new = []
        for c, r in zip(stored, rows, strict=True):
            if checks:
                db.execute(update(questions).where(questions.c.id == question[c.id]).values(known=list(r.ranks)))
            elif r.labelled and (key := (question[c.id], r.annotator, r.kind)) not in said:
                said.add(key)
                shown = r.order or range(len(c.answers))
                new.append(
                    label_row(
                        key[0],
                        r.annotator[:200],
                        r.ranks,
                        shown,
                        kind=r.kind,
                        said=r.said,
                        ratings=r.ratings,
                        reason=r.reason,
                        seconds=r.seconds,
                        created=r.created,
                    )
                )
        put(db, new)
    return {"comparisons": len(ids), "labels": len(new), "checks": len(rows) if checks else 0}


def exported(store: PreferenceStore, form: Form) -> Iterator[dict[str, Any]]:
    """Rows of a form: every label with all that is known of it, or chosen and rejected for every ordered pair."""
    if form == "labels":
        with store.database.read() as db:
            for row in db.execute(standing()):
                yield {
                    "prompt": row.prompt,
                    "answers": [row.answers[i] for i in indices(row.asked)],
                    "ranks": row.ranks,
                    "said": row.said,
                    "ratings": row.ratings,
                    "reason": row.reason,
                    "annotator": row.annotator,
                    "kind": row.kind,
                    "shown": list(order_shown(row)),
                    "seconds": row.seconds,
                    "created": row.created,
                    "provenance": row.provenance,
                }
        return
    for p in store.preferences():
        placed = zip(p.ranks, (answer.text for answer in p.comparison.answers), strict=True)
        for one, other in combinations(placed, 2):
            if one[0] != other[0]:
                (_, chosen), (_, rejected) = sorted((one, other))
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
    asked = comparison.messages or ([{"role": "user", "content": prompt}] if prompt else [])
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
