"""Comparisons from files, with what was said of them: Hugging Face's preference formats, Label Studio's and Argilla's
pairwise exports, plain questions, and what Plaudit itself has exported.

One reader for all: a row is recognised by its columns. Left out: writing (see preferences.exchange).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from plaudit.data import files, reviews
from plaudit.data.files import text_column
from plaudit.errors import DataError
from plaudit.types import Answer, Comparison, ranked

#: where the answer to a dialogue in one text begins, as Anthropic's hh-rlhf has it
ANSWERS = "\n\nAssistant:"


@dataclass(frozen=True)
class Judged:
    """A comparison as read, with what one annotator said of it.

    ``ranks`` is empty where nobody said anything, and where the question was skipped. ``order``: as shown.
    """

    comparison: Comparison
    ranks: tuple[int, ...] = ()
    annotator: str = ""
    said: str = "ranked"
    kind: str = "label"
    order: tuple[int, ...] = ()
    reason: str = ""
    ratings: tuple[int, ...] = ()
    seconds: float = 0.0
    created: str = ""

    @property
    def labelled(self) -> bool:
        return bool(self.ranks) or self.said == "skip"


def read(source: str, annotator: str = "people") -> Iterator[Judged]:
    """Every row of a file (or ``reviews/comparisons``). ``annotator`` is whoever said what names nobody.

    Raises:
        DataError: a row is of no known form, lacks something, or its two answers are the same.
    """
    if source.startswith("reviews/"):
        if source != "reviews/comparisons":
            raise DataError(f"{source}: for judgements there is reviews/comparisons")
        for comparison, ranks in reviews.comparisons("train") + reviews.comparisons("held_out"):
            yield Judged(comparison, ranks, annotator)
        return
    for where, row in files.rows(source):
        yield from _row(where, row, source, annotator)


def _row(where: str, row: dict[str, Any], source: str, annotator: str) -> Iterator[Judged]:
    if "annotations" in row and isinstance(row.get("data"), dict):
        yield from _label_studio(where, row, source)
    elif isinstance(row.get("fields"), dict) and isinstance(row.get("responses"), dict):
        yield from _argilla(where, row["fields"], row["responses"], source)
    elif flat := _flat_argilla(row):
        fields = {k: v for k, v in row.items() if isinstance(v, str) and k not in ("external_id", "metadata", "id")}
        yield from _argilla(where, fields, {flat: row[flat]}, source)
    elif "answers" in row:
        yield _asked(where, row, source, annotator)
    else:
        yield _chosen(where, row, source, annotator)


# --- chosen and rejected ---


def _chosen(where: str, row: dict[str, Any], source: str, annotator: str) -> Judged:
    if isinstance(row.get("chosen"), list) or isinstance(row.get("prompt"), list):
        prompt, chosen, rejected, more = _conversation(where, row)
    else:
        chosen, rejected, more = text_column(where, row, "chosen"), text_column(where, row, "rejected"), {}
        if row.get("prompt") is not None:
            prompt = text_column(where, row, "prompt", allow_empty=True)
        else:
            prompt, chosen, rejected = _dialogue(chosen, rejected)
    if chosen == rejected:
        raise DataError(f"{where}: chosen and rejected are the same text; nothing was preferred")
    said = {
        name: files.number_column(where, row, name, low, high)
        for name, low, high in (("margin", 0.0, 1e6), ("certainty", 0.5, 1.0))
        if row.get(name) is not None
    }
    who = row.get("annotator")
    comparison = Comparison(0, prompt, (Answer(chosen), Answer(rejected)), {"source": source} | more | said)
    return Judged(comparison, (0, 1), who if isinstance(who, str) and who.strip() else annotator)


def _dialogue(chosen: str, rejected: str) -> tuple[str, str, str]:
    """A prompt that both texts begin with, where they are dialogues; else they stand alone."""
    at = chosen.rfind(ANSWERS)
    begin = chosen[: at + len(ANSWERS)] if at >= 0 else ""
    if begin and rejected.startswith(begin) and ANSWERS not in rejected[len(begin) :]:
        return begin, chosen[len(begin) :], rejected[len(begin) :]
    return "", chosen, rejected


def _conversation(where: str, row: dict[str, Any]) -> tuple[str, str, str, dict[str, Any]]:
    """A prompt of messages, given or common to both. It is kept as messages, for the model's chat template."""
    chosen, rejected = (_messages(where, name, row.get(name)) for name in ("chosen", "rejected"))
    if row.get("prompt") is not None:
        asked = row["prompt"]
        asked = _messages(where, "prompt", asked) if isinstance(asked, list) else [{"role": "user", "content": asked}]
    else:
        same = 0
        while same < min(len(chosen), len(rejected)) - 1 and chosen[same] == rejected[same]:
            same += 1
        asked, chosen, rejected = chosen[:same], chosen[same:], rejected[same:]
    for name, rest in (("chosen", chosen), ("rejected", rejected)):
        if len(rest) != 1 or rest[0]["role"] != "assistant":
            raise DataError(f"{where}: after the common prompt {name} should be one message of the assistant")
    readable = "\n\n".join(f"{m['role']}: {m['content']}" for m in asked)
    return readable, chosen[0]["content"], rejected[0]["content"], {"messages": asked} if asked else {}


def _messages(where: str, name: str, value: Any) -> list[dict[str, str]]:
    return [{"role": m["role"], "content": m["content"]} for m in files.messages(where, name, value)]


# --- questions, and our own export ---


def _asked(where: str, row: dict[str, Any], source: str, annotator: str) -> Judged:
    """A prompt and its answers, and where it was answered, by whom and how."""
    found = _list(row.get("answers"))
    texts = [a if isinstance(a, str) else a.get("text") if isinstance(a, dict) else None for a in found]
    if len(texts) < 2 or not all(isinstance(text, str) for text in texts):
        raise DataError(f"{where}: column 'answers' should be a list of two or more texts, found {str(found)[:60]!r}")
    answers = tuple(
        Answer(
            text_column(f"{where}, answer {i}", {"answers": text}, "answers", allow_empty=True),
            bool(a.get("ended", True)) if isinstance(a, dict) else True,
        )
        for i, (text, a) in enumerate(zip(texts, found, strict=True), 1)
    )
    prompt = text_column(where, row, "prompt", allow_empty=True) if row.get("prompt") is not None else ""
    provenance = row.get("provenance")
    if isinstance(provenance, str):
        # tables hold it as text
        provenance = _object(provenance)
    known = (
        {k: v for k, v in provenance.items() if v is not None} if isinstance(provenance, dict) else {"source": source}
    )
    comparison = Comparison(0, prompt, answers, known)
    ranks = _numbers(where, row, "ranks", len(answers))
    said = str(row.get("said") or "ranked")
    if said not in ("ranked", "both_bad", "skip") or (said != "skip" and row.get("said") and not ranks):
        raise DataError(f"{where}: said should be ranked or both_bad, with ranks, or skip; found {said!r}")
    if ranks != ranked(ranks):
        raise DataError(
            f"{where}: ranks {list(ranks)} are none: each is the number of answers that are better, as in [0, 1, 1]"
        )
    kind = str(row.get("kind") or "label")
    if kind not in ("label", "repeat", "check", "verdict"):
        raise DataError(f"{where}: kind should be label, repeat, check or verdict, found {kind!r}")
    who = row.get("annotator")
    seconds = row.get("seconds")
    return Judged(
        comparison,
        ranks,
        who if isinstance(who, str) and who.strip() else annotator,
        said,
        kind,
        _numbers(where, row, "shown", len(answers)),
        str(row.get("reason") or ""),
        _numbers(where, row, "ratings", len(answers)),
        float(seconds) if isinstance(seconds, int | float) and seconds >= 0 else 0.0,
        str(row.get("created") or "")[:40],
    )


def _object(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _numbers(where: str, row: dict[str, Any], name: str, count: int) -> tuple[int, ...]:
    values = _list(row.get(name))
    if values and (len(values) != count or not all(isinstance(v, int) and not isinstance(v, bool) for v in values)):
        raise DataError(f"{where}: column {name!r} should be {count} whole numbers, one an answer; found {values!r}")
    return tuple(values)


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


# --- other tools' exports ---


def _texts(where: str, fields: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [text_column(where, fields, name, allow_empty=True) for name in names]


def _prompt_of(fields: dict[str, Any], answers: Sequence[str]) -> str:
    """The text beside the answers: a field called as prompts are, or the only one that is left."""
    rest = {k: v for k, v in fields.items() if k not in answers and isinstance(v, str)}
    for name in ("prompt", "instruction", "question", "context", "input"):
        if name in rest:
            return rest[name]
    return next(iter(rest.values())) if len(rest) == 1 else ""


def _label_studio(where: str, row: dict[str, Any], source: str) -> Iterator[Judged]:
    """A task with its annotations: ``pairwise`` results, whose two texts the task's data has by their names."""
    for annotation in _list(row["annotations"]):
        for result in _list(annotation.get("result")):
            if result.get("type") != "pairwise":
                continue
            names = str(result.get("to_name", "")).split(",")
            if len(names) != 2 or not all(name in row["data"] for name in names):
                columns = [k for k, v in row["data"].items() if isinstance(v, str)]
                numbered = [k for k in columns if k[-1:] in ("1", "2", "a", "b", "A", "B")]
                names = sorted(numbered)[:2] if len(numbered) == 2 else []
            if len(names) != 2:
                raise DataError(
                    f"{where}: cannot tell which of {', '.join(row['data'])} are the two answers; name the data's "
                    f"columns as the compared objects ({result.get('to_name')})"
                )
            left, right = _texts(where, row["data"], names)
            chosen = result.get("value", {}).get("selected")
            if chosen not in ("left", "right", "none", None):
                raise DataError(f"{where}: a pairwise result selects left or right, found {chosen!r}")
            ranks = {"left": (0, 1), "right": (1, 0)}.get(chosen or "", (0, 0))
            who = annotation.get("completed_by")
            who = (who.get("email") or who.get("id")) if isinstance(who, dict) else who
            skipped = bool(annotation.get("was_cancelled"))
            yield Judged(
                Comparison(0, _prompt_of(row["data"], names), (Answer(left), Answer(right)), {"source": source}),
                () if skipped else ranks,
                f"label-studio {who}" if who is not None else "label-studio",
                "skip" if skipped else "ranked",
                order=(0, 1),
                seconds=float(annotation.get("lead_time") or 0.0),
                created=str(annotation.get("created_at") or "")[:40],
            )


def _flat_argilla(row: dict[str, Any]) -> str:
    """The question of a row whose answers stand in a column of their own; empty where there is none."""
    for name, value in row.items():
        if (
            isinstance(value, list)
            and value
            and all(isinstance(v, dict) and "user_id" in v and "value" in v for v in value)
        ):
            return name
    return ""


def _argilla(where: str, fields: dict[str, Any], responses: dict[str, Any], source: str) -> Iterator[Judged]:
    """A record: fields, and for each question what people said, a field's name or a ranking of fields."""
    found = False
    for said in responses.values():
        for response in _list(said):
            named = _ranking(response.get("value"), fields)
            if named is None:
                continue
            found = True
            names = sorted(named, key=list(fields).index) if len(named) > 1 else _siblings(next(iter(named)), fields)
            if len(names) < 2:
                raise DataError(f"{where}: one answer alone ({', '.join(named)}) is no comparison")
            worst = max(named.values()) + 1
            places = [named.get(name, worst) for name in names]
            if response.get("status") not in (None, "submitted"):
                continue
            yield Judged(
                Comparison(
                    0,
                    _prompt_of(fields, names),
                    tuple(Answer(text) for text in _texts(where, fields, names)),
                    {"source": source},
                ),
                ranked(places),
                f"argilla {response.get('user_id')}",
                order=tuple(range(len(names))),
            )
    if not found:
        raise DataError(
            f"{where}: no response names the record's fields ({', '.join(fields)}); a pairwise question's answers do"
        )


def _ranking(value: Any, fields: dict[str, Any]) -> dict[str, int] | None:
    """Field -> rank; None where the value is about something else."""
    if isinstance(value, str):
        return {value: 0} if value in fields else None
    if isinstance(value, dict) and isinstance(value.get("value"), list):
        # a list of records becomes a record of lists in a table
        value = [dict(zip(value, parts, strict=False)) for parts in zip(*value.values(), strict=False)]
    named: dict[str, int] = {}
    for place, entry in enumerate(_list(value), 1):
        name, rank = (entry.get("value"), entry.get("rank", place)) if isinstance(entry, dict) else (entry, place)
        if name not in fields or not isinstance(rank, int):
            return None
        named[name] = rank
    return named or None


def _siblings(chosen: str, fields: dict[str, Any]) -> list[str]:
    """The fields that are called like the chosen one but for their number or letter."""
    stem = chosen.rstrip("0123456789")
    stem = stem if stem != chosen else chosen[:-1]
    return [name for name in fields if name.startswith(stem) and len(name) - len(stem) <= 2]
