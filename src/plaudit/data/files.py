"""Rows out of JSONL, JSON, CSV, Parquet and hub ids, each with the number it has in its file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from plaudit.errors import DataError, first_line

Row = tuple[str, dict[str, Any]]
READABLE = (".jsonl", ".json", ".csv", ".parquet", ".arrow")


def rows(source: str) -> Iterator[Row]:
    """(where, row) for every row; ``where`` names file and row for messages.

    Raises:
        DataError: the file is missing, empty, of an unknown kind, or a row is malformed.
    """
    path = Path(source)
    suffix = path.suffix.lower()
    if not path.exists():
        if suffix in READABLE or path.is_absolute() or source.count("/") > 1:
            raise DataError(f"{source}: no such file")
        yield from _hub(source)
        return
    if path.is_dir():
        raise DataError(f"{source}: is a folder; name a file ({', '.join(READABLE)})")
    readers = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _columnar, ".arrow": _columnar}
    if suffix not in readers:
        raise DataError(
            f"{source}: cannot tell what {suffix or 'a file without an ending'} holds; use {', '.join(READABLE)}"
        )
    empty = True
    try:
        for row in readers[suffix](path):
            empty = False
            yield row
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error}") from None
    if empty:
        raise DataError(f"{source}: the file holds no rows")


def _record(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(
            f"{where}: expected an object with named columns, found {type(value).__name__} ({str(value)[:60]!r})"
        )
    return where, value


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, row {number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:
                reason = getattr(error, "msg", str(error))
                raise DataError(f"{where}: not valid JSON ({reason}): {line.strip()[:60]!r}") from None
            yield _record(where, value)


def _json(path: Path) -> Iterator[Row]:
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); one object a line belongs in a .jsonl file") from None
    if not isinstance(values, list):
        raise DataError(f"{path}: expected a list of objects, found {type(values).__name__}")
    for number, value in enumerate(values, 1):
        yield _record(f"{path}, row {number}", value)


#: where the csv module puts the fields that are too many; no column can be called so
_REST = "\0"


def _csv(path: Path) -> Iterator[Row]:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, restkey=_REST)
        try:
            for number, row in enumerate(reader, 1):
                where = f"{path}, row {number}"
                if _REST in row or None in row.values():
                    found = sum(v is not None for k, v in row.items() if k != _REST) + len(row.get(_REST) or [])
                    raise DataError(
                        f"{where}: expected {len(reader.fieldnames or [])} columns "
                        f"({', '.join(reader.fieldnames or [])}), found {found}"
                    )
                yield where, dict(row)
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: not valid CSV ({error})") from None


def _columnar(path: Path) -> Iterator[Row]:
    import datasets

    try:
        if path.suffix.lower() == ".parquet":
            table = datasets.Dataset.from_parquet(str(path), keep_in_memory=True)
        else:
            table = datasets.Dataset.from_file(str(path))
    except Exception as error:
        raise DataError(f"{path}: not a readable {path.suffix[1:]} file ({first_line(error)})") from None
    for number, row in enumerate(table, 1):
        yield f"{path}, row {number}", dict(row)


def _hub(source: str) -> Iterator[Row]:
    import datasets

    name, _, split = source.partition(":")
    try:
        table = datasets.load_dataset(name, split=split or "train")
    except Exception as error:
        raise DataError(f"{source}: neither a file nor a data set that can be loaded ({first_line(error)})") from None
    for number, row in enumerate(table, 1):
        yield f"{source}, row {number}", dict(row)


def text_column(where: str, row: dict[str, Any], name: str, *, allow_empty: bool = False) -> str:
    """A column that must be text.

    Raises:
        DataError: it is missing, empty or something else; the message says what was found.
    """
    if name not in row:
        raise DataError(f"{where}: expected a column {name!r}, found {', '.join(map(repr, row)) or 'no columns'}")
    value = row[name]
    if not isinstance(value, str):
        raise DataError(
            f"{where}: column {name!r} should be text, found {'null' if value is None else type(value).__name__}"
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: column {name!r} holds half of a character (a lone surrogate)") from None
    if not value.strip() and not allow_empty:
        raise DataError(f"{where}: column {name!r} is empty")
    return value


def number_column(where: str, row: dict[str, Any], name: str, low: float, high: float) -> float:
    """A column that must be a number from ``low`` to ``high``.

    Raises:
        DataError: it is something else; the message says what was found.
    """
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise DataError(f"{where}: column {name!r} should be a number from {low:g} to {high:g}, found {value!r}")
    return float(value)


def messages(where: str, name: str, value: Any) -> list[dict[str, str]]:
    """A conversation: a list of objects with ``role`` and ``content``.

    Raises:
        DataError: it is something else, or empty.
    """
    good = (
        isinstance(value, list)
        and value
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )
    if not good:
        raise DataError(
            f"{where}: column {name!r} should be a list of objects with role and content, found {str(value)[:80]!r}"
        )
    return value
